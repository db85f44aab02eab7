"""The first half of the demo: all attempts make their model calls, spread over the workers.

The calls of one attempt follow each other, as each prompt holds the answer before; attempts run side by
side. The planned worker is killed at a moment when all it has in flight is announced and not captured:
then, and only then, its parent knows for certain which calls are lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gym_capture_redis.cli.demo_plan import Fault, Ledger, Outcome, Plan
from gym_capture_redis.cli.demo_pool import DemoError, Ended, Worker, WorkerPool
from gym_capture_redis.cli.demo_worker import Announced, Failed, Job, Logged, Message, Ready, Served
from gym_capture_redis.cli.served_calls import RecordedRollout

IN_FLIGHT_PER_WORKER = 16

_EXPECTED = {
    Fault.NONE: ((True,), Outcome.CAPTURED),
    Fault.REPEATED: ((True,), Outcome.CAPTURED),
    Fault.TOKENLESS: ((False,), Outcome.TOKENLESS),
    Fault.CONFLICT: ((True, False), Outcome.CONFLICT),
}
"""What a worker has to report of a served call, and what the ledger then says."""


@dataclass
class ServingTotals:
    """What was captured, and how long it took from the first call to the last."""

    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    killed_with: int = 0


class Serving:
    """Drives the workers through the plan and keeps the ledger."""

    def __init__(
        self,
        plan: Plan,
        pool: WorkerPool,
        recordings: Sequence[RecordedRollout],
        *,
        on_call: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._recordings = recordings
        self._on_call = on_call
        self._victim = pool.workers[plan.victim]
        self._held: set[Job] = set()
        self._waiting = deque(plan.attempts)
        self._open = 0
        self.ledger = Ledger(plan)
        self.totals = ServingTotals()
        self.log: list[str] = []

    async def run(self) -> None:
        """Return when every attempt has made all its calls.

        Raises:
            DemoError: a worker ended by itself, a call failed, or one had another end than planned.

        """
        await self._all_ready()
        started = time.perf_counter()
        for _ in range(IN_FLIGHT_PER_WORKER * len(self._pool.workers)):
            self._begin_attempt()
        while self._open:
            worker, message = await self._pool.events.get()
            await self._handle(worker, message)
        self.totals.seconds = time.perf_counter() - started

    async def _all_ready(self) -> None:
        missing = set(self._pool.workers)
        while missing:
            worker, message = await self._pool.events.get()
            match message:
                case Ready():
                    missing.discard(worker)
                case Ended():
                    raise DemoError(f"worker {worker.number} ended before it was ready")
                case _:
                    await self._handle(worker, message)

    async def _handle(self, worker: Worker, message: Message | Ended) -> None:
        match message:
            case Announced(job):
                self.ledger.record(job.attempt, job.call, Outcome.ANNOUNCED)
                self._held.add(job)
            case Served(job):
                worker.in_flight.discard(job)
                self._book(message)
                self._next_call(job)
            case Failed(job, error):
                raise DemoError(
                    f"call {job.call} of {job.attempt.rollout_id} failed on worker {worker.number}: {error}"
                )
            case Logged(text):
                self.log.append(text)
            case Ended():
                self._bury(worker)
        if self._all_held and self._victim.alive and self._victim.in_flight == self._held:
            await self._pool.kill(self._victim)

    def _begin_attempt(self) -> None:
        if self._waiting:
            self._open += 1
            self._assign(Job(self._waiting.popleft(), 0))

    def _next_call(self, job: Job) -> None:
        """Go on with the attempt, also after a lost call: a hole is hardest to see in the middle."""
        self._on_call()
        if job.call + 1 < job.attempt.call_count:
            self._assign(Job(job.attempt, job.call + 1))
        else:
            self._open -= 1
            self._begin_attempt()

    def _assign(self, job: Job) -> None:
        """Give the job to the next worker in turn; calls not begun by the killed one go to the others."""
        if job.fault is Fault.HELD:
            self._victim.give(job)
            return
        workers = self._pool.workers
        turn = job.attempt.number + job.call
        worker = workers[turn % len(workers)]
        if worker is self._victim and self._all_held:
            others = [other for other in workers if other is not self._victim]
            worker = others[turn % len(others)]
        worker.give(job)

    def _book(self, served: Served) -> None:
        """Write the call down and count its tokens.

        Raises:
            DemoError: the capture flow stored what it should not have, or the other way round.

        """
        job = served.job
        expected, outcome = _EXPECTED[job.fault]
        if served.committed != expected:
            raise DemoError(
                f"call {job.call} of {job.attempt.rollout_id} ({job.fault}): stored {served.committed} "
                f"instead of {expected}"
            )
        self.ledger.record(job.attempt, job.call, outcome)
        if served.committed[0]:
            self.totals.calls += 1
            self.totals.tokens += self._recordings[job.attempt.recording].token_count(job.call)

    def _bury(self, worker: Worker) -> None:
        if worker is not self._victim or worker.in_flight != self._held or not self._all_held:
            raise DemoError(f"worker {worker.number} ended in the middle of its work")
        self.totals.killed_with = len(self._held)
        for job in worker.in_flight:
            self.ledger.record(job.attempt, job.call, Outcome.LOST)
            self._next_call(job)
        worker.in_flight = set()

    @property
    def _all_held(self) -> bool:
        return len(self._held) == self._plan.held_count
