"""Making marks: at once, or later, from the spill directory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from gym_capture_redis import scripts
from gym_capture_redis.errors import CorruptRecordError, UnsupportedFormatError
from gym_capture_redis.executor import Executor
from gym_capture_redis.keys import new_mark_id, new_name, rollout_key
from gym_capture_redis.marks import Mark, Target
from gym_capture_redis.spill import Spill, log_lost
from gym_capture_redis.subject import Subject

logger = logging.getLogger(__name__)

SPILL_TIMEOUT_S = 5.0
"""How long a caller waits for the disk, after it has waited for Redis."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 10.0

T = TypeVar("T")


class _UnusableError(Exception):
    """The directory could not be looked into."""

    def __init__(self, why: OSError) -> None:
        super().__init__(why)
        self.why = why


def new_mark(target: Target, rollout_id: str, model_call_id: str, announced: scripts.Reply | None) -> Mark:
    """A mark of now, for the attempt that the call was announced to, if it was announced here."""
    return Mark(
        target=target,
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        incarnation=announced.incarnation if announced else "",
        run_id=announced.run_id if announced else "",
        at_ms=time.time_ns() // 1_000_000,
        mark_id=new_mark_id(),
    )


async def make_mark(
    executor: Executor, mark: Mark, *, deadline: float, has_moved_on: Callable[[], bool] = lambda: False
) -> scripts.Reply:
    """Make the mark on its attempt, or on whichever is there if that one may have been forgotten.

    ``has_moved_on`` says whether the call may be one of a later attempt.

    Raises:
        CaptureError: as ``Executor.run``.

    """
    reply = await _run(executor, mark, mark.incarnation, deadline)
    if reply.code == "RETIRED" and mark.incarnation and (mark.run_id != reply.run_id or has_moved_on()):
        # Another server answers now: it need not know the attempt, and what it forgot must show. Or the
        # call may be one of the attempt that this process works on by now: rather one mark too many.
        reply = await _run(executor, mark, "", deadline)
    return reply


async def _run(executor: Executor, mark: Mark, incarnation: str, deadline: float) -> scripts.Reply:
    call = scripts.mark(
        rollout_key(mark.target.namespace, mark.rollout_id),
        mark.model_call_id,
        new_incarnation=new_name(),
        incarnation=incarnation,
        mark_id=mark.mark_id,
    )
    subject = Subject(mark.rollout_id, mark.model_call_id)
    return await executor.run(call, subject, deadline=deadline, urgent=True)


async def keep(spill: Spill, mark: Mark, replay: Replay | None) -> bool:
    """Append the mark to the spill directory, and wake ``replay`` then.

    False: it is not known to be on disk, and that was logged.
    """
    try:
        kept = spill.add(mark)
    except RuntimeError as error:  # no thread can be started, or the interpreter ends
        log_lost(mark, error)
        return False
    on_disk = asyncio.wrap_future(kept)
    if replay is not None:
        on_disk.add_done_callback(lambda _: replay.wake())  # also if the caller does not wait for it
    await asyncio.wait({on_disk}, timeout=SPILL_TIMEOUT_S)
    if not kept.done():
        log_lost(mark, f"{spill.path} did not answer within {SPILL_TIMEOUT_S:g} s")
        return False
    return kept.result()


class Replay:
    """Makes the spilled marks of one target, in a task of one event loop that ends when none is left.

    Whoever makes them holds a lock, so that each is made by one process, in order. Marks have ids: one that
    was made, but not taken out of its file before the process was killed, is answered SAME the next time.
    """

    def __init__(self, executor: Executor, spill: Spill, target: Target) -> None:
        self._executor = executor
        self._spill = spill
        self._target = target
        self._task: asyncio.Task[None] | None = None
        self._woken = False
        self._stopped = False
        self._said = ""

    def wake(self) -> None:
        """There may be marks to make."""
        if self._stopped:
            return
        self._woken = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="gym-capture-redis replay")

    async def stop(self) -> None:
        """End the task for good, and what it does in the directory. What it has not made stays there."""
        self._stopped = True
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            last_work = asyncio.wrap_future(self._spill.threads.submit(bool))
            await asyncio.wait({last_work}, timeout=SPILL_TIMEOUT_S)

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._woken = False
            try:
                done = await self._round()
            except _UnusableError as error:
                self._say(
                    f"The spill directory {self._spill.path} cannot be used; marks that Redis does not take "
                    "fail, and any that wait there stay",
                    error.why,
                )
                done = False
            except Exception as error:  # noqa: BLE001 - it is said, and tried again: nobody else would
                self._say_marks_wait(error)
                done = False
            if done and not self._woken:
                return
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))  # noqa: S311 - jitter
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _round(self) -> bool:
        """Make what can be made. True: nothing is left."""
        directory = self._spill.directory
        try:
            await self._offload(directory.prepare)
            waiting = await self._offload(lambda: directory.scan(self._target))
        except OSError as error:
            raise _UnusableError(error) from error
        if not waiting:
            return True
        lock = directory.lock_for(self._target)
        threads = self._spill.threads
        try:
            if not await self._offload(lock.take):
                return False
            # Once more: another process may have made some meanwhile.
            waiting = await self._offload(lambda: directory.scan(self._target))
            outcomes = [await self._make_all(file.name, file.marks) for file in waiting]
        finally:
            # The same thread has taken it, or is about to: it lets go afterwards.
            with contextlib.suppress(RuntimeError):
                threads.submit(lock.release)
        return all(outcomes)

    async def _make_all(self, name: str, marks: list[Mark]) -> bool:
        """Make the marks of one file, and take them out of it."""
        made: set[str] = set()
        try:
            for mark in marks:
                if await self._make(mark):
                    made.add(mark.mark_id)
        finally:
            settled: Future[bool] = self._spill.threads.submit(self._spill.directory.settle, name, made)
        return await asyncio.wrap_future(settled) and len(made) == len(marks)

    async def _make(self, mark: Mark) -> bool:
        """Whether there is nothing more to do for this mark."""
        try:
            reply = await make_mark(self._executor, mark, deadline=self._executor.deadline())
        except (CorruptRecordError, UnsupportedFormatError) as error:
            self._say_marks_wait(error)  # a matter of this rollout alone: the others go on
            return False
        if reply.code == "RETIRED":
            logger.info(
                "Rollout %s was retired, or its id used again, before a spilled mark of it (call %r) "
                "could be made; nothing was touched.",
                mark.rollout_id,
                mark.model_call_id,
            )
        else:
            logger.info(
                "Rollout %s: the spilled mark of call %r is in Redis now.",
                mark.rollout_id,
                mark.model_call_id,
            )
        return True

    async def _offload(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._spill.threads, work)

    def _say_marks_wait(self, error: Exception) -> None:
        self._say(f"Marks in the spill directory {self._spill.path} wait", error)

    def _say(self, what: str, error: Exception) -> None:
        """Log what is the matter with the directory, once for each reason."""
        text = f"{type(error).__name__}: {error}"
        if text != self._said:
            self._said = text
            logger.warning("%s: %s", what, text)
