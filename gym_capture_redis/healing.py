"""Puts back what a server forgot, and marks what nobody can put back. How steps are sent is the caller's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from itertools import islice

from gym_capture_redis import scripts
from gym_capture_redis.attempts import AttemptMemory, Position
from gym_capture_redis.errors import CorruptRecordError, UnsupportedFormatError
from gym_capture_redis.faults import final_error
from gym_capture_redis.keys import new_mark_id, new_name, rollout_key
from gym_capture_redis.recent import STEP_BYTES, WATCHED_S, RecentStep, RecentSteps
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.settings import WriterSettings
from gym_capture_redis.subject import Subject

logger = logging.getLogger(__name__)

Send = Callable[[Sequence[tuple[Call, Subject]]], Awaitable[Sequence[Reply | Exception]]]
"""Sends steps, and returns what each was answered, an error as an exception."""

Owns = Callable[[bytes], bool]
"""Whether a key is on the server at hand."""

_BATCH_STEPS = 64
_BATCH_BYTES = 2**20
_VERIFIED_AT_ONCE = 512
_SAMPLED = 16
"""By so many of the newest rollouts that a server must know it is told whether it has what it had."""

_MOST_NAMED = 20
"""Rollouts that the log names each time that a server came back: it may have forgotten all of the day."""

_ORDER = {
    Step.BEGIN: 0,
    Step.STAGE: 1,
    Step.PUT: 2,
    Step.REFUSE: 3,
    Step.RECORD: 4,
    Step.FAIL: 5,
    Step.MARK: 6,
}
"""In a batch the steps of one kind go together; a put needs what was staged before it."""


_Known = tuple[str, Position]
"""A rollout, and how far it was."""


class Healer:
    """What a writer does when it meets another server than before. Executors of several loops may share it.

    ``key`` names what it writes, by namespace and rollout id.
    """

    def __init__(
        self,
        settings: WriterSettings,
        attempts: AttemptMemory,
        *,
        key: Callable[[str, str], bytes] = rollout_key,
    ) -> None:
        self.recent = RecentSteps(
            max_bytes=settings.max_recent_bytes if settings.server_may_forget else 0,
            settle_s=settings.settle_s,
        )
        self._attempts = attempts
        self._key = partial(key, settings.namespace)
        self._settle_s = settings.settle_s
        # A primary that was cut off may have acknowledged, for long, what nobody else has.
        self._keeps_old_steps = settings.durability != "memory" and settings.url.topology == "standalone"
        self._server = str(settings.url)

    async def heal(
        self, send: Send, run_id: str, *, owns: Owns, lost_by: Collection[str] | None = None
    ) -> None:
        """Put back, on the server with this run id, what others have acknowledged, and verify the rest.

        ``owns`` says which keys are there, ``lost_by`` which other servers are meant (None: all).

        Raises:
            Exception: a step could not be sent; what was not put back yet is kept.

        """
        healed, lost, began_s = 0, set[str](), time.monotonic()
        others = self.recent.others(run_id) if lost_by is None else lost_by
        for other in others:
            left = self.recent.count(other)
            while steps := self.recent.take(other, max_steps=min(left, _BATCH_STEPS), max_bytes=_BATCH_BYTES):
                left -= len(steps)
                healed += await self._put_back(steps, other, send, owns, lost)
        if healed:
            logger.warning(
                "%s came back without %d of the newest steps that it had acknowledged; they were put back.",
                self._server,
                healed,
            )
        await self._verify(send, run_id, owns, lost_by, lost)
        if len(lost) > _MOST_NAMED:
            logger.error(
                "%s came back without steps of %d more rollouts, which are incomplete too.",
                self._server,
                len(lost) - _MOST_NAMED,
            )
        for other in others:
            self.recent.settle(other, owns, until_s=began_s)

    async def _put_back(
        self, steps: Sequence[RecentStep], other: str, send: Send, owns: Owns, lost: set[str]
    ) -> int:
        """Put back a batch; what has to wait is kept. Returns how many steps had been lost and are back."""
        steps = [step for step in steps if not self._is_over(step, other)]
        here = [step for step in steps if owns(step.call.key)]
        elsewhere = [step for step in steps if not owns(step.call.key)]  # of now: slots may move meanwhile
        here.sort(key=lambda step: _ORDER[step.call.step])
        try:
            replies = await _sent(
                send,
                [
                    (
                        scripts.heal(
                            step.call,
                            seq=step.seq,
                            incarnation=step.incarnation,
                            new_incarnation=new_name(),
                        ),
                        step.subject,
                    )
                    for step in here
                ],
            )
        except BaseException:
            self.recent.give_back(other, steps)
            raise
        self.recent.give_back(other, elsewhere)
        for step, reply in zip(here, replies, strict=True):
            self._settle(step, reply, other, lost)
        return sum(isinstance(reply, Reply) and reply.code == "OK" for reply in replies)

    def _is_over(self, step: RecentStep, other: str) -> bool:
        """Whether the attempt gave way to a later one on the very server that had acknowledged the step."""
        position = self._attempts.position(step.subject.rollout_id)
        return position is not None and position.run_id == other and position.incarnation != step.incarnation

    def _settle(self, step: RecentStep, reply: Reply | Exception, other: str, lost: set[str]) -> None:
        """Keep on what the server has now acknowledged, or what has to wait for other workers."""
        if isinstance(reply, Exception):
            logger.error("%s could not be put back on %s: %s", step.subject, self._server, reply)
        elif reply.code in ("OK", "SAME"):
            number = step.seq or (reply.seq if reply.code == "OK" else 0)
            self.recent.keep(step._replace(seq=number, missing_since_s=0.0), reply.run_id)
        elif reply.code == "MISSING":
            now_s = time.monotonic()
            since_s = step.missing_since_s or now_s
            waiting = step._replace(missing_since_s=since_s)
            if now_s - since_s > self._settle_s:
                waiting = _lost_mark(step, step.subject, seq=0)
                self._report_lost(step.subject.rollout_id, lost)
            self.recent.give_back(other, [waiting])
        elif reply.code == "CONFLICT":
            self.recent.keep(_lost_mark(step, step.subject, seq=reply.seq), reply.run_id)
        elif reply.code == "LOST":
            # Of a rollout that is another attempt's by now, or that is not here, there is one mark for all.
            subject = (
                step.subject if reply.incarnation == step.incarnation else Subject(step.subject.rollout_id)
            )
            if subject is step.subject or subject.rollout_id not in lost:
                mark = _lost_mark(step._replace(incarnation=reply.incarnation), subject, seq=reply.seq)
                self.recent.keep(mark, reply.run_id)
            self._report_lost(subject.rollout_id, lost)

    def _report_lost(self, rollout_id: str, lost: set[str]) -> None:
        """Say that the rollout has lost something, once for each time that the server came back."""
        if rollout_id in lost:
            return
        lost.add(rollout_id)
        if len(lost) <= _MOST_NAMED:
            logger.error(
                "Rollout %s: %s came back without steps that were acknowledged; the rollout is incomplete.",
                rollout_id,
                self._server,
            )

    async def _verify(
        self, send: Send, run_id: str, owns: Owns, lost_by: Collection[str] | None, lost: set[str]
    ) -> None:
        """Compare how far rollouts were with what this server has of them.

        What nothing was heard of for a day is left alone: it may have been read and dropped, and its
        tombstone have expired.
        """
        heard_since_s = time.monotonic() - WATCHED_S
        positions = self._attempts.on_others(run_id)
        doubtful, safe = list[_Known](), list[_Known]()
        for start in range(0, len(positions), _VERIFIED_AT_ONCE):
            await asyncio.sleep(0)  # there may be very many, and nothing to be sent about them
            for known in positions[start : start + _VERIFIED_AT_ONCE]:
                _, position = known
                if position.at_s >= heard_since_s and (lost_by is None or position.run_id in lost_by):
                    (doubtful if self._may_be_lost(position) else safe).append(known)
        if safe and not await self._has_kept(send, run_id, owns, safe):
            doubtful += safe
        for start in range(0, len(doubtful), _VERIFIED_AT_ONCE):
            await asyncio.sleep(0)
            await self._verify_some(send, owns, doubtful[start : start + _VERIFIED_AT_ONCE], lost)

    async def _verify_some(self, send: Send, owns: Owns, known: Sequence[_Known], lost: set[str]) -> None:
        calls = [
            (
                scripts.verify(
                    key,
                    new_incarnation=new_name(),
                    incarnation=position.incarnation,
                    seq=position.seq,
                    own_seq=position.own_seq,
                    own_trace=position.own_trace,
                ),
                Subject(rollout_id),
            )
            for rollout_id, position in known
            if owns(key := self._key(rollout_id))
        ]
        for (call, subject), reply in zip(calls, await _sent(send, calls), strict=True):
            if isinstance(reply, Exception):
                continue  # unreadable, which every reader is told
            if reply.code == "RETIRED":  # over; nothing will tell so any more once its tombstone has expired
                self._attempts.forget(subject.rollout_id)
                continue
            if reply.code == "LOST":
                self._report_lost(subject.rollout_id, lost)
            self._attempts.note(subject.rollout_id, reply)
            self.recent.watch(call.key, subject, reply.run_id)

    async def _has_kept(self, send: Send, run_id: str, owns: Owns, safe: Sequence[_Known]) -> bool:
        """Whether this server has what no restart can have lost; if not, its files are gone, or older ones.

        A rollout that is not there may have been deleted: only if all are missing it was the server.
        """
        every = ((self._key(rollout_id), rollout_id, position) for rollout_id, position in reversed(safe))
        newest = list(islice((each for each in every if owns(each[0])), _SAMPLED))
        calls = [(scripts.peek(key), Subject(rollout_id)) for key, rollout_id, _ in newest]
        replies = await _sent(send, calls)
        if newest:  # though none of them may have to be verified
            key, rollout_id, _ = newest[0]
            self.recent.watch(key, Subject(rollout_id), run_id)
        here = [
            isinstance(reply, Exception) or reply.seq >= position.seq
            for (_, _, position), reply in zip(newest, replies, strict=True)
            if isinstance(reply, Exception) or reply.incarnation == position.incarnation
        ]
        return bool(here) and all(here)

    def _may_be_lost(self, position: Position) -> bool:
        """Whether the server that acknowledged a rollout's newest step may have ended before it was safe."""
        if not self._keeps_old_steps:
            return True
        alive_at_s = self.recent.alive_at_s(position.run_id)
        return alive_at_s is not None and alive_at_s - position.at_s <= self._settle_s


def _lost_mark(step: RecentStep, subject: Subject, *, seq: int) -> RecentStep:
    """The mark that the server has lost a step, in place of the step."""
    call = scripts.mark(
        step.call.key,
        subject.model_call_id or "",
        new_incarnation=new_name(),
        incarnation=step.incarnation,
        reason="lost",
        mark_id=new_mark_id(),
    )
    return RecentStep(call, subject, step.incarnation, seq, step.at_s, STEP_BYTES)


async def _sent(send: Send, calls: Sequence[tuple[Call, Subject]]) -> Sequence[Reply | Exception]:
    """What each step was answered. Only a rollout that cannot be read is an answer among others.

    Raises:
        Exception: anything else.

    """
    if not calls:
        return ()
    replies = await send(calls)
    for reply in replies:
        if isinstance(reply, Exception) and not isinstance(
            final_error(reply, ""), CorruptRecordError | UnsupportedFormatError
        ):
            raise reply
    return replies
