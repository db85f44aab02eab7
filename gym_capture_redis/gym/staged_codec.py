"""A staged call as bytes, and back: pure functions, exact in both directions (docs/wire-format.md).

The record holds what Gym calls the base: fields and token columns. Extras and attachments are parts of their
own, which it names. No I/O here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np
from pydantic import ValidationError

from gym_capture_redis import gym_compat
from gym_capture_redis.attachments import pack_attachments, pack_extras
from gym_capture_redis.codec import DIGEST_BYTES, sealed
from gym_capture_redis.errors import (
    CorruptRecordError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedFormatError,
)
from gym_capture_redis.keys import RECORDED, validate_call_id, validate_rollout_id
from gym_capture_redis.packing import (
    Array,
    Packed,
    joined_ids,
    pack_integers,
    pack_log_probs,
    unpack_integers,
    unpack_log_probs,
)
from gym_capture_redis.parts import cut, named
from gym_capture_redis.subject import Subject
from gym_capture_redis.taking import reason_of


def of_gym(module: str, name: str) -> Any:
    """``name`` of a module of Gym's staging.

    Raises:
        ImportError: Gym is not here, or is older than its staging; the message says what to install.

    """
    return gym_compat.required_attribute(f"staging.{module}", name, since="0.7")


_StagedCallRecord = of_gym("records", "StagedCallRecord")
_StagedCallBaseSnapshot = of_gym("records", "StagedCallBaseSnapshot")

STAGED_FORMAT = 1

_SUBJECT = ("rollout_id", "model_call_id")
_COLUMNS = ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta")
_ELSEWHERE = frozenset((*_SUBJECT, *_COLUMNS, "extras"))
_BASE_FIELDS = frozenset(_StagedCallBaseSnapshot.model_fields) - _ELSEWHERE
_VERSIONS = {
    name: field.default
    for name, field in _StagedCallBaseSnapshot.model_fields.items()
    if name.endswith("_version") and not field.is_required()
}
_BITS = "bits"
_QUOTED_VALUE = re.compile(r"(, got|:) .*", re.DOTALL)
_UNREADABLE = (ValueError, TypeError, LookupError, OverflowError, RecursionError, msgpack.UnpackException)


class EncodedCall(NamedTuple):
    """A staged call ready to send. ``parts``, each once: name and content, of its extras and attachments."""

    seal: bytes
    record: bytes
    token_count: int
    parts: list[tuple[bytes, bytes]]


@dataclass(frozen=True, eq=False)
class StagedCall:
    """A stored call that matches its seal.

    ``fields`` are all but the columns; ``extras`` and ``attachments`` are the names of their parts, None
    where there are none.
    """

    fields: dict[str, Any]
    ids: Array
    mask: Array
    log_probs: Array
    extras: list[bytes] | None
    attachments: list[bytes] | None

    def base_snapshot(self) -> Any:
        """Gym's ``StagedCallBaseSnapshot``. The seal vouches for what was validated when it was staged."""
        columns = (self.ids.tolist(), self.mask.tolist(), self.log_probs.tolist())
        return _StagedCallBaseSnapshot.model_construct(
            **self.fields, **dict(zip(_COLUMNS, columns, strict=True))
        )


def encode(
    record: Any, attachments: Mapping[str, Any] | None, *, max_record_bytes: int
) -> tuple[Subject, EncodedCall]:
    """Validate and encode a call with what belongs to it.

    Raises:
        InvalidIdentifierError: its rollout or call id is outside the alphabet or length.
        InvalidRecordError: it breaks a rule of Gym's, its digests do not fit, or something would come back as
            something else.
        RecordTooLargeError: all of it together exceeds ``max_record_bytes``.

    """
    if not isinstance(record, _StagedCallRecord):
        raise InvalidRecordError(f"a StagedCallRecord can be staged, nothing of type {type(record).__name__}")
    rollout_id = validate_rollout_id(record.rollout_id)
    subject = Subject(rollout_id, validate_call_id(record.model_call_id, rollout_id=rollout_id))
    about = {"rollout_id": rollout_id, "model_call_id": subject.model_call_id}
    if attachments is not None and not isinstance(attachments, Mapping):
        raise InvalidRecordError(
            f"attachments must be a mapping, not of type {type(attachments).__name__}", **about
        )
    try:
        # Once more, and on a copy: it can have changed since it was built.
        taken = _StagedCallRecord.model_validate(record.__dict__)
        extras_parts = _parts(taken.extras, pack_extras)
        attachment_parts = _parts(attachments, pack_attachments)
        content = _content(taken, attachment_parts)
        stored: bytes = msgpack.packb(content | {"x": _names(extras_parts)})
        seal = _sealed(subject, _digest(content, subject), stored)
    except InvalidRecordError as error:
        raise type(error)(f"{error} ({subject})", **about) from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRecordError(
            f"the call cannot be staged: {_reason_of(error)} ({subject})", **about
        ) from None
    parts = [*(extras_parts or ()), *(attachment_parts or ())]
    nbytes = len(stored) + sum(len(part) for _, part in parts)
    if nbytes > max_record_bytes:
        raise RecordTooLargeError(
            f"the call has {nbytes} bytes with its extras and attachments, the limit max_record_bytes is "
            f"{max_record_bytes} ({subject})",
            **about,
        )
    return subject, EncodedCall(seal, stored, taken.delta_len, [*dict(parts).items()])


