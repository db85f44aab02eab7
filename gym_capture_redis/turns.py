"""Threads take turns at sending what all of them wait for, so that many steps share a round trip.

There is no thread for it. Whoever comes while a turn is free takes it and sends what waits. Whoever comes
later waits until another thread has sent its steps with its own, or leaves it the turn. What is sent, and
how, is none of this module's business.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from redis.exceptions import TimeoutError as NoReplyError

from gym_capture_redis.batches import MAX_BATCH_BYTES, MAX_BATCH_CALLS
from gym_capture_redis.scripts import Call, Reply, Step


@dataclass
class Sent:
    """A step on its way, as ``batches`` takes it, and what it was answered."""

    call: Call
    by_source: bool
    asking: bool
    answer: Reply | Exception = field(default_factory=lambda: NoReplyError("no reply in time"))


class Job:
    """Steps of one thread, sent together and in this order; ``deadline`` is in ``time.monotonic``.

    ``sent``: some of it may have reached a server. Whoever sends it and the thread that leaves it agree on
    that: it is sent or left, never both.
    """

    def __init__(self, calls: Sequence[Call], *, by_source: bool, asking: bool, deadline: float) -> None:
        self.steps = [Sent(call, by_source, asking) for call in calls]
        self.deadline = deadline
        self.nbytes = sum(call.nbytes + call.reply_bytes for call in calls)
        self.woken = threading.Event()
        self.has_turn = False
        self.sent = False
        self._settled = threading.Lock()  # by the first who takes it, for good

    def may_be_sent(self) -> bool:
        """Whether its thread still waits for it; then it counts as sent."""
        if self._settled.acquire(blocking=False):
            self.sent = True
        return self.sent

    def leave(self) -> None:
        """Nobody waits for it any more: unless it is being sent by now, it never is."""
        if not self._settled.acquire(blocking=False):
            self.sent = True  # or about to be

    def fail(self, error: Exception) -> None:
        """Give every step of it this answer."""
        for step in self.steps:
            step.answer = error

    def answers(self) -> list[Reply | Exception]:
        """What its steps were answered."""
        return [step.answer for step in self.steps]


class Turns:
    """At most ``count`` threads send at a time. ``send`` gives the steps of jobs their answers.

    It ends by the deadline of the first of them, and answers all in any case.
    """

    def __init__(self, count: int, send: Callable[[Sequence[Job]], None]) -> None:
        self._free = count
        self._send = send
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()

    def run(self, job: Job) -> list[Reply | Exception]:
        """Have the job sent, by this thread or another, and return what its steps were answered."""
        with self._lock:
            job.has_turn = self._free > 0  # then nobody waits
            if job.has_turn:
                self._free -= 1
            else:
                self._waiting.append(job)
        if not job.has_turn:
            self._wait(job)
        if job.has_turn:
            self._take_turn(job)
        return job.answers()

    def _wait(self, job: Job) -> None:
        """Wait until the job was sent, has the turn, or is too late; the turn may come in the last moment."""
        try:
            job.woken.wait(max(0.0, job.deadline - time.monotonic()))
        except BaseException:  # interrupted
            self._leave(job)
            if job.has_turn:
                with self._lock:
                    self._pass_on()
            raise
        self._leave(job)

    def _leave(self, job: Job) -> None:
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)
        if not job.has_turn:
            job.leave()

    def _take_turn(self, job: Job) -> None:
        batch = [job]
        try:
            with self._lock:
                batch += self._company(job)
            self._send(batch)
        finally:
            for other in batch[1:]:
                other.woken.set()
            with self._lock:
                self._pass_on()

    def _company(self, job: Job) -> list[Job]:
        """Take what waits, as far as it goes well together with the job."""
        company: list[Job] = []
        steps, nbytes = len(job.steps), job.nbytes
        while self._waiting and steps < MAX_BATCH_CALLS and nbytes < MAX_BATCH_BYTES:
            company.append(self._waiting.popleft())
            steps += len(company[-1].steps)
            nbytes += company[-1].nbytes
        return company

    def _pass_on(self) -> None:
        """Give the turn to the one that has waited longest, else to whoever comes."""
        if self._waiting:
            job = self._waiting.popleft()
            job.has_turn = True
            job.woken.set()
        else:
            self._free += 1


def in_order(jobs: Sequence[Job]) -> list[Sent]:
    """The steps of all jobs, parts first: steps of one kind go together, and a put needs its parts."""
    steps = [step for job in jobs for step in job.steps]
    return sorted(steps, key=lambda each: each.call.step is not Step.STAGE)
