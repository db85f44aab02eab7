"""Processes that write rollouts and keep a ledger; they may be killed at any time."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

from support.ledger import Ledger, RecordedSink
from support.sample_entries import sample_entry
from support.sequences import random_ids

from gym_capture_redis.records import TokenEntry
from gym_capture_redis.sink import RedisTokenSink

CONVERSATION = random_ids(2_000)
TURN_IDS = 250
TURNS = 8
REFUSED_ONE_IN = 8
PAUSE_S = 0.05
STOP_TIMEOUT_S = 60.0


class Job(Protocol):
    """What a process may be told to do; it must be picklable."""

    async def run(self, name: str) -> None:
        """Do it, in the process of this name."""


@dataclass(frozen=True)
class Work:
    """``writers`` tasks that make ``calls`` calls each, one after the other, in all of the rollouts in turn.

    ``ballast_bytes`` is text that each record carries along. With ``until``, the tasks go on, more slowly,
    until that file is there, and then once through all rollouts.
    """

    url: str
    ledger: Path
    rollouts: tuple[str, ...]
    writers: int
    calls: int
    ballast_bytes: int = 0
    until: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    async def run(self, name: str) -> None:
        ledger = Ledger(self.ledger)
        async with RedisTokenSink(self.url, **self.settings) as sink, asyncio.TaskGroup() as group:
            for writer in range(self.writers):
                group.create_task(self._write(RecordedSink(sink, ledger), f"{name}.{writer}", writer))
        ledger.close()

    async def _write(self, sink: RecordedSink, name: str, first: int) -> None:
        for number in self._numbers():
            rollout = self.rollouts[(first + number) % len(self.rollouts)]
            entry = entry_of(rollout, f"{name}.{number}", turn=number, ballast_bytes=self.ballast_bytes)
            await capture(sink, entry, refused=number % REFUSED_ONE_IN == REFUSED_ONE_IN - 1)
            if number >= self.calls:
                await asyncio.sleep(PAUSE_S)

    def _numbers(self) -> Iterator[int]:
        yield from range(self.calls)
        if (until := self.until) is not None:
            more = itertools.count(self.calls)
            yield from itertools.takewhile(lambda _: not until.exists(), more)
            yield from itertools.islice(more, len(self.rollouts))


async def capture(sink: RecordedSink, entry: TokenEntry, *, refused: bool = False) -> None:
    """One model call, as an inference worker makes it."""
    if not await sink.announce(entry):
        return
    if refused:
        await sink.refuse(entry.rollout_id, entry.model_call_id)
    else:
        await sink.put(entry)


def entry_of(rollout: str, call: str, *, turn: int = 0, ballast_bytes: int = 0) -> TokenEntry:
    """An entry that could be of no other call, and that shares the beginning of its prompt with many."""
    return sample_entry(
        rollout,
        call,
        prompt_token_ids=[*CONVERSATION[: TURN_IDS * (turn % TURNS)], *call.encode()],
        response_id=f"{rollout}/{call}",
        ballast="x" * ballast_bytes,
    )


class WriterProcess:
    """One process, one job at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name), daemon=True)
        self._process.start()
        self._is_ready = False
        theirs.close()

    def wait_until_ready(self) -> None:
        """Until it has imported everything, which takes a while on a busy machine."""
        if not self._is_ready:
            self._connection.recv()
            self._is_ready = True

    def start(self, job: Job) -> None:
        self._connection.send(job)

    def wait(self) -> None:
        """Until the job is done; what went wrong there is raised here."""
        self.wait_until_ready()
        error = self._connection.recv()
        if error is not None:
            raise error

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self._connection.send(None)
            self._process.join(STOP_TIMEOUT_S)
        self._connection.close()
        if self._process.is_alive():
            self.kill()
        self._process.close()


def _serve(connection: Connection, name: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever started it
    with connection:
        connection.send(None)
        while (job := connection.recv()) is not None:
            try:
                asyncio.run(job.run(name))
            except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
                connection.send(RuntimeError(f"process {name}: {error!r}"))
            else:
                connection.send(None)


async def all_work(processes: Iterable[WriterProcess], job: Job) -> None:
    """The same in every process, under its own name; returns when all of it is done."""
    for process in processes:
        process.start(job)
    await asyncio.gather(*(asyncio.to_thread(process.wait) for process in processes))
