"""The rows of a capture ledger: their form, what all of them say, and which one a request goes on from.

A row is token-free: Gym's ``CallRecord``, the chain of staging keys, and the hashes by which Gym finds
parents. No I/O here.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from gym_capture_redis import gym_compat
from gym_capture_redis.errors import (
    CorruptRecordError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedFormatError,
)
from gym_capture_redis.keys import (
    FAILURE,
    RECORD,
    REFUSAL,
    validate_call_id,
    validate_failure_reason,
    validate_rollout_id,
)
from gym_capture_redis.plain_words import broken_rule
from gym_capture_redis.scripts import LedgerPage

_required = partial(gym_compat.required_attribute, since="0.7")  # the first that stages externally
_CallRecord: Any = _required("staging.records", "CallRecord")
_CaptureLedgerCommit: Any = _required("staging.records", "CaptureLedgerCommit")
_ManifestFailure: Any = _required("staging.records", "ManifestFailure")
_RolloutManifest: Any = _required("staging.records", "RolloutManifest")
_LineageMatch: Any = _required("protocols", "LineageMatch")
_LineageResolution: Any = _required("protocols", "LineageResolution")
_Status: Any = _required("records", "ParentResolutionStatus")
_FINGERPRINT_VERSION: Any = _required("fingerprint", "FINGERPRINT_VERSION")
_assistant_fingerprint: Any = _required("fingerprint", "assistant_fingerprint")
_conversation_digest: Any = _required("fingerprint", "conversation_digest")

ROW_FORMAT = 1
MAX_ROW_BYTES = 4 * 2**20

LOST_REASON = "ledger_row_lost"
"""Reason of a failure that stands for rows which the server acknowledged and forgot."""
DAMAGED_REASON = "ledger_row_damaged"
"""Reason of a failure that stands for a row which is not what was written."""
UNKNOWN_CALL = "unknown"
"""Call of such a failure, where nothing says which it was."""

_CHECK_BYTES = 16
_MOST_HOLES = 10_000
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


class RowBody(BaseModel):
    """What the row of a staged call holds; in its JSON form as it is stored and exported."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    v: Literal[1] = 1
    record: Annotated[Any, AfterValidator(_CallRecord.model_validate)]
    staging_chain: list[Annotated[str, Field(min_length=1)]]
    fingerprint: str
    context_len: Annotated[int, Field(ge=0)]
    context_digest: str


class StoredRow(NamedTuple):
    """A row as it is stored, and what it is about."""

    rollout_id: str
    model_call_id: str
    staging_key: str
    stored: bytes


class LedgerRow(NamedTuple):
    """A row of a whole ledger: of a call that was staged, or (without ``body``) of one that failed."""

    model_call_id: str
    body: RowBody | None
    reason: str


class Candidate(NamedTuple):
    """A call as far as finding parents needs it; ``match`` is Gym's ``LineageMatch``."""

    fingerprint: str
    context_len: int
    context_digest: str
    match: Any


