"""The worker processes of the benchmark, as their parent sees them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import Any

from gym_capture_redis.cli.bench.worker_process import Assignment, Done, Failed, Job, Pipe, run_worker
from gym_capture_redis.cli.interrupts import interrupts_held

ENDING_S = 20.0
"""Enough to finish the job in hand and to delete what it stored."""
START_IN_S = 0.05


class CrewError(Exception):
    """A worker process failed; the message says how."""


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    pipe: Pipe


class Crew:
    """All workers. They do one job at a time, together."""

    def __init__(self, workers: list[_Worker]) -> None:
        self._workers = workers

    async def run(self, job: Job) -> float:
        """Let all of them do it from the same moment on; calls per second, of all together."""
        self._tell_all(job)
        await self.hear_all()
        self._tell_all(time.monotonic() + START_IN_S)
        done: list[Done] = await self.hear_all()
        seconds = max(one.end for one in done) - min(one.begin for one in done)
        return sum(one.calls for one in done) / seconds

    async def hear_all(self) -> list[Any]:
        """One answer of each; raises CrewError where one failed."""
        return await asyncio.gather(*(asyncio.to_thread(_answer_of, worker) for worker in self._workers))

    def _tell_all(self, message: Any) -> None:
        for worker in self._workers:
            worker.pipe.send(message)

    def end(self) -> None:
        """Let each finish what it is at, and wait for it."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        deadline = time.monotonic() + ENDING_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()


@contextlib.asynccontextmanager
async def crew_of(assignments: list[Assignment]) -> AsyncIterator[Crew]:
    """Start a process for each assignment; all are ended with the context."""
    workers: list[_Worker] = []
    crew = Crew(workers)
    try:
        with interrupts_held():
            workers.extend(map(_spawn, assignments))
        await crew.hear_all()
        yield crew
    finally:
        crew.end()


def _spawn(assignment: Assignment) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_worker, args=(theirs, assignment), daemon=True)
    with theirs:
        process.start()
    return _Worker(process, ours)


def _answer_of(worker: _Worker) -> Any:
    try:
        answer = worker.pipe.recv()
    except (EOFError, OSError):
        raise CrewError("a worker process ended before its time") from None
    if isinstance(answer, Failed):
        raise CrewError(f"a worker process failed: {answer.error}")
    return answer
