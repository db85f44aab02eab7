"""A record as bytes, and back: pure functions, exact in both directions (docs/wire-format.md).

Arrays are packed in the narrowest type that holds them, so that the same content always gives the same
bytes. The digest covers the content, not how a caller happened to carry it: lists and arrays, Gym's entry
class and ours give the same one. Nothing here decodes by executing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import msgpack
import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from gym_capture_redis.errors import (
    CorruptRecordError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedFormatError,
)
from gym_capture_redis.records import SCHEMA_VERSION, TokenEntry

RECORD_FORMAT = 1
DIGEST_BYTES = 32
LARGE_TOKENS = 65_536
"""Records above this many tokens, or with routed experts, are worth a thread of their own."""

_ARRAY_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_PACKED_FIELDS = frozenset((*_ARRAY_FIELDS, "routed_experts"))
_EMPTY_ARRAYS: dict[str, Any] = {name: [] for name in _ARRAY_FIELDS}
_UNSIGNED = ("u1", "u2", "u4", "u8")
_SIGNED = ("i1", "i2", "i4", "i8")
_FLOATS = ("f4", "f8")
_MAX_ID = 2**63 - 1
_ROWS_AT_ONCE = 256
_ROUTE_STRING = re.compile(r"nrlre1:[a-z0-9]+:[0-9x]+:")
_UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException)


class EntryType(Protocol):
    """A class of entries: Gym's ``TokenEntry`` or ours."""

    def model_validate(self, obj: Any) -> Any:
        """Build one entry from a mapping of its fields."""


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record ready to send: ``digest`` has 32 bytes, ``record`` is msgpack."""

    rollout_id: str
    model_call_id: str
    digest: bytes
    record: bytes


@dataclass(frozen=True, slots=True)
class _Packed:
    """A one-dimensional array: numpy type name and little-endian bytes."""

    type: str
    raw: bytes


def is_large(entry: Any) -> bool:
    """Whether encoding ``entry`` would hold an event loop noticeably."""
    if getattr(entry, "routed_experts", None) is not None:
        return True
    try:
        return len(entry.prompt_token_ids) + len(entry.generation_token_ids) > LARGE_TOKENS
    except (AttributeError, TypeError):
        return False


def encode(entry: Any, *, max_record_bytes: int) -> EncodedRecord:
    """Encode any ``TokenEntry``-like pydantic model, checking every rule of contract section 2 again.

    Raises:
        InvalidRecordError: the entry breaks a rule, or holds what no reader could load unchanged.
        RecordTooLargeError: the encoded record exceeds ``max_record_bytes``.

    """
    rest = _content_without_arrays(entry)
    subject = {"rollout_id": rest.get("rollout_id"), "model_call_id": rest.get("model_call_id")}
    try:
        _check_rereading(rest)
        prompt = _pack_ids("prompt_token_ids", entry.prompt_token_ids)
        generation = _pack_ids("generation_token_ids", entry.generation_token_ids)
        log_probs = _pack_log_probs(entry.generation_log_probs)
        _check_lengths(entry)
        experts = _pack_experts(entry)
        record: bytes = msgpack.packb(
            {
                "v": RECORD_FORMAT,
                "e": rest,
                "p": [prompt.type, prompt.raw],
                "g": [generation.type, generation.raw],
                "l": [log_probs.type, log_probs.raw],
                "x": experts,
            }
        )
        digest = _digest(rest, prompt, generation, log_probs, experts)
    except InvalidRecordError as error:
        error.rollout_id, error.model_call_id = subject["rollout_id"], subject["model_call_id"]
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRecordError(
            f"the record cannot be encoded: {_reason(error)} ({_name(subject)})", **subject
        ) from None
    if len(record) > max_record_bytes:
        raise RecordTooLargeError(
            f"the record has {len(record)} bytes, the limit max_record_bytes is {max_record_bytes} "
            f"({_name(subject)})",
            **subject,
        )
    return EncodedRecord(rest["rollout_id"], rest["model_call_id"], digest, record)


def decode(
    record: bytes, digest: bytes, *, rollout_id: str, model_call_id: str, entry_type: EntryType
) -> Any:
    """Decode a record into an entry of ``entry_type``, after checking it against ``digest``.

    Raises:
        CorruptRecordError: the bytes are not those that were stored for this call.
        UnsupportedFormatError: the record follows a newer schema than ``entry_type`` reads.

    """
    about = {"rollout_id": rollout_id, "model_call_id": model_call_id}
    try:
        # The digest is taken over JSON, in which the keys nil and "null" are the same: strings only.
        fields = msgpack.unpackb(record, strict_map_key=True)
        rest, experts = fields["e"], fields["x"]
        prompt = _packed(fields["p"], _UNSIGNED)
        generation = _packed(fields["g"], _UNSIGNED)
        log_probs = _packed(fields["l"], _FLOATS)
        intact = (
            fields["v"] == RECORD_FORMAT
            and _digest(rest, prompt, generation, log_probs, experts) == digest
            and (rest["rollout_id"], rest["model_call_id"]) == (rollout_id, model_call_id)
        )
        if not intact:
            raise CorruptRecordError(f"the stored record does not match its digest ({_name(about)})", **about)
        rest["routed_experts"] = _unpack_experts(experts)
    except _UNREADABLE:
        raise CorruptRecordError(f"the stored record is damaged ({_name(about)})", **about) from None
    return _build(entry_type, rest, prompt, generation, log_probs, about)


def encode_refusal(rollout_id: str, model_call_id: str, code: str, details: dict[str, Any]) -> bytes:
    """What is stored of a refusal after its code: a digest of 32 bytes, then msgpack of the details.

    Raises:
        InvalidRecordError: a detail that msgpack cannot carry.

    """
    try:
        packed: bytes = msgpack.packb(details)
        stored = _refusal_digest(rollout_id, model_call_id, code, packed) + packed
        decode_refusal(rollout_id, model_call_id, code, stored)  # what no reader could load ends here
    except (CorruptRecordError, *_UNREADABLE) as error:
        raise InvalidRecordError(
            f"the details of the refusal cannot be encoded: {_reason(error)}",
            rollout_id=rollout_id,
            model_call_id=model_call_id,
        ) from None
    return stored


def decode_refusal(rollout_id: str, model_call_id: str, code: str, stored: bytes) -> dict[str, Any]:
    """Details of a refusal from what ``encode_refusal`` gave.

    Raises:
        CorruptRecordError: the bytes are not those that were stored for this call and code.

    """
    digest, packed = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    try:
        details = msgpack.unpackb(packed, strict_map_key=True)
        intact = _refusal_digest(rollout_id, model_call_id, code, packed) == digest
    except _UNREADABLE:
        intact = False
    if not intact or not isinstance(details, dict):
        raise CorruptRecordError(
            f"the stored refusal of call {model_call_id!r} of rollout {rollout_id} is damaged",
            rollout_id=rollout_id,
            model_call_id=model_call_id,
        )
    return details


def _refusal_digest(rollout_id: str, model_call_id: str, code: str, packed: bytes) -> bytes:
    head = _canonical_json([rollout_id, model_call_id, code])
    return hashlib.blake2b(head + packed, digest_size=DIGEST_BYTES).digest()


def _content_without_arrays(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, BaseModel):
        raise InvalidRecordError(f"put takes a TokenEntry, not a {type(entry).__name__}")
    missing = [name for name in (*_ARRAY_FIELDS, "rollout_id", "model_call_id") if not hasattr(entry, name)]
    if missing:
        raise InvalidRecordError(f"put takes a TokenEntry; this {type(entry).__name__} lacks {missing[0]}")
    try:
        # A changed entry may hold other types than declared; what matters is what they serialise to.
        return entry.model_dump(mode="json", exclude=set(_PACKED_FIELDS), warnings=False)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise InvalidRecordError(
            f"the record cannot be serialised: {_reason(error)}",
            rollout_id=_text_or_none(getattr(entry, "rollout_id", None)),
            model_call_id=_text_or_none(getattr(entry, "model_call_id", None)),
        ) from None


def _check_rereading(rest: dict[str, Any]) -> None:
    """Refuse what a reader would refuse, or would load as something else."""
    try:
        reread = TokenEntry.model_validate(rest | _EMPTY_ARRAYS)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRecordError(
            f"the record is invalid: {where + ': ' if where else ''}{first['msg']}"
        ) from None
    dumped = reread.model_dump(mode="json", exclude=set(_PACKED_FIELDS))
    changed = [name for name, value in rest.items() if dumped[name] != value]
    if changed:
        raise InvalidRecordError(f"the record is invalid: {changed[0]} would be read back as another value")


def _check_lengths(entry: Any) -> None:
    generated, log_probs = len(entry.generation_token_ids), len(entry.generation_log_probs)
    if generated != log_probs:
        raise InvalidRecordError(
            f"the record is invalid: {generated} generation_token_ids but {log_probs} generation_log_probs"
        )


def _pack_ids(name: str, ids: Any) -> _Packed:
    array = _integers(ids)
    if array is None or array.ndim != 1:
        raise InvalidRecordError(
            f"the record is invalid: {name} must be a list of integers from 0 to 2**63 - 1"
        )
    if not array.size:
        return _Packed(_UNSIGNED[0], b"")
    if array.min() < 0 or array.max() > _MAX_ID:
        raise InvalidRecordError(f"the record is invalid: {name} holds an id outside 0 to 2**63 - 1")
    return _narrowed(array, _UNSIGNED)


def _integers(ids: Any) -> np.ndarray[Any, Any] | None:
    """``ids`` as an integer array, or None if they are none. struct packs lists faster than numpy."""
    if isinstance(ids, np.ndarray):
        return ids if ids.dtype.kind in "iu" else None
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        return None
    for code, dtype in (("I", "<u4"), ("Q", "<u8")):
        try:
            return np.frombuffer(struct.pack(f"<{len(ids)}{code}", *ids), dtype)
        except struct.error:
            continue
    return None


def _narrowed(array: np.ndarray[Any, Any], types: Sequence[str]) -> _Packed:
    low, high = int(array.min()), int(array.max())
    for name in types:
        limits = np.iinfo(name)
        if limits.min <= low and high <= limits.max:
            return _Packed(name, array.astype("<" + name).tobytes())
    raise InvalidRecordError("the record is invalid: an integer does not fit 64 bits")


def _pack_log_probs(values: Any) -> _Packed:
    if isinstance(values, np.ndarray):
        if values.dtype.kind != "f" or values.ndim != 1:
            raise InvalidRecordError("the record is invalid: generation_log_probs must be floats")
        wide = values.astype("<f8")
    else:
        try:
            wide = np.frombuffer(struct.pack(f"<{len(values)}d", *values), "<f8")
        except (struct.error, TypeError):
            raise InvalidRecordError("the record is invalid: generation_log_probs must be floats") from None
    if not np.isfinite(wide).all():
        raise InvalidRecordError("the record is invalid: generation_log_probs holds NaN or an infinity")
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    exact = np.array_equal(narrow.astype("<f8"), wide)
    return _Packed("f4", narrow.tobytes()) if exact else _Packed("f8", wide.tobytes())


def _pack_experts(entry: Any) -> list[Any] | None:
    """Routed experts by form: None, packed nested integers, a packed route string, or plain JSON."""
    experts = getattr(entry, "routed_experts", None)
    if experts is None:
        return None
    if isinstance(experts, str):
        return _pack_route_string(experts) or ["json", experts]
    array = experts if isinstance(experts, np.ndarray) else _nested_integers(experts)
    if array is not None and array.dtype.kind in "iu" and array.size:
        packed = _narrowed(array, _UNSIGNED if array.min() >= 0 else _SIGNED)
        return ["nested", packed.type, list(array.shape), packed.raw]
    if isinstance(experts, np.ndarray):
        return ["json", experts.tolist()]
    dumped = entry.model_dump(mode="json", include={"routed_experts"}, warnings=False)
    return ["json", dumped["routed_experts"]]


def _nested_integers(nested: Any) -> np.ndarray[Any, Any] | None:
    """A rectangular nested list of integers as an array, or None if it is anything else.

    Converted in pieces: one call of numpy would hold the interpreter for a large list's whole time.
    """
    if not isinstance(nested, list | tuple):
        return None
    pieces: list[np.ndarray[Any, Any]] = []
    for start in range(0, len(nested), _ROWS_AT_ONCE):
        rows = nested[start : start + _ROWS_AT_ONCE]
        try:
            piece = np.asarray(rows)
        except (ValueError, OverflowError):
            return None  # ragged, or beyond 64 bits
        if piece.dtype.kind not in "iu" or _holds_booleans(rows, piece.ndim):
            return None
        if pieces and piece.shape[1:] != pieces[0].shape[1:]:
            return None
        pieces.append(piece.astype(_signed_type(piece)))
    whole = np.concatenate(pieces) if pieces else None
    # Beside a negative number one above int64 makes numpy take floats.
    return whole if whole is not None and whole.dtype.kind in "iu" else None


def _signed_type(piece: np.ndarray[Any, Any]) -> np.dtype[Any]:
    """The narrowest signed type that holds all; signed, since numpy joins int64 and uint64 as floats."""
    low, high = int(piece.min()), int(piece.max())
    return np.min_scalar_type(min(low, -high - 1)) if high <= _MAX_ID else piece.dtype


def _holds_booleans(rows: Any, depth: int) -> bool:
    """Numpy takes True for 1 where integers stand beside it; JSON does not."""
    flat = rows
    for _ in range(depth - 1):
        flat = chain.from_iterable(flat)
    return not {bool, np.bool_}.isdisjoint(map(type, flat))


def _pack_route_string(experts: str) -> list[Any] | None:
    head = _ROUTE_STRING.match(experts)
    if head is None:
        return None
    try:
        raw = base64.b64decode(experts[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        return None
    same = base64.b64encode(raw).decode("ascii") == experts[head.end() :]
    return ["route", head.group(), raw] if same else None


def _unpack_experts(experts: Any) -> Any:
    match experts:
        case None:
            return None
        case ["json", value] if not isinstance(value, bytes):
            return value
        case ["route", head, raw]:
            return head + base64.b64encode(raw).decode("ascii")
        case ["nested", name, shape, raw]:
            packed = _packed([name, raw], (*_UNSIGNED, *_SIGNED))
            return np.frombuffer(packed.raw, "<" + packed.type).reshape(shape).tolist()
    raise ValueError("unknown form of routed experts")


def _packed(pair: Any, types: Sequence[str]) -> _Packed:
    name, raw = pair
    if name not in types or not isinstance(raw, bytes) or len(raw) % int(name[1]):
        raise ValueError("not a packed array")
    return _Packed(name, raw)


def _digest(
    rest: dict[str, Any], prompt: _Packed, generation: _Packed, log_probs: _Packed, experts: list[Any] | None
) -> bytes:
    """BLAKE2b over lengths and parts: the sorted JSON of the small fields, then each packed array."""
    *experts_head, experts_body = experts or [b""]
    if not isinstance(experts_body, bytes):
        experts_body = _canonical_json(experts_body)
    parts = [_canonical_json(rest), prompt.raw, generation.raw, log_probs.raw, experts_body]
    head = [prompt.type, generation.type, log_probs.type, experts_head, [len(part) for part in parts]]
    hasher = hashlib.blake2b(_canonical_json(head), digest_size=DIGEST_BYTES)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _build(
    entry_type: EntryType,
    rest: dict[str, Any],
    prompt: _Packed,
    generation: _Packed,
    log_probs: _Packed,
    about: dict[str, str],
) -> Any:
    try:
        entry = entry_type.model_validate(rest | _EMPTY_ARRAYS)
    except ValidationError as error:
        if rest.get("schema_version", 0) > SCHEMA_VERSION:
            raise UnsupportedFormatError(
                f"the record has schema_version {rest['schema_version']}, newer than this reader's: "
                f"upgrade the reader ({_name(about)})",
                **about,
            ) from None
        raise CorruptRecordError(
            f"the stored record is intact but not valid: {error.errors(include_input=False)[0]['msg']} "
            f"({_name(about)})",
            **about,
        ) from None
    # The digest vouches for the arrays; validating every element again would cost more than reading.
    entry.prompt_token_ids = np.frombuffer(prompt.raw, "<" + prompt.type).tolist()
    entry.generation_token_ids = np.frombuffer(generation.raw, "<" + generation.type).tolist()
    entry.generation_log_probs = np.frombuffer(log_probs.raw, "<" + log_probs.type).tolist()
    return entry


def _name(subject: dict[str, Any]) -> str:
    return f"call {subject['model_call_id']!r} of rollout {subject['rollout_id']}"


def _reason(error: Exception) -> str:
    """What went wrong, by class only: the message could quote token data."""
    if isinstance(error, UnicodeEncodeError):
        return "a string is not valid UTF-8"
    if isinstance(error, OverflowError):
        return "an integer does not fit 64 bits"
    if isinstance(error, RecursionError) or "recursion" in str(error):
        return "it is nested too deeply"
    return f"a value is not plain JSON ({type(error).__name__})"


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None
