"""Runs steps: a fixed set of connections owned by tasks, and one loop of retries with a deadline.

Callers await a future; the socket belongs to a lane, so that a cancelled caller can never leave a
connection out of step. Whatever waits when a lane is free is sent in one pipeline.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from gym_capture_redis.connection import EmbeddedLease, Link
from gym_capture_redis.errors import BackendUnavailableError, CaptureError
from gym_capture_redis.faults import final_error, is_transient, is_unknown_script
from gym_capture_redis.scripts import Call, Reply
from gym_capture_redis.settings import ConnectionSettings

MAX_BATCH_CALLS = 64
MAX_BATCH_BYTES = 2**20
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0

_INHERITED: list[dict[asyncio.AbstractEventLoop, Executor]] = []


@dataclass(frozen=True)
class Subject:
    """What a step is about, for messages."""

    rollout_id: str
    model_call_id: str | None = None

    def __str__(self) -> str:
        """In words."""
        call = f"call {self.model_call_id!r} of " if self.model_call_id is not None else ""
        return f"{call}rollout {self.rollout_id}"


@dataclass(order=True)
class _Job:
    """A step on its way. Urgent ones (rank 0) overtake."""

    rank: int
    number: int
    call: Call = field(compare=False)
    by_source: bool = field(compare=False)
    deadline: float = field(compare=False)
    future: asyncio.Future[Reply] = field(compare=False)


class Executor:
    """Runs steps on ``connections`` lanes. Belongs to one event loop; opens nothing until used."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._server = str(settings.url)
        self._queue: asyncio.PriorityQueue[_Job] = asyncio.PriorityQueue()
        self._numbers = count()
        self._lanes: list[asyncio.Task[None]] = []
        self._embedded = EmbeddedLease(settings)

    def deadline(self) -> float:
        """Loop time at which a call that begins now has to end."""
        return asyncio.get_running_loop().time() + self._settings.timeout_s

    async def run(self, call: Call, subject: Subject, *, deadline: float, urgent: bool = False) -> Reply:
        """Run one step, sending the same bytes again until it is answered or ``deadline`` has passed.

        Raises:
            BackendUnavailableError: no answer in time; the step may or may not have been applied.
            CaptureError: what the server's refusal means (see ``faults.final_error``).

        """
        by_source, longest_pause_s, last = False, _FIRST_PAUSE_S / 2, None
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._submit(call, deadline, by_source=by_source, urgent=urgent)
            except Exception as error:  # noqa: BLE001 - sorted out here, each kind by name
                if isinstance(error, TimeoutError):
                    raise self._no_answer(subject, last) from (last or error)
                if is_unknown_script(error) and not by_source:
                    by_source = True
                    continue
                if not is_transient(error):
                    raise _about(subject, final_error(error, self._server)) from None
                last = error
            longest_pause_s = min(2 * longest_pause_s, _LONGEST_PAUSE_S)
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.sleep(min(random.uniform(0, longest_pause_s), left_s))  # noqa: S311 - jitter

    async def close(self) -> None:
        """End the lanes and their connections. What still waits is answered with an error."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        while not self._queue.empty():
            _fail(self._queue.get_nowait(), BackendUnavailableError("the client was closed"))
        await self._embedded.release()

    def _submit(self, call: Call, deadline: float, *, by_source: bool, urgent: bool) -> asyncio.Future[Reply]:
        loop = asyncio.get_running_loop()
        if not self._lanes:
            self._lanes = [
                loop.create_task(self._lane(), name=f"gym-capture-redis lane {number}")
                for number in range(self._settings.connections)
            ]
        future: asyncio.Future[Reply] = loop.create_future()
        future.add_done_callback(_retrieve)
        job = _Job(0 if urgent else 1, next(self._numbers), call, by_source, deadline, future)
        self._queue.put_nowait(job)
        return future

    async def _lane(self) -> None:
        link: Link | None = None
        try:
            while True:
                batch = self._batch(await self._queue.get())
                if not batch:
                    continue
                try:
                    async with asyncio.timeout_at(max(job.deadline for job in batch)):
                        link = link or Link(self._settings, await self._embedded.acquire())
                        await self._send(link, batch)
                except Exception as error:  # noqa: BLE001 - it belongs to the callers; the lane lives on
                    _fail_all(batch, error)
                    await _close(link)
                    link = None
                except BaseException:
                    _fail_all(batch, BackendUnavailableError("the client was closed before an answer came"))
                    raise
        finally:
            await _close(link)

    def _batch(self, first: _Job) -> list[_Job]:
        """Take what waits, as far as it goes well together; callers that left are passed over."""
        batch = [first] if not first.future.done() else []
        nbytes = first.call.nbytes
        while len(batch) < MAX_BATCH_CALLS and nbytes < MAX_BATCH_BYTES and not self._queue.empty():
            job = self._queue.get_nowait()
            if not job.future.done():
                batch.append(job)
                nbytes += job.call.nbytes
        return batch

    async def _send(self, link: Link, batch: list[_Job]) -> None:
        replies = await link.pipeline(
            [job.call.command(flagged=link.flagged, by_source=job.by_source) for job in batch]
        )
        for job, raw in zip(batch, replies, strict=True):
            if isinstance(raw, Exception):
                _fail(job, raw)
            elif not job.future.done():
                _answer(job, raw, link.run_id)

    def _no_answer(self, subject: Subject, last: BaseException | None) -> BackendUnavailableError:
        why = f" (last: {type(last).__name__})" if last is not None else ""
        return BackendUnavailableError(
            f"{self._server} gave no answer within {self._settings.timeout_s:g} s{why}; "
            f"the step on {subject} may or may not have been applied, and repeating it is safe",
            rollout_id=subject.rollout_id,
            model_call_id=subject.model_call_id,
        )


class PerLoop:
    """One executor for each event loop, none of them inherited over a fork."""

    def __init__(self, make: Callable[[], Executor]) -> None:
        self._make = make
        self._pid = os.getpid()
        self._executors: dict[asyncio.AbstractEventLoop, Executor] = {}

    def get(self) -> Executor:
        """The executor of the running loop, made at first use."""
        if self._pid != os.getpid():
            # The parent's sockets are not ours to use or to close, not even by garbage collection.
            _INHERITED.append(self._executors)
            self._pid, self._executors = os.getpid(), {}
        loop = asyncio.get_running_loop()
        executor = self._executors.get(loop)
        if executor is None:
            # One at a time: another thread may add its own loop to the same dict meanwhile.
            for other in [kept for kept in list(self._executors) if kept.is_closed()]:
                self._executors.pop(other, None)
            executor = self._executors[loop] = self._make()
        return executor

    async def close(self) -> None:
        """Close the running loop's executor; those of other loops end with their loops."""
        executor = self._executors.pop(asyncio.get_running_loop(), None) if self._pid == os.getpid() else None
        if executor is not None:
            await executor.close()


async def _close(link: Link | None) -> None:
    """Close a connection that failed or is not needed; replies may still be under way on it."""
    if link is not None:
        await link.close()


def _retrieve(future: asyncio.Future[Reply]) -> None:
    """Look at the outcome, so that asyncio does not report one whose caller was cancelled."""
    if not future.cancelled():
        future.exception()


def _answer(job: _Job, raw: Any, run_id: str) -> None:
    try:
        job.future.set_result(Reply.parse(raw, run_id))
    except CaptureError as error:
        job.future.set_exception(error)


def _fail(job: _Job, error: BaseException) -> None:
    if not job.future.done():
        job.future.set_exception(error)


def _fail_all(batch: list[_Job], error: BaseException) -> None:
    for job in batch:
        _fail(job, error)


def _about(subject: Subject, error: CaptureError) -> CaptureError:
    """A copy of ``error`` that says what it is about; one error object may answer a whole batch."""
    return type(error)(
        f"{error} ({subject})", rollout_id=subject.rollout_id, model_call_id=subject.model_call_id
    )
