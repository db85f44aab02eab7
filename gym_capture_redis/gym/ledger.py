"""``RedisCaptureLedger``: which calls of a rollout were staged, and which failed (contract, section 6).

For Gym's external staging, where inference workers keep the tokens and Gym's servers only write down what
became of each call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from gym_capture_redis import gym_compat, scripts
from gym_capture_redis.ending import Ender
from gym_capture_redis.endpoint import raise_refusal
from gym_capture_redis.errors import CallConflictError
from gym_capture_redis.executor import Executor
from gym_capture_redis.gym import ledger_rows
from gym_capture_redis.gym.ledger_rows import Candidate, LedgerRow, StoredRow
from gym_capture_redis.gym.neighbours import Neighbours
from gym_capture_redis.keys import RECORD, REFUSAL, ledger_key, new_name, validate_call_id
from gym_capture_redis.scripts import LedgerPage, Reply
from gym_capture_redis.settings import LedgerSettings
from gym_capture_redis.subject import Subject
from gym_capture_redis.writer import Writer

logger = logging.getLogger(__name__)

_staging_key: Any = gym_compat.required_attribute("staging.records", "staging_key", since="0.7")

_PAGE_BYTES = 2**20
"""Of a ledger that is read as a whole."""
_NEWS_BYTES = 2**16
"""Of one of which a worker knows most: so many of them go in one pipeline."""
_BEYOND_ALL = 2**52
"""Number that no row has: read from there, a ledger says only how many rows it has."""


class _Known(NamedTuple):
    """What was read of a ledger: of which attempt, from which server process, up to where without a hole."""

    incarnation: str = ""
    run_id: str = ""
    next_seq: int = 1
    candidates: Mapping[str, Candidate] = {}


class RedisCaptureLedger(Writer[LedgerSettings]):
    """Gym's ``CaptureLedger`` over Redis: a row for each call that was staged, and for each that failed.

    What any process has written is seen by all others as soon as its call has returned. Rows hold no tokens,
    are kept in commit order, and stay until they are retired or deleted. Constructing it does no I/O; every
    call ends within ``timeout_s``, retries included. Reading waits while a server that was started or
    promoted a moment ago may be getting back what it forgot (``settle_s``).

    Args:
        url: see ``ServerUrl``; None reads ``GYM_CAPTURE_REDIS_URL``, else ``redis://127.0.0.1:6379/0``.
        namespace: separates runs; the same in all processes of one.
        settings: the fields of ``LedgerSettings``.

    Raises:
        ConfigurationError: an unknown setting, by name, or a malformed value.
        InvalidIdentifierError: a malformed namespace.

    """

    def __init__(self, url: str | None = None, *, namespace: str = "default", **settings: Any) -> None:
        super().__init__(LedgerSettings.build(url, namespace, settings), key=ledger_key)
        self._known: OrderedDict[str, _Known] = OrderedDict()  # its steps are atomic: threads may share it
        self._writing: set[asyncio.Task[None]] = set()
        self._neighbours = Neighbours(self)

    def is_process_shared(self) -> bool:
        """Whether separate workers see each other's rows: yes."""
        return True

    async def close(self) -> None:
        """Release the connections of the running event loop, and forget what was read. Idempotent.

        Waits for rows that are being written, also those whose callers have left, each within its deadline.
        A later call opens new connections.
        """
        loop = asyncio.get_running_loop()
        if writing := [task for task in list(self._writing) if task.get_loop() is loop]:
            await asyncio.wait(writing)
        self._known.clear()
        await super().close()

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        """Which staged call the request goes on from: Gym's ``LineageResolution``. Reads new rows only.

        Raises:
            InvalidIdentifierError: a malformed id; nothing was sent.
            ValueError: items that Gym's hashes do not take.
            TokenCaptureRetiredError: the rollout was retired.
            CorruptRecordError, UnsupportedFormatError: a row that cannot be read.
            BackendUnavailableError: not read in time.

        """
        executor, subject, deadline = self._begin(rollout_id)
        self._neighbours.should_not_know(rollout_id)
        items = list(request_items)
        candidates = await self._candidates(executor, subject, deadline)
        match = partial(ledger_rows.resolve, candidates.values(), items)
        return await executor.offload(match, subject, deadline=deadline, sent=True)

    async def record(self, commit: Any) -> None:
        """Add the row of a call that was staged. Repeating the same does nothing.

        ``commit`` is Gym's ``CaptureLedgerCommit``. For a rollout that was retired it is dropped, with a
        warning that names the staging key. A caller that leaves does not stop it.

        Raises:
            InvalidRecordError, RecordTooLargeError, InvalidIdentifierError: refused before the network.
            CallConflictError: the call has another row, or failed before; nothing changed.
            CorruptRecordError, UnsupportedFormatError: another program's value, or no readable state.
            BackendUnavailableError, DurabilityError: not confirmed in time; repeating it is safe.

        """
        await self._whoever_waits(self._record(commit))

    async def _record(self, commit: Any) -> None:
        executor = self._executors.get()
        deadline = executor.deadline()
        about = Subject(str(getattr(commit, "rollout_id", "")))
        row = await executor.offload(
            partial(ledger_rows.row_of, commit), about, deadline=deadline, sent=False
        )
        self._neighbours.should_not_know(row.rollout_id)
        reply = await self._write_row(executor, row, deadline)
        if reply.code == "RETIRED":
            _warn_of_late("row", row.rollout_id, row.model_call_id, row.staging_key)
        elif reply.code not in ("OK", "SAME"):
            raise_refusal(reply, Subject(row.rollout_id, row.model_call_id))

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Add that a call failed: the manifest lists it, and it is never a parent.

        Works at the memory limit. Each reason of a call is a row, once. For a rollout that was retired it is
        dropped, with a warning that names the staging key. A caller that leaves does not stop it.

        Raises:
            InvalidIdentifierError: a malformed id or reason; nothing was sent.
            CorruptRecordError, UnsupportedFormatError: as for ``record``.
            BackendUnavailableError, DurabilityError: not confirmed in time; repeating it is safe.

        """
        await self._whoever_waits(self._record_failure(rollout_id, model_call_id, reason))

    async def _record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        executor, _, deadline = self._begin(rollout_id)
        validate_call_id(model_call_id, rollout_id=rollout_id)
        self._neighbours.should_not_know(rollout_id)
        reply = await self._write_failure(executor, Subject(rollout_id, model_call_id), reason, deadline)
        if reply.code == "RETIRED":
            _warn_of_late("failure", rollout_id, model_call_id, _staging_key(rollout_id, model_call_id))

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """All rows as plain data, in commit order: what Gym's ``RolloutManifest`` validates.

        Rows that the server lost (reason ``ledger_row_lost``) or that are damaged (``ledger_row_damaged``)
        are among ``failures``, so that the rollout is rejected. An unknown rollout has no rows.

        Raises:
            InvalidIdentifierError: a malformed id; nothing was sent.
            TokenCaptureRetiredError: the rollout was retired.
            CorruptRecordError, UnsupportedFormatError: as for ``record``.
            BackendUnavailableError: not read in time.

        """
        executor, subject, deadline = self._begin(rollout_id)
        return ledger_rows.manifest(rollout_id, await self._rows(executor, subject, deadline))

    async def has_rows(self, rollout_id: str) -> bool:
        """Whether the ledger has any row, of a staged call, of a failure, or one that the server lost.

        Raises:
            CaptureError: as ``manifest``.

        """
        executor, subject, deadline = self._begin(rollout_id)
        reply = await self._read(executor, subject, "", _BEYOND_ALL, 1, deadline)
        return reply.seq > 0

    async def retire(self, rollout_ids: Iterable[str]) -> dict[str, list[str]]:
        """Remove the rows of rollouts, and fence them: reading raises, and late rows are dropped.

        Returns ``{"removed": [...], "absent": [...]}``, each id once: ``removed`` had rows.

        Raises:
            TypeError: a bare string, or no iterable. Nothing was touched.
            InvalidIdentifierError: a malformed id among them. Nothing was touched.
            CorruptRecordError, UnsupportedFormatError: as for ``record``; other ids may be retired.
            BackendUnavailableError: not confirmed in time; repeating it is safe.

        """
        keys = self._keys(rollout_ids)
        ended = await self._ender().retire(keys)
        self._forget(keys)
        return ended

    async def delete(self, rollout_ids: Iterable[str]) -> dict[str, list[str]]:
        """Remove rollouts with their fences, so that the ids can be used again. Returns what ``retire`` does.

        A row that comes later than that belongs to the next attempt of its id: nothing in it tells.

        Raises:
            CaptureError, TypeError: as ``retire``.

        """
        keys = self._keys(rollout_ids)
        ended = await self._ender().delete(keys)
        self._forget(keys)
        return ended

    async def export_rows(self, rollout_id: str) -> dict[str, Any]:
        """All rows as plain JSON data for a checkpoint; those that are lost or damaged as failures.

        Raises:
            CaptureError: as ``manifest``.

        """
        executor, subject, deadline = self._begin(rollout_id)
        return ledger_rows.exported(rollout_id, await self._rows(executor, subject, deadline))

    async def import_rows(self, exported: Mapping[str, Any]) -> None:
        """Add the rows of ``export_rows`` that are not there. Repeating it does nothing.

        All are compared with what is there first. Where it ends early, repeating it adds the rest.

        Raises:
            InvalidRecordError, InvalidIdentifierError, UnsupportedFormatError: these are no exported rows;
                nothing changed.
            CallConflictError: a call has another row here, or failed here; nothing changed, unless that came
                meanwhile.
            TokenCaptureRetiredError: the rollout was retired.
            BackendUnavailableError, DurabilityError: not confirmed in time; repeating it is safe.

        """
        rollout_id, rows = ledger_rows.imported(exported)
        executor, subject, deadline = self._begin(rollout_id)
        staged = [ledger_rows.encode(rollout_id, row.body) for row in rows if row.body is not None]
        _refuse_conflicts(staged, await self._rows(executor, subject, deadline))
        for row in staged:
            self._accept(await self._write_row(executor, row, deadline), rollout_id, row.model_call_id)
        for call, _, reason in [row for row in rows if row.body is None]:
            reply = await self._write_failure(executor, Subject(rollout_id, call), reason, deadline)
            self._accept(reply, rollout_id, call)

    def _begin(self, rollout_id: str) -> tuple[Executor, Subject, float]:
        """What a call about a rollout works with, once its id is found to be well-formed."""
        self._key(rollout_id)
        executor = self._executors.get()
        return executor, Subject(rollout_id), executor.deadline()

    async def _whoever_waits(self, work: Coroutine[Any, Any, None]) -> None:
        """Write to the end, as Gym's file ledger does, even if the caller leaves: it never calls again."""
        task = asyncio.get_running_loop().create_task(work, name="gym-capture-redis ledger")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_error)
            raise

    def _ender(self) -> Ender:
        return Ender(self._executors.get(), tombstone_ttl_s=self._settings.tombstone_ttl_s)

    async def _write_row(self, executor: Executor, row: StoredRow, deadline: float) -> Reply:
        """Add a row to the attempt that is there. It never begins one itself, in case it arrives twice."""
        key, subject = self._key(row.rollout_id), Subject(row.rollout_id, row.model_call_id)
        incarnation = self._attempts.joined(row.rollout_id)
        while True:
            if not incarnation:
                join = scripts.join(key, new_incarnation=new_name())
                joined = await executor.run(join, subject, deadline=deadline)
                self._attempts.join(row.rollout_id, joined)
                incarnation = joined.incarnation
            call = scripts.record(key, row.model_call_id, row.stored, incarnation=incarnation)
            reply = await executor.run(call, subject, deadline=deadline)
            if reply.code != "CHANGED":
                break
            incarnation = ""
        if reply.code != "RETIRED":
            await self._note(executor, subject, reply, RECORD, deadline)
        return reply

    async def _write_failure(
        self, executor: Executor, subject: Subject, reason: str, deadline: float
    ) -> Reply:
        """Add a failure to the attempt that is there, or begin one: rather one failure too many."""
        call_id = subject.model_call_id or ""
        text = ledger_rows.encode_reason(reason, rollout_id=subject.rollout_id, model_call_id=call_id)
        for incarnation in (self._attempts.joined(subject.rollout_id), ""):
            call = scripts.fail(
                self._key(subject.rollout_id),
                call_id,
                text,
                new_incarnation=new_name(),
                incarnation=incarnation,
            )
            reply = await executor.run(call, subject, deadline=deadline, urgent=True)
            if reply.code != "CHANGED":
                break
        if reply.code != "RETIRED":
            await self._note(executor, subject, reply, REFUSAL, deadline)
        return reply

    async def _read(
        self,
        executor: Executor,
        subject: Subject,
        incarnation: str,
        from_seq: int,
        max_bytes: int,
        deadline: float,
    ) -> Reply:
        """A page of the ledger; also ABSENT, or CHANGED if it is another attempt's.

        Raises:
            TokenCaptureRetiredError: the rollout was retired.

        """
        key = self._key(subject.rollout_id)
        call = scripts.rows(key, incarnation=incarnation, from_seq=from_seq, max_bytes=max_bytes)
        while True:
            reply = await executor.run(call, subject, deadline=deadline)
            if reply.code == "RETIRED":
                raise_refusal(reply, subject)
            read = reply._replace(code="READ")  # unlike a step that is accepted, it does not count itself
            if not self._attempts.has_lost(subject.rollout_id, read):
                break
            await self._note(executor, subject, read, b"", deadline)
        if reply.incarnation:
            self._attempts.note(subject.rollout_id, reply)
        return reply

    async def _rows(self, executor: Executor, subject: Subject, deadline: float) -> list[LedgerRow]:
        """All rows, read anew."""
        whole, incarnation, next_seq = ledger_rows.WholeLedger(subject.rollout_id), "", 1
        while True:
            reply = await self._read(executor, subject, incarnation, next_seq, _PAGE_BYTES, deadline)
            if reply.code != "OK":
                whole, next_seq = ledger_rows.WholeLedger(subject.rollout_id), 1
                if not incarnation:
                    return whole.rows()
                incarnation = ""
                continue
            page = LedgerPage.parse(reply, from_seq=next_seq)
            whole.add(page, reply.seq)
            incarnation, next_seq = reply.incarnation, page.next_seq
            if next_seq > reply.seq:
                return whole.rows()

    async def _candidates(
        self, executor: Executor, subject: Subject, deadline: float
    ) -> Mapping[str, Candidate]:
        """The staged calls of a rollout, of which only the new ones are read."""
        rollout_id = subject.rollout_id
        known = self._known.get(rollout_id, _Known())
        candidates, next_seq, hole = dict(known.candidates), known.next_seq, 0
        while True:
            reply = await self._read(executor, subject, known.incarnation, next_seq, _NEWS_BYTES, deadline)
            if reply.code != "OK" or known.run_id not in ("", reply.run_id) or reply.seq < next_seq - 1:
                if known == _Known():
                    return {}
                # Another attempt, or a server that may have forgotten what was read.
                known, candidates, next_seq, hole = _Known(), {}, 1, 0
                continue
            page = LedgerPage.parse(reply, from_seq=next_seq)
            for number, (field, value) in enumerate(page.rows, next_seq):
                if field is None:
                    hole = hole or number
                elif field.startswith(RECORD):
                    call = field[len(RECORD) :].decode("utf-8", "replace")
                    found = ledger_rows.candidate(rollout_id, call, value)
                    if found is not None:
                        candidates[call] = found
            next_seq = page.next_seq
            known = _Known(reply.incarnation, reply.run_id, hole or next_seq, candidates)
            if next_seq > reply.seq:
                self._remember(rollout_id, known)
                return candidates

    def _forget(self, rollout_ids: Iterable[str]) -> None:
        """What this process has ended itself is not lost if it is not there any more."""
        for rollout_id in rollout_ids:
            self._attempts.forget(rollout_id)
            self._known.pop(rollout_id, None)

    def _remember(self, rollout_id: str, known: _Known) -> None:
        self._known.pop(rollout_id, None)
        self._known[rollout_id] = known
        while len(self._known) > self._settings.max_cached_rollouts:
            with suppress(KeyError):  # another thread has emptied it
                self._known.popitem(last=False)

    @staticmethod
    def _accept(reply: Reply, rollout_id: str, model_call_id: str) -> None:
        if reply.code not in ("OK", "SAME"):
            raise_refusal(reply, Subject(rollout_id, model_call_id))