def row_of(commit: Any) -> StoredRow:
    """The row of a commit, which is validated again: it can have changed since it was built.

    Raises:
        InvalidRecordError, RecordTooLargeError, InvalidIdentifierError: a malformed commit.

    """
    try:
        plain = commit.model_dump(exclude={"request_items", "response_items"}, warnings="none")
        valid = _CaptureLedgerCommit.model_validate(plain | {"request_items": [], "response_items": []})
        body = RowBody(
            record=valid.record,
            staging_chain=list(valid.staging_chain),
            fingerprint=_assistant_fingerprint([*commit.request_items, *commit.response_items]),
            context_len=len(commit.request_items),
            context_digest=_conversation_digest(commit.request_items),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRecordError(f"a ledger row is refused: {_first_line(error)}") from None
    return encode(valid.rollout_id, body)


def encode(rollout_id: str, body: RowBody) -> StoredRow:
    """The row as it is stored: a check over it and its names, and canonical JSON.

    Raises:
        RecordTooLargeError, InvalidIdentifierError: it cannot be stored.

    """
    validate_rollout_id(rollout_id)
    call = validate_call_id(body.record.model_call_id, rollout_id=rollout_id)
    text = _CANONICAL.encode(body.model_dump(mode="json")).encode()
    if len(text) > MAX_ROW_BYTES:
        raise RecordTooLargeError(
            f"the ledger row has {len(text)} bytes, more than {MAX_ROW_BYTES} "
            f"(call {call!r} of rollout {rollout_id})",
            rollout_id=rollout_id,
            model_call_id=call,
        )
    return StoredRow(rollout_id, call, body.record.staging_key, _check(rollout_id, call, text) + text)


def decode(rollout_id: str, model_call_id: str, stored: bytes | None) -> RowBody:
    """What a stored row holds.

    Raises:
        CorruptRecordError: it is missing, or not what was written.
        UnsupportedFormatError: a newer version of this package or of Gym wrote it.

    """
    about = {"rollout_id": rollout_id, "model_call_id": model_call_id}
    text = (stored or b"")[_CHECK_BYTES:]
    if not stored or stored[:_CHECK_BYTES] != _check(rollout_id, model_call_id, text):
        raise CorruptRecordError(
            f"the ledger row is missing or damaged (call {model_call_id!r} of rollout {rollout_id})", **about
        )
    try:
        body = RowBody.model_validate(json.loads(text))
    except ValueError as error:
        raise UnsupportedFormatError(
            f"the ledger row was written by another version of gym-capture-redis or nemo-gym, upgrade the "
            f"older one: {_first_line(error)} (call {model_call_id!r} of rollout {rollout_id})",
            **about,
        ) from None
    return body


def encode_reason(reason: str, *, rollout_id: str, model_call_id: str) -> bytes:
    """Why a call failed, as it is stored: one line of JSON.

    Raises:
        InvalidIdentifierError: no text, or too long.

    """
    valid = validate_failure_reason(reason, rollout_id=rollout_id, model_call_id=model_call_id)
    return json.dumps(valid).encode()


class WholeLedger:
    """Puts a ledger together from its pages. What is missing or damaged becomes a failure, never nothing."""

    def __init__(self, rollout_id: str) -> None:
        self._rollout_id = rollout_id
        self._rows: list[LedgerRow] = []
        self._recorded: set[str] = set()
        self._failed: Counter[str] = Counter()
        self._lost: set[str] = set()
        self._traces = 0
        self._is_consistent = True

    def add(self, page: LedgerPage, seq: int) -> None:
        """Add the next page of a ledger whose newest row has the number ``seq``.

        Raises:
            CorruptRecordError: more rows are missing than it can be believed to have had.
            UnsupportedFormatError: as of ``decode``.

        """
        if seq - page.hash_fields > _MOST_HOLES:
            raise CorruptRecordError(
                f"the ledger counts {seq} rows, of which nearly all are missing (rollout {self._rollout_id})",
                rollout_id=self._rollout_id,
            )
        for number, (field, value) in enumerate(page.rows, page.from_seq):
            if field is None:
                self._rows.append(LedgerRow(f"row-{number}", None, LOST_REASON))
                continue
            self._traces += 1
            self._take(field[:2], field[2:].decode("utf-8", "replace"), value)
        self._is_consistent = (
            len(self._recorded) == page.records
            and len(self._failed) + len(self._lost) == page.failures
            and 1 + self._traces + page.records + page.failures == page.hash_fields
        )

    def rows(self) -> list[LedgerRow]:
        """All rows in commit order, each once."""
        if self._is_consistent:
            return self._rows
        return [*self._rows, LedgerRow(UNKNOWN_CALL, None, DAMAGED_REASON)]

    def _take(self, kind: bytes, call: str, value: bytes | None) -> None:
        """Take a row that a step left; one that was put back, or marked again, may have left two traces."""
        if kind == RECORD:
            if call not in self._recorded:
                self._recorded.add(call)
                self._rows.append(self._record(call, value))
        elif kind == REFUSAL:
            reasons, number = _reasons(value), self._failed[call]
            self._failed[call] += 1
            if number < len(reasons):
                self._rows.append(LedgerRow(call or UNKNOWN_CALL, None, reasons[number]))
        elif kind == FAILURE:
            if call not in self._lost:
                self._lost.add(call)
                self._rows.append(LedgerRow(call or UNKNOWN_CALL, None, LOST_REASON))
        else:
            self._rows.append(LedgerRow(UNKNOWN_CALL, None, DAMAGED_REASON))

    def _record(self, call: str, value: bytes | None) -> LedgerRow:
        try:
            return LedgerRow(call, decode(self._rollout_id, call, value), "")
        except CorruptRecordError:
            return LedgerRow(call or UNKNOWN_CALL, None, DAMAGED_REASON)


def manifest(rollout_id: str, rows: Iterable[LedgerRow]) -> dict[str, Any]:
    """Gym's ``RolloutManifest`` as plain data: staged calls and failures, both in commit order."""
    records, failures = [], []
    for row in rows:
        if row.body is not None:
            records.append(row.body.record)
        else:
            failures.append(_ManifestFailure(model_call_id=row.model_call_id, reason=row.reason))
    built = _RolloutManifest(rollout_id=rollout_id, records=records, failures=failures)
    plain: dict[str, Any] = built.model_dump(mode="json")
    return plain


def exported(rollout_id: str, rows: Iterable[LedgerRow]) -> dict[str, Any]:
    """The rows as plain data for a checkpoint, which ``imported`` reads."""
    return {
        "format": ROW_FORMAT,
        "rollout_id": rollout_id,
        "rows": [
            row.body.model_dump(mode="json")
            if row.body is not None
            else {"model_call_id": row.model_call_id, "failure_reason": row.reason}
            for row in rows
        ],
    }


def imported(data: Any) -> tuple[str, list[LedgerRow]]:
    """The rollout id and rows of what ``exported`` gave.

    Raises:
        UnsupportedFormatError: a newer version exported it.
        InvalidRecordError, InvalidIdentifierError: it is no such thing, or was edited.

    """
    try:
        data_format, rollout_id, rows = data["format"], data["rollout_id"], list(data["rows"])
    except (TypeError, KeyError):
        raise InvalidRecordError(
            "these are no exported ledger rows: format, rollout_id or rows are missing"
        ) from None
    if data_format != ROW_FORMAT:
        raise UnsupportedFormatError(
            f"ledger rows were exported in format {data_format!r}, and this version reads {ROW_FORMAT}"
        )
    validate_rollout_id(rollout_id)
    return rollout_id, [_imported_row(rollout_id, row) for row in rows]


def candidate(rollout_id: str, model_call_id: str, stored: bytes | None) -> Candidate | None:
    """A staged call as a possible parent; None if it can be none.

    Raises:
        CorruptRecordError, UnsupportedFormatError: as of ``decode``.

    """
    body = decode(rollout_id, model_call_id, stored)
    record = body.record
    if not body.fingerprint or record.fingerprint_version != _FINGERPRINT_VERSION:
        return None  # hashed in another way: a match would be luck
    match = _LineageMatch(
        model_call_id=model_call_id,
        cumulative_token_ids=(),
        digest=record.cumulative_hash,
        staging_chain=tuple(map(sys.intern, body.staging_chain)),  # each call repeats its parent's
        prev_len=record.cum_len,
        chain_hash=record.chain_hash,
    )
    return Candidate(body.fingerprint, body.context_len, body.context_digest, match)


def resolve(candidates: Iterable[Candidate], request_items: Sequence[Mapping[str, Any]]) -> Any:
    """Gym's ``LineageResolution``: the one staged call whose request and answer the request begins with.

    Two calls with the same model-authored history are never told apart, as in Gym's file ledger.

    Raises:
        ValueError: items that Gym's hashes do not take.

    """
    fingerprint = _assistant_fingerprint(request_items)
    if not fingerprint:
        return _LineageResolution(_Status.ROOT)
    alike = [each for each in candidates if each.fingerprint == fingerprint]
    if len(alike) == 1:
        (found,) = alike
        context = request_items[: found.context_len]
        if len(context) == found.context_len and _conversation_digest(context) == found.context_digest:
            return _LineageResolution(_Status.RESOLVED, match=found.match)
    return _LineageResolution(_Status.UNRESOLVED, reason="no_match")


def _imported_row(rollout_id: str, row: Any) -> LedgerRow:
    if isinstance(row, Mapping) and row.keys() == {"model_call_id", "failure_reason"}:
        call = validate_call_id(row["model_call_id"], rollout_id=rollout_id)
        reason = validate_failure_reason(row["failure_reason"], rollout_id=rollout_id, model_call_id=call)
        return LedgerRow(call, None, reason)
    try:
        body = RowBody.model_validate(row)
    except ValueError as error:
        raise InvalidRecordError(
            f"an exported ledger row is refused: {_first_line(error)} (rollout {rollout_id})",
            rollout_id=rollout_id,
        ) from None
    return LedgerRow(encode(rollout_id, body).model_call_id, body, "")


def _reasons(value: bytes | None) -> list[str]:
    """Why a call failed: each reason once, in the order in which they came."""
    try:
        reasons = [json.loads(line) for line in (value or b"").split(b"\n")]
    except ValueError:
        return [DAMAGED_REASON]
    return [reason if isinstance(reason, str) and reason else DAMAGED_REASON for reason in reasons]


def _check(rollout_id: str, model_call_id: str, text: bytes) -> bytes:
    names = _CANONICAL.encode([rollout_id, model_call_id]).encode()
    return hashlib.blake2b(names + text, digest_size=_CHECK_BYTES).digest()


def _first_line(error: Exception) -> str:
    """What was wrong, without the values: pydantic quotes them."""
    return broken_rule(error) if isinstance(error, ValidationError) else str(error).partition("\n")[0]
