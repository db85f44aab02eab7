"""``RedisTokenSink``: the writer, in every worker process (contract, section 3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

from gym_capture_redis import codec, scripts, taking
from gym_capture_redis.block_cache import BlockCache
from gym_capture_redis.endpoint import raise_refusal
from gym_capture_redis.errors import InvalidRecordError
from gym_capture_redis.executor import Executor
from gym_capture_redis.keys import (
    FAILURE,
    INTENT,
    RECORD,
    REFUSAL,
    new_name,
    validate_call_id,
    validate_refusal_code,
)
from gym_capture_redis.marks import Mark, Target
from gym_capture_redis.replay import Replay, keep, make_mark, new_mark
from gym_capture_redis.settings import SinkSettings
from gym_capture_redis.spill import Spill, log_lost
from gym_capture_redis.subject import Subject
from gym_capture_redis.writer import Writer

logger = logging.getLogger(__name__)

_SINKS: list[ref[RedisTokenSink]] = []
"""Not a WeakSet: that fails if another thread adds to it while it is walked through."""


def sinks_of_process() -> list[RedisTokenSink]:
    """All sinks there are in this process now."""
    return [sink for each in list(_SINKS) if (sink := each()) is not None]


class RedisTokenSink(Writer[SinkSettings]):
    """Puts the records of model calls into Redis, from any number of processes and machines.

    Constructing it does no I/O: connections are opened at the first call, for each event loop and
    process of its own. Every call ends within ``timeout_s``, retries included.

    Args:
        url: see ``ServerUrl``; None reads ``GYM_CAPTURE_REDIS_URL``, else ``redis://127.0.0.1:6379/0``.
        namespace: separates runs, whose rollout ids are the same; 1 to 64 characters of ``A-Za-z0-9._-``.
        settings: the fields of ``SinkSettings``.

    Raises:
        ConfigurationError: an unknown setting, by name, or a malformed value.
        InvalidIdentifierError: a malformed namespace.

    """

    def __init__(self, url: str | None = None, *, namespace: str = "default", **settings: Any) -> None:
        super().__init__(SinkSettings.build(url, namespace, settings))
        self._blocks = BlockCache(self._settings.prefix_cache_bytes)
        self._target = Target.of(self._settings)
        self._spill = Spill(self._settings.spill_dir) if self._settings.spill_dir else None
        self._replays: dict[asyncio.AbstractEventLoop, Replay] = {}
        _SINKS.append(ref(self, _SINKS.remove))

    @property
    def target(self) -> Target:
        """Where its records go."""
        return self._target

    def knows(self, rollout_id: str) -> bool:
        """Whether a call of the rollout was announced or put here; of the newest rollouts only."""
        return bool(self._attempts.joined(rollout_id))

    async def put(self, entry: Any) -> None:
        """Store the record of one model call; on return it is durable and visible to every reader.

        Storing the same content again does nothing. ``entry`` is Gym's ``TokenEntry``, ours, or any
        pydantic model with the same fields.

        Raises:
            InvalidRecordError, RecordTooLargeError, InvalidIdentifierError: refused before the network.
            CallConflictError: the call has other content already; the rollout is incomplete now.
            TokenCaptureFrozenError: the rollout was frozen, and does not hold this record.
            TokenCaptureRetiredError: the attempt was retired, deleted or has expired.
            BackendUnavailableError: not confirmed in time; repeating it is safe.

        """
        executor = self._executors.get()
        deadline = executor.deadline()
        taken = taking.take(entry)
        rollout_id, model_call_id = taken.subject()
        key, subject = self._address(rollout_id, model_call_id)
        # Of now: while the put waits, the same call may be announced again, to the next attempt.
        announced = self._announcement(subject)
        nbytes = taken.nbytes
        held = executor.room_now(nbytes) or await executor.room(nbytes, subject, deadline=deadline)
        with held:
            if held.waited:
                taken = _taken_again(entry, subject)
            attempt = announced.incarnation if announced else self._attempts.joined(rollout_id)
            if taken.is_large:
                encode = partial(self._encode, taken.copied())
                encoded = await executor.offload(encode, subject, deadline=deadline, sent=False)
            else:
                encoded = self._encode(taken)
            held.grow(len(encoded.record))
            reply = None
            if attempt:
                reply = await self._put(executor, key, encoded, attempt, subject, deadline)
            if reply is None or (announced is None and _is_of_another_attempt(reply, attempt)):
                attempt = await self._join(executor, key, subject, deadline)
                reply = await self._put(executor, key, encoded, attempt, subject, deadline)
        if reply.code not in ("OK", "SAME"):
            raise_refusal(reply, subject)
        self._blocks.remember(rollout_id, attempt, encoded.sequence)
        await self._note(executor, subject, reply, RECORD, deadline)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Announce a model call, durably, before it is sent to the engine.

        Until it is recorded or refused, a snapshot of the rollout is incomplete. Repeating is fine.

        Raises:
            InvalidIdentifierError: a malformed id; nothing was sent.
            TokenCaptureFrozenError, TokenCaptureRetiredError: the rollout takes no calls any more.
            BackendUnavailableError: not confirmed in time; the call should not be made.

        """
        key, subject = self._address(rollout_id, model_call_id)
        executor = self._executors.get()
        deadline = executor.deadline()
        call = scripts.begin(key, model_call_id, new_incarnation=new_name())
        reply = await executor.run(call, subject, deadline=deadline)
        if reply.code not in ("OK", "SAME"):
            raise_refusal(reply, subject)
        self._blocks.learn(rollout_id, reply.incarnation, scripts.chain_ends(reply))
        self._attempts.announce(rollout_id, model_call_id, reply)
        await self._note(executor, subject, reply, INTENT, deadline)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Record, durably, that the rollout lost a call; works after freeze and at the memory limit.

        With a ``spill_dir`` a mark that cannot be made now is made later: it is on disk when this returns.

        Raises:
            InvalidIdentifierError: a malformed id; nothing was sent.
            TokenCaptureRetiredError: the attempt was retired, deleted or has expired.
            CaptureError: why it could not be made, if it could not be spilled either, which is logged as an
                error; an intent of the call still tells.

        """
        _, subject = self._address(rollout_id, model_call_id, allow_empty=True)
        executor = self._executors.get()
        announced = self._announcement(subject)
        mark = new_mark(self._target, rollout_id, model_call_id, announced)

        def has_moved_on() -> bool:
            return announced is not None and self._attempts.has_moved_on(rollout_id, announced)

        try:
            reply = await make_mark(executor, mark, deadline=executor.deadline(), has_moved_on=has_moved_on)
        except (Exception, asyncio.CancelledError) as error:
            # A caller that leaves is no reason to lose the mark: nobody will make it again.
            later = mark._replace(incarnation="") if has_moved_on() else mark
            if await self._keep(later, error) and isinstance(error, Exception):
                return
            raise
        if reply.code not in ("OK", "SAME"):
            raise_refusal(reply, subject)
        self._attempts.note(rollout_id, reply, FAILURE + model_call_id.encode())

    async def record_engine_refusal(
        self, rollout_id: str, *, model_call_id: str, code: str, **details: Any
    ) -> None:
        """Record that the engine refused the call before generating: it is settled without a record.

        ``details`` are kept with it (plain JSON values). Repeating the same code does nothing.

        Raises:
            InvalidIdentifierError, InvalidRecordError: malformed arguments; nothing was sent.
            CallConflictError: refused with another code before (nothing changed), or recorded before
                (the rollout is incomplete now).
            TokenCaptureFrozenError, TokenCaptureRetiredError: the rollout takes no refusals any more.
            BackendUnavailableError: not confirmed in time; repeating it is safe.

        """
        key, subject = self._address(rollout_id, model_call_id)
        validate_refusal_code(code, rollout_id=rollout_id, model_call_id=model_call_id)
        announced = self._announcement(subject)
        call = scripts.refuse(
            key,
            model_call_id,
            new_incarnation=new_name(),
            incarnation=announced.incarnation if announced else "",
            code=code,
            details=codec.encode_refusal(rollout_id, model_call_id, code, details),
        )
        executor = self._executors.get()
        deadline = executor.deadline()
        reply = await executor.run(call, subject, deadline=deadline, urgent=True)
        if reply.code not in ("OK", "SAME"):
            raise_refusal(reply, subject)
        await self._note(executor, subject, reply, REFUSAL, deadline)

    async def close(self) -> None:
        """Release the connections of the running event loop. Idempotent.

        Nothing acknowledged is ever pending, and spilled marks stay in their directory. A later call opens
        new connections, so that a record that comes late is stored rather than lost.
        """
        replay = self._replays.pop(asyncio.get_running_loop(), None)
        if replay is not None:
            await replay.stop()
        await super().close()

    def _make_executor(self) -> Executor:
        executor = super()._make_executor()
        if self._spill is not None:
            for loop in [loop for loop in list(self._replays) if loop.is_closed()]:
                self._replays.pop(loop, None)
            replay = Replay(executor, self._spill, self._target)
            self._replays[asyncio.get_running_loop()] = replay
            replay.wake()
        return executor

    async def _keep(self, mark: Mark, error: BaseException) -> bool:
        """Spill a mark that could not be made because of ``error``. False: so did that, and it was logged."""
        why = str(error) or type(error).__name__
        if self._spill is None:
            if isinstance(error, Exception):  # else its caller left, and the step ends or not on its own
                log_lost(mark, f"{why}; there is no spill_dir")
            return False
        if not await keep(self._spill, mark, self._replays.get(asyncio.get_running_loop())):
            return False
        logger.warning(
            "Rollout %s, model call %r: lost. It is marked in %s until it can be in Redis (%s).",
            mark.rollout_id,
            mark.model_call_id,
            self._spill.path,
            why,
        )
        return True

    def _encode(self, taken: taking.TakenEntry) -> codec.EncodedRecord:
        return codec.encode_taken(
            taken,
            max_record_bytes=self._settings.max_record_bytes,
            earlier=self._blocks.sequences(taken.rollout_id),
        )

    async def _join(self, executor: Executor, key: bytes, subject: Subject, deadline: float) -> str:
        """The attempt that there is now, for a record that nobody announced here."""
        reply = await executor.run(scripts.join(key, new_incarnation=new_name()), subject, deadline=deadline)
        self._blocks.learn(subject.rollout_id, reply.incarnation, scripts.chain_ends(reply))
        self._attempts.join(subject.rollout_id, reply)
        return reply.incarnation

    async def _put(
        self,
        executor: Executor,
        key: bytes,
        encoded: codec.EncodedRecord,
        incarnation: str,
        subject: Subject,
        deadline: float,
    ) -> scripts.Reply:
        """Send the record with the blocks that are not known to be stored; with all, if that was wrong."""
        rollout_id, sequence = encoded.rollout_id, encoded.sequence
        staged = False
        while True:
            unknown_parts = self._blocks.unknown(rollout_id, incarnation, encoded.parts)
            if unknown_parts:
                refusal = await self._stage(executor, key, unknown_parts, incarnation, subject, deadline)
                if refusal is not None:
                    return refusal
                staged = True
            first_block = self._blocks.first_unknown(rollout_id, incarnation, sequence)
            call = scripts.put(key, encoded, incarnation=incarnation, first_block=first_block)
            # What the cache will keep of the sequence is a copy, which is best made while the server works.
            reply = await executor.run(
                call, subject, deadline=deadline, sent=staged, meanwhile=lambda: sequence.without_tail
            )
            if reply.code != "MISSING":
                return reply
            self._blocks.forget(rollout_id)

    async def _stage(
        self,
        executor: Executor,
        key: bytes,
        parts: Sequence[tuple[bytes, bytes]],
        incarnation: str,
        subject: Subject,
        deadline: float,
    ) -> scripts.Reply | None:
        """Send parts of a record ahead of it. Returns a refusal, if there is one."""
        calls = [scripts.stage(key, name, part, incarnation=incarnation) for name, part in parts]
        replies = await asyncio.gather(
            *(executor.run(call, subject, deadline=deadline) for call in calls), return_exceptions=True
        )
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
            if reply.code not in ("OK", "SAME"):
                return reply
        self._blocks.learn(subject.rollout_id, incarnation, [name for name, _ in parts])
        return None

    def _address(
        self, rollout_id: str, model_call_id: str, *, allow_empty: bool = False
    ) -> tuple[bytes, Subject]:
        key = self._key(rollout_id)
        validate_call_id(model_call_id, rollout_id=rollout_id, allow_empty=allow_empty)
        return key, Subject(rollout_id, model_call_id)

    def _announcement(self, subject: Subject) -> scripts.Reply | None:
        """What ``begin_call`` was answered for this call in this process, if it was made here."""
        return self._attempts.announcement(subject.rollout_id, subject.model_call_id or "")


def _is_of_another_attempt(reply: scripts.Reply, incarnation: str) -> bool:
    """Whether a step was refused because the rollout is not, or no more, the attempt it was meant for."""
    return reply.code == "RETIRED" and reply.incarnation != incarnation


def _taken_again(entry: Any, subject: Subject) -> taking.TakenEntry:
    """The entry as it is now: its caller may have changed it while it waited for room."""
    taken = taking.take(entry)
    if taken.subject() != (subject.rollout_id, subject.model_call_id):
        raise InvalidRecordError(
            f"the record became that of another call while it was put ({subject})",
            rollout_id=subject.rollout_id,
            model_call_id=subject.model_call_id,
        )
    return taken