def _refuse_conflicts(staged: Iterable[StoredRow], there: Iterable[LedgerRow]) -> None:
    """Raise if a row could not be added, by what was there before any of them was.

    Raises:
        CallConflictError: otherwise than by the script, nothing of the others was added either.

    """
    rows: dict[str, LedgerRow] = {}
    for row in there:
        before = rows.get(row.model_call_id)
        if row.reason != ledger_rows.LOST_REASON and (before is None or before.body is None):
            rows[row.model_call_id] = row
    for new in staged:
        known = rows.get(new.model_call_id)
        if known is None:
            continue
        if known.body is None or ledger_rows.encode(new.rollout_id, known.body) != new:
            raise CallConflictError(
                "conflicting row: the ledger has another one for the call, or says that it failed; "
                f"nothing was imported (call {new.model_call_id!r} of rollout {new.rollout_id})",
                rollout_id=new.rollout_id,
                model_call_id=new.model_call_id,
            )


def _log_error(task: asyncio.Task[None]) -> None:
    """Say why something was not written: its caller left, and is not told."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("A ledger row whose caller had left was not written: %s", error)


def _warn_of_late(what: str, rollout_id: str, model_call_id: str, staging_key: str) -> None:
    logger.warning(
        "Rollout %s was retired: a %s of call %r came too late and was dropped. What was staged for the call "
        "has the staging key %r, and nobody will ask for it.",
        rollout_id,
        what,
        model_call_id,
        staging_key,
    )
