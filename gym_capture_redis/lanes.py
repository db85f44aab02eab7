"""Lanes: tasks that own one connection each and send whatever waits, in one pipeline.

Callers await a future; the socket belongs to a lane, so that a cancelled caller can never leave a
connection out of step.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as NoReplyError

from gym_capture_redis.batches import (
    MAX_BATCH_BYTES,
    MAX_BATCH_CALLS,
    answers_of,
    commands_of,
    grouped,
)
from gym_capture_redis.connection import Link
from gym_capture_redis.errors import BackendUnavailableError
from gym_capture_redis.faults import NotConfirmedError, NotSettledError, is_unknown_script
from gym_capture_redis.retry import attempt_s
from gym_capture_redis.scripts import Argument, Call, Dialect, Reply, Step
from gym_capture_redis.settings import ConnectionSettings
from gym_capture_redis.wire import Pipeline

MIN_SHARE_CALLS = 8

_CONFIRM_S = 1.0
"""How long steps that are put back wait for their copies."""

_NOTHING = Call(Step.PEEK, b"", ())

OpenLink = Callable[[], Awaitable[Link]]
"""Finds the server and connects."""


@dataclass
class Job:
    """A step on its way; ``by_source`` sends the whole script, ``deadline`` is in loop time.

    ``asking``: to a node of a Cluster to which the rollout is just moving. ``reply`` ends with the reply, or
    with whatever went wrong. ``sent``: some of it may have reached a server.
    """

    call: Call
    by_source: bool
    asking: bool
    deadline: float
    reply: asyncio.Future[Reply]
    sent: bool = False

    def answer(self, reply: Reply) -> None:
        """Give its caller the reply, unless that one has left."""
        if not self.reply.done():
            self._settle()
            self.reply.set_result(reply)

    def fail(self, error: BaseException) -> None:
        """Tell its caller what went wrong, unless that one has left."""
        if not self.reply.done():
            self._settle()
            self.reply.set_exception(error)

    def let_go(self, _: asyncio.Future[Reply]) -> None:
        """Keep nothing of the step: it is answered, or nobody waits for it any more."""
        self.call = _NOTHING

    def _settle(self) -> None:
        self.reply.remove_done_callback(self.let_go)  # done here, it takes no turn of the event loop
        self.call = _NOTHING


class _Begun(NamedTuple):
    """One step that was sent, and what its reply will come over."""

    job: Job
    sending: Sending
    link: Link
    pipeline: Pipeline

    async def finish(self) -> None:
        answers, confirmed = await self.link.finish(self.pipeline)
        self.sending.answer(answers, self.link.run_id, confirmed=confirmed)


@dataclass(eq=False)
class _Lane:
    """A lane: its connection, which is closed when ``renewals`` counts up, and what it waits for.

    ``begun`` was sent over the connection while the lane was waiting, and now waits for its reply.
    """

    renewals: int
    link: Link | None = None
    arrival: asyncio.Future[None] | None = None
    begun: _Begun | None = None


class Lanes:
    """``count`` lanes that share a queue. They begin with the first job."""

    def __init__(self, settings: ConnectionSettings, open_link: OpenLink, *, count: int, name: str) -> None:
        self._settings = settings
        self._one_key = settings.url.topology == "cluster"
        self._open_link = open_link
        self._count = count
        self._name = name
        self._jobs: deque[Job] = deque()
        self._idle: deque[_Lane] = deque()
        self._sending = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._renewals = 0
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for a reply."""
        return not self._jobs and not self._sending

    def submit(self, call: Call, *, by_source: bool, asking: bool, deadline: float) -> Job:
        """Queue a step.

        Raises:
            BackendUnavailableError: the lanes were closed.

        """
        if self._closed:
            raise closed_error()
        loop = asyncio.get_running_loop()
        if not self._tasks:
            self._tasks = [
                loop.create_task(self._run(), name=f"gym-capture-redis {self._name} {number}")
                for number in range(self._count)
            ]
        reply: asyncio.Future[Reply] = loop.create_future()
        job = Job(call, by_source, asking, deadline, reply)
        # A caller that left may leave megabytes behind, until a lane comes across its job.
        reply.add_done_callback(job.let_go)
        if not self._begin_alone(job):
            self._jobs.append(job)
            self._wake_one()
        return job

    def renew(self) -> None:
        """Use no connection of now for anything more: the server may have changed its role meanwhile."""
        self._renewals += 1

    async def close(self) -> None:
        """End the lanes and their connections. What still waits is answered with an error."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        _fail(self._jobs, closed_error())
        self._jobs.clear()

    async def _run(self) -> None:
        lane = _Lane(self._renewals)
        try:
            while not self._closed:  # what is awaited may have swallowed the cancellation
                await self._some_jobs(lane)
                await self._take_turn(lane)
            await _close(lane)
        except asyncio.CancelledError:
            if lane.begun is not None:
                self._sending -= 1
                _fail([lane.begun.job], _closed_before_an_answer())
            # Not in a finally: a lane whose loop is gone has nothing that it could await.
            await _close(lane)
            raise

    async def _take_turn(self, lane: _Lane) -> None:
        """Send what waits, or end what was begun. Nothing of it is kept afterwards."""
        begun, lane.begun = lane.begun, None
        batch = self._batch() if begun is None else [begun.job]
        if not batch:
            return
        self._sending += begun is None
        try:
            async with asyncio.timeout(self._attempt_s(batch)):
                await begun.finish() if begun is not None else await self._send(lane, batch)
        except Exception as error:  # noqa: BLE001 - it belongs to the callers; the lane lives on
            # Their own deadlines are theirs: here only this attempt has taken too long.
            _fail(batch, NoReplyError("no reply in time") if isinstance(error, TimeoutError) else error)
            await _close(lane)
        except asyncio.CancelledError:
            _fail(batch, _closed_before_an_answer())
            raise
        finally:
            self._sending -= 1

    async def _send(self, lane: _Lane, batch: Sequence[Job]) -> None:
        """Send a batch over the lane's connection, or a new one if there is none that is good."""
        if lane.renewals != self._renewals:
            lane.renewals = self._renewals
            await _close(lane)
        if lane.link is not None and not await lane.link.is_as_before():
            await _close(lane)
        lane.link = lane.link or await self._open_link()
        await send(lane.link, batch, one_key=self._one_key, confirm_s=self._attempt_s(batch) / 2)

    def _begin_alone(self, job: Job) -> bool:
        """Send a job at once over an idle lane, if there is nothing else under way that it could go with.

        So a step alone does not wait until the lane's task has its turn.
        """
        if self._jobs or self._sending or not self._idle or job.call.step.needs_settled_server:
            return False
        lane = self._idle[0]
        link = lane.link
        waiting = lane.arrival is not None and not lane.arrival.done()
        if not waiting or link is None or lane.renewals != self._renewals or not link.is_ready:
            return False
        sending = Sending.of([job], link.dialect, one_key=self._one_key)
        confirm_s = sending.confirm_s(self._attempt_s([job]) / 2)
        lane.begun = _Begun(job, sending, link, link.begin(sending.commands, confirm_s=confirm_s))
        self._sending += 1
        self._wake_one()
        return True

    def _wake_one(self) -> None:
        while self._idle:
            arrival = self._idle.popleft().arrival
            if arrival is not None and not arrival.done():  # else its lane was cancelled
                arrival.set_result(None)
                return

    async def _some_jobs(self, lane: _Lane) -> None:
        """Wait until there is a job; asyncio's queue cannot be left quietly once its loop is closed."""
        while not self._jobs and lane.begun is None:
            lane.arrival = asyncio.get_running_loop().create_future()
            self._idle.append(lane)
            await lane.arrival

    def _batch(self) -> list[Job]:
        """Take what waits, as far as it goes well together; callers that left are passed over.

        The other free lanes get their share: while the server works on one batch, the callers of another
        one go on, rather than all waiting for all.
        """
        share = -(-len(self._jobs) // max(1, self._count - self._sending))
        most = min(MAX_BATCH_CALLS, max(share, MIN_SHARE_CALLS))
        batch: list[Job] = []
        nbytes = 0
        while self._jobs and len(batch) < most and nbytes < MAX_BATCH_BYTES:
            job = self._jobs.popleft()
            if not job.reply.done():
                batch.append(job)
                nbytes += job.call.nbytes + job.call.reply_bytes
        return batch

    def _attempt_s(self, batch: Sequence[Job]) -> float:
        left_s = max(job.deadline for job in batch) - asyncio.get_running_loop().time()
        nbytes = sum(job.call.nbytes for job in batch)
        return attempt_s(left_s, timeout_s=self._settings.timeout_s, nbytes=nbytes)


def closed_error() -> BackendUnavailableError:
    """What is said to whoever comes after the client was closed, or waited when it was."""
    return BackendUnavailableError("the client was closed meanwhile")


def _closed_before_an_answer() -> BackendUnavailableError:
    return BackendUnavailableError("the client was closed before an answer came")


class Sending(NamedTuple):
    """Steps as one pipeline of few script calls."""

    groups: list[list[Job]]
    sent: list[list[tuple[Argument, ...]]]
    """The commands of each group."""
    writing: list[bool]
    """Of each group; later its caller may have left, and the call."""

    @classmethod
    def of(cls, batch: Sequence[Job], dialect: Dialect, *, one_key: bool) -> Sending:
        """What to send for those whose callers still wait; it counts as sent from now on."""
        groups = grouped([job for job in batch if not job.reply.done()], one_key=one_key)
        sent = [commands_of(group, dialect) for group in groups]
        for job in chain.from_iterable(groups):
            job.sent = True
        return cls(groups, sent, [group[0].call.step.writes for group in groups])

    @property
    def commands(self) -> list[tuple[Argument, ...]]:
        """All commands, in order."""
        return list(chain.from_iterable(self.sent))

    def confirm_s(self, most_s: float) -> float | None:
        """How long to wait until what is written is as durable as promised; None if nothing is."""
        return most_s if any(self.writing) else None

    def answer(self, answers: Sequence[Any], run_id: str, *, confirmed: bool) -> None:
        """Give each job its own reply."""
        read = answers_of(self.groups, self.sent, answers, run_id)
        for group, writes, answer in zip(self.groups, self.writing, read, strict=True):
            _answer(group, answer, confirmed=confirmed or not writes)


async def send(link: Link, batch: Sequence[Job], *, one_key: bool, confirm_s: float) -> None:
    """Send the batch as one pipeline of few script calls, and give each job its own reply.

    With ``one_key`` each script call is about one rollout, as in a Cluster, where others are in other slots.
    ``confirm_s``: how long to wait until what is written is as durable as promised.
    """
    if link.settles_at_s > time.monotonic():
        unsettled = [job for job in batch if job.call.step.needs_settled_server]
        _fail(unsettled, NotSettledError(link.settles_at_s))
    # While the connection was made some callers may have left, and their steps with them.
    sending = Sending.of(batch, link.dialect, one_key=one_key)
    answers, confirmed = await link.pipeline(sending.commands, confirm_s=sending.confirm_s(confirm_s))
    sending.answer(answers, link.run_id, confirmed=confirmed)


async def exchange(link: Link, calls: Sequence[Call], *, one_key: bool) -> list[Reply | Exception]:
    """Run steps over a connection at once, outside the lanes, and return what each was answered."""
    jobs = [_outside(call, by_source=False) for call in calls]
    try:
        await send(link, jobs, one_key=one_key, confirm_s=_CONFIRM_S)
        unknown = [
            number for number, job in enumerate(jobs) if is_unknown_script(job.reply.exception() or OSError())
        ]
        for number in unknown:
            jobs[number] = _outside(calls[number], by_source=True)
        if unknown:
            await send(link, [jobs[number] for number in unknown], one_key=one_key, confirm_s=_CONFIRM_S)
    finally:
        outcomes = [_outcome(job.reply) for job in jobs]
    return outcomes


def _outside(call: Call, *, by_source: bool) -> Job:
    """A step that waits in no lane."""
    reply = asyncio.get_running_loop().create_future()
    return Job(call, by_source=by_source, asking=False, deadline=0.0, reply=reply)


def _answer(
    group: Sequence[Job], answer: Exception | list[Reply | ResponseError], *, confirmed: bool
) -> None:
    if isinstance(answer, Exception):
        _fail(group, answer)
        return
    for job, reply in zip(group, answer, strict=True):
        if isinstance(reply, Exception):
            job.fail(reply)
        elif not confirmed:
            job.fail(NotConfirmedError())
        else:
            job.answer(reply)


def _outcome(reply: asyncio.Future[Reply]) -> Reply | Exception:
    """What a step was answered, taken note of: asyncio complains of an error that nobody looked at."""
    if not reply.done():
        return NoReplyError("no reply")
    error = reply.exception()
    return error if isinstance(error, Exception) else reply.result()


async def _close(lane: _Lane) -> None:
    """Close a connection that failed or is not needed; replies may still be under way on it."""
    link, lane.link = lane.link, None
    if link is not None:
        await link.close()


def _fail(batch: Iterable[Job], error: BaseException) -> None:
    for job in batch:
        job.fail(error)
