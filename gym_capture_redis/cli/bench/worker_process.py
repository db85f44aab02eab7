"""What a worker process of the benchmark does: the same as every other, from the same moment on.

The parent sends jobs through a pipe; each is prepared, begun at a common time, and answered.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from gym_capture_redis.cli.bench import floors
from gym_capture_redis.cli.bench.drive import keep_from_collector, put_all, read_all
from gym_capture_redis.cli.bench.peers.bare_redis import BareRedis
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.peers.peer import Peer
from gym_capture_redis.cli.bench.servers import Server
from gym_capture_redis.cli.bench.workload import Recipe, Workload

Pipe = Connection


class Job(StrEnum):
    """What all workers do at the same time."""

    PUT = "this package"
    PACK = "only packing"
    BARE = "bare redis-py"


@dataclass(frozen=True)
class Assignment:
    """The part of one worker: which rollouts, on which server. ``stored_bytes``: of a mean call."""

    url: str
    mark: str
    recipe: Recipe
    numbers: tuple[int, ...]
    stored_bytes: int


@dataclass(frozen=True)
class Ready:
    """The worker can begin."""


@dataclass(frozen=True)
class Done:
    """When it began and ended, on the monotonic clock that all processes share, and its calls."""

    begin: float
    end: float
    calls: int


@dataclass(frozen=True)
class Failed:
    """The worker cannot do its part."""

    error: str


def run_worker(pipe: Pipe, assignment: Assignment) -> None:
    """Do jobs until the pipe closes or says None. The entry point of the process."""
    try:
        asyncio.run(_work(pipe, assignment))
    except (EOFError, OSError):
        pass  # the parent has gone, and nobody is left to tell
    except Exception as error:  # noqa: BLE001 - the parent raises it
        pipe.send(Failed(f"{type(error).__name__}: {error}"))


async def _work(pipe: Pipe, assignment: Assignment) -> None:
    workload = Workload(assignment.recipe, assignment.numbers)
    keep_from_collector()
    server = Server(assignment.url, private=False)
    try:
        pipe.send(Ready())
        while (job := pipe.recv()) is not None:
            if job is Job.PACK:
                begin = _start(pipe)
                floors.packing_seconds(workload.rollouts)
                pipe.send(Done(begin, time.monotonic(), workload.calls))
            else:
                pipe.send(await _put(pipe, workload, _peer(job, server, assignment, workload)))
    finally:
        server.close()


def _peer(job: Job, server: Server, assignment: Assignment, workload: Workload) -> Peer:
    if job is Job.PUT:
        return OurTransport(server, assignment.mark)
    calls = ((entry.rollout_id, entry.model_call_id) for rollout in workload.rollouts for entry in rollout)
    return BareRedis(server, assignment.mark, dict.fromkeys(calls, assignment.stored_bytes))


async def _put(pipe: Pipe, workload: Workload, peer: Peer) -> Done:
    """Put all calls, and see afterwards that each is there."""
    try:
        await peer.prepare(workload.rollouts)
        begin = _start(pipe)
        await put_all(peer, workload.rollouts)
        end = time.monotonic()
        await read_all(peer, workload.rollouts)
    finally:
        await peer.clear()
    return Done(begin, end, workload.calls)


def _start(pipe: Pipe) -> float:
    """Say that all is prepared, and wait for the moment at which all begin."""
    pipe.send(Ready())
    at: Any = pipe.recv()
    if at is None:
        raise EOFError
    time.sleep(max(0.0, at - time.monotonic()))
    return time.monotonic()
