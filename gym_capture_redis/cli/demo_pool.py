"""The worker processes of the demo, as their parent sees them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from typing import Self

from gym_capture_redis.cli.demo_worker import Job, Message, Pipe, Target, run_worker
from gym_capture_redis.cli.interrupts import interrupts_held

ENDING_S = 10.0
STOPPING_S = 1.5
"""How long workers get to end by themselves where the demo was stopped or has failed."""


class DemoError(Exception):
    """The demo cannot go on; the message says why in one line."""


@dataclass(frozen=True)
class Ended:
    """The worker's pipe closed: it is gone."""


@dataclass(eq=False)
class Worker:
    """One process, and the jobs it was given and has not answered yet."""

    number: int
    process: SpawnProcess
    pipe: Pipe
    in_flight: set[Job] = field(default_factory=set)
    alive: bool = True

    def give(self, job: Job) -> None:
        """Send a job. One that no longer arrives is in flight all the same, until `Ended` comes."""
        self.in_flight.add(job)
        with contextlib.suppress(OSError):
            self.pipe.send(job)


class WorkerPool:
    """Starts the processes, collects their messages in ``events`` and ends them, whatever happens.

    Every worker gets its end of one pipe and no other, so the pipe closes when either side dies.
    """

    def __init__(self, count: int, target: Target) -> None:
        self._count = count
        self._target = target
        self.workers: list[Worker] = []
        self.events: asyncio.Queue[tuple[Worker, Message | Ended]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        """Start all processes; each says when it is ready."""
        try:
            with interrupts_held():
                for number in range(self._count):
                    self.workers.append(self._spawn(number))
        except BaseException:
            await self.close(STOPPING_S)
            raise
        loop = asyncio.get_running_loop()
        for worker in self.workers:
            loop.add_reader(worker.pipe.fileno(), self._receive, worker)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all processes."""
        await self.close(ENDING_S if kind is None else STOPPING_S)

    async def kill(self, worker: Worker) -> None:
        """Kill a worker as the kernel's out-of-memory killer would; `Ended` follows."""
        worker.process.kill()
        await asyncio.to_thread(worker.process.join, ENDING_S)
        if worker.process.exitcode != -signal.SIGKILL:
            raise DemoError(f"worker {worker.number} was to be killed, but ended by itself")

    async def close(self, patience_s: float) -> None:
        """End all workers, and kill those that have not ended within ``patience_s``. Idempotent."""
        for worker in self.workers:
            self._let_go(worker)
        await asyncio.to_thread(self._join_all, time.monotonic() + patience_s)

    def _spawn(self, number: int) -> Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run_worker, args=(theirs, self._target), name=f"demo-worker-{number}", daemon=True
        )
        with theirs:
            process.start()
        return Worker(number, process, ours)

    def _receive(self, worker: Worker) -> None:
        try:
            while worker.pipe.poll():
                self.events.put_nowait((worker, worker.pipe.recv()))
        except (EOFError, OSError):
            self._let_go(worker)
            self.events.put_nowait((worker, Ended()))

    def _let_go(self, worker: Worker) -> None:
        if worker.alive:
            worker.alive = False
            asyncio.get_running_loop().remove_reader(worker.pipe.fileno())
            worker.pipe.close()

    def _join_all(self, deadline_s: float) -> None:
        for worker in self.workers:
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
