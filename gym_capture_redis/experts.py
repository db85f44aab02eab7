"""Routed experts, the largest field of a record, in the most compact form that gives them back exactly.

The forms, and what they are for, are in docs/wire-format.md. No I/O here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from gym_capture_redis.errors import InvalidRecordError
from gym_capture_redis.packing import MAX_ID, Array, Packed, pack_integers, unpack_integers
from gym_capture_redis.parts import Part, cut
from gym_capture_redis.route_text import decode_base64, encode_base64

PLAIN = "json"
"""The form of what is stored as plain JSON values."""

_MOST_LEVELS = 16
_ROWS_AT_ONCE = 256
_ROUTE_STRING = re.compile(r"nrlre1:[a-z0-9]+:[0-9x]+:")


def pack_experts(experts: Any) -> list[Any] | None:
    """Routed experts by form: None, packed nested integers, a packed route string, or plain JSON.

    What is packed is in parts, a list at the end of the form.

    Raises:
        InvalidRecordError: an array of other things than numbers.
        ValueError: what has no form in JSON.

    """
    if experts is None:
        return None
    if isinstance(experts, str):
        return _pack_route_string(experts) or [PLAIN, experts]
    if isinstance(experts, np.ndarray) and (not experts.ndim or isinstance(experts, np.ma.MaskedArray)):
        raise InvalidRecordError(
            "the record is invalid: routed_experts is an array of no dimension, or masked"
        )
    array = experts if isinstance(experts, np.ndarray) else _nested_integers(experts)
    if array is not None and array.dtype.kind in "iu" and array.size:
        packed = pack_integers(array)
        return ["nested", packed.type, list(array.shape), cut(packed.raw)]
    if not isinstance(experts, np.ndarray):
        return [PLAIN, to_jsonable_python(experts)]
    if experts.dtype.kind not in "iufb":
        raise InvalidRecordError("the record is invalid: routed_experts is an array of no numbers")
    return [PLAIN, experts.tolist()]


def expert_bytes(experts: Any) -> int:
    """About how much memory packing and sending them takes, by a look at the first of each level."""
    count, level = 3, experts
    for _ in range(_MOST_LEVELS):
        if isinstance(level, str | bytes):
            return count * len(level)
        if isinstance(level, np.ndarray):
            return count * level.nbytes
        if isinstance(level, dict):
            level = list(level.values())
        if not isinstance(level, list | tuple) or not level:
            break
        count *= len(level)
        level = level[0]
    return count if level is not experts else 0


def _nested_integers(nested: Any) -> Array | None:
    """A rectangular nested list of integers as an array, or None if it is anything else.

    Converted in pieces: one call of numpy would hold the interpreter for a large list's whole time.
    """
    if not isinstance(nested, list | tuple):
        return None
    pieces: list[Array] = []
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


def _signed_type(piece: Array) -> np.dtype[Any]:
    """The narrowest signed type that holds all; signed, since numpy joins int64 and uint64 as floats."""
    low, high = int(piece.min()), int(piece.max())
    return np.min_scalar_type(min(low, -high - 1)) if high <= MAX_ID else piece.dtype


def _holds_booleans(rows: Any, depth: int) -> bool:
    """Numpy takes True for 1 where integers stand beside it; JSON does not."""
    flat = rows
    for _ in range(depth - 1):
        flat = chain.from_iterable(flat)
    return not {bool, np.bool_}.isdisjoint(map(type, flat))


def _pack_route_string(experts: str) -> list[Any] | None:
    head = _ROUTE_STRING.match(experts)
    parts = decode_base64(experts, head.end()) if head is not None else None
    return ["route", head.group(), parts] if head is not None and parts is not None else None


def in_one(form: list[Any] | None) -> list[Any] | None:
    """The form with all that is packed in one piece."""
    if form is None or form[0] == PLAIN:
        return form
    return [*form[:-1], b"".join(form[-1])]


def unpack_experts(form: Any, *, arrays: bool) -> Any:
    """Routed experts from what ``pack_experts`` gave, in parts or in one piece.

    Nested ones are lists, or with ``arrays`` an array.

    Raises:
        ValueError: no such form.

    """
    match form:
        case None:
            return None
        case ["json", value] if not isinstance(value, bytes):
            return value
        case ["route", head, packed]:
            return encode_base64(_parts(packed), head)
        case ["nested", name, shape, packed]:
            array = unpack_integers(Packed(name, b"".join(_parts(packed)))).reshape(shape)
            # Row by row: one call would hold the interpreter for a large array's whole time.
            return array if arrays else [row.tolist() for row in array]
    raise ValueError("unknown form of routed experts")


def _parts(packed: bytes | list[Part]) -> Sequence[Part]:
    return [packed] if isinstance(packed, bytes) else packed