def decode(row: bytes, stored: bytes, subject: Subject) -> StagedCall:
    """Read a stored call and check it against its seal, which its row holds.

    Raises:
        CorruptRecordError: the bytes are not those that were stored for this call.
        UnsupportedFormatError: it follows another version of Gym's schema than the one installed here.

    """
    about = {"rollout_id": subject.rollout_id, "model_call_id": subject.model_call_id or ""}
    seal = row.removeprefix(RECORDED)
    if RECORDED + _sealed(subject, seal[:DIGEST_BYTES], stored) != row:
        raise CorruptRecordError(f"the staged call does not match its digest ({subject})", **about)
    try:
        content = msgpack.unpackb(stored, strict_map_key=True)
        fields = content["f"] | about
        ids = unpack_integers(Packed(*content["t"]))
        mask, log_probs = _unpack_columns(content["m"], Packed(*content["l"]), len(ids))
        call = StagedCall(fields, ids, mask, log_probs, content["x"], content["a"])
        is_ours = content["v"] == STAGED_FORMAT
    except _UNREADABLE:
        raise CorruptRecordError(f"the staged call is damaged ({subject})", **about) from None
    if not is_ours or not _is_installed_schema(fields):
        raise UnsupportedFormatError(
            f"the call was staged by another version of NeMo Gym or of this package ({subject})", **about
        )
    return call


def _is_installed_schema(fields: dict[str, Any]) -> bool:
    known = fields.keys() - set(_SUBJECT) == _BASE_FIELDS
    return known and all(fields[name] == version for name, version in _VERSIONS.items())


def _content(taken: Any, attachment_parts: list[tuple[bytes, bytes]] | None) -> dict[str, Any]:
    """All but the extras, which one of Gym's own digests covers, in an order that content alone decides."""
    fields = {name: taken.__dict__[name] for name in sorted(taken.__dict__) if name not in _ELSEWHERE}
    ids, _ = joined_ids(taken.token_ids_delta, [])
    mask, log_probs = _pack_columns(taken.token_mask_delta, taken.generation_log_probs_delta)
    return {
        "v": STAGED_FORMAT,
        "f": fields,
        "t": [*pack_integers(ids)],
        "m": mask,
        "l": [*log_probs],
        "a": _names(attachment_parts),
    }


def _digest(content: dict[str, Any], subject: Subject) -> bytes:
    packed = msgpack.packb([subject.rollout_id, subject.model_call_id]) + msgpack.packb(content)
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()


def _sealed(subject: Subject, digest: bytes, stored: bytes) -> bytes:
    return sealed(subject.rollout_id, subject.model_call_id or "", digest, stored)


def _pack_columns(mask: list[float], log_probs: list[float]) -> tuple[list[Any], Packed]:
    """A bit for each token, and log probabilities of generated ones; all of both where a zero has a sign."""
    marks, values = np.array(mask, "<f8"), np.array(log_probs, "<f8")
    if np.signbit(marks).any() or np.signbit(values[marks == 0.0]).any():
        return [*pack_log_probs(mask)], pack_log_probs(log_probs)
    return [_BITS, np.packbits(marks == 1.0).tobytes()], pack_log_probs(values[marks == 1.0])


def _unpack_columns(mask: list[Any], log_probs: Packed, length: int) -> tuple[Array, Array]:
    kind, raw = mask
    values = unpack_log_probs(*log_probs)
    if kind != _BITS:
        marks = unpack_log_probs(kind, raw)
        if not len(marks) == len(values) == length:
            raise ValueError("columns of different lengths")
        return marks, values
    marks = np.unpackbits(np.frombuffer(raw, "u1"), count=length).astype("f4")
    whole = np.zeros(length, values.dtype)
    whole[marks == 1.0] = values
    return marks, whole


def _reason_of(error: Exception) -> str:
    """What Gym's validation says, without the value that it may quote."""
    if not isinstance(error, ValidationError):
        return reason_of(error)
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"][:1])
    said = _QUOTED_VALUE.sub("", first["msg"]).removeprefix("Value error, ")
    return f"{name}: {said}" if name else said


def _parts(
    value: Mapping[str, Any] | None, pack: Callable[[Mapping[str, Any]], bytes]
) -> list[tuple[bytes, bytes]] | None:
    return None if value is None else named(cut(pack(value)))


def _names(parts: list[tuple[bytes, bytes]] | None) -> list[bytes] | None:
    return None if parts is None else [name for name, _ in parts]
