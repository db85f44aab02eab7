"""Arrays as bytes: the narrowest little-endian type that holds them, so that equal content gives equal bytes.

Types are named like numpy's (``u1 u2 u4 u8 i1 i2 i4 i8 f4 f8``) with ``u3`` besides: token ids of today's
vocabularies fit three bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_capture_redis.errors import InvalidRecordError

MAX_ID = 2**63 - 1

Array = np.ndarray[Any, np.dtype[Any]]

_UNSIGNED = ("u1", "u2", "u3", "u4", "u8")
_SIGNED = ("i1", "i2", "i4", "i8")
_FLOATS = ("f4", "f8")
_FLOAT_ARRAYS = ("<f2", "<f4", "<f8", ">f2", ">f4", ">f8")
_REALS = (float, int, np.float16, np.float32, np.integer)
_NO_FLOATS = "the record is invalid: generation_log_probs must be a list of floats"


@dataclass(frozen=True, slots=True)
class Packed:
    """A flat array: type name and little-endian bytes."""

    type: str
    raw: bytes


def id_array(name: str, ids: Any) -> Array:
    """Token ids, from a list or an integer array, as uint32, or as uint64 if any needs it.

    Raises:
        InvalidRecordError: anything but integers from 0 to 2**63 - 1; ``name`` says of which field.

    """
    if isinstance(ids, np.ndarray):
        array = ids if ids.dtype.kind in "iu" and ids.ndim == 1 else None
    else:
        array = _from_list(ids)
    if array is None:
        raise InvalidRecordError(
            f"the record is invalid: {name} must be a list of integers from 0 to 2**63 - 1"
        )
    if not array.size:
        return np.empty(0, "<u4")
    if array.dtype != np.dtype("<u4") and (int(array.min()) < 0 or int(array.max()) > MAX_ID):
        raise InvalidRecordError(f"the record is invalid: {name} holds an id outside 0 to 2**63 - 1")
    return array if array.dtype == np.dtype("<u4") else _fitted(array)


def _from_list(ids: Any) -> Array | None:
    """Struct packs a list of Python integers several times faster than numpy converts it."""
    if not isinstance(ids, list | tuple):
        return None
    for code, dtype in (("I", "<u4"), ("Q", "<u8")):
        try:
            return np.frombuffer(struct.pack(f"<{len(ids)}{code}", *ids), dtype)
        except struct.error:
            continue
    return None


def _fitted(array: Array) -> Array:
    """The one type for the same ids, whatever they came in."""
    return array.astype("<u4" if int(array.max()) < 2**32 else "<u8")


def pack_integers(array: Array) -> Packed:
    """Pack an integer array, of any shape and sign, in the narrowest type."""
    if not array.size:
        return Packed(_UNSIGNED[0], b"")
    low, high = int(array.min()), int(array.max())
    for name in _UNSIGNED if low >= 0 else _SIGNED:
        width = 8 * int(name[1])
        least, most = (0, 2**width - 1) if name[0] == "u" else (-(2 ** (width - 1)), 2 ** (width - 1) - 1)
        if least <= low and high <= most:
            return Packed(name, _narrowed(array, name))
    raise InvalidRecordError("the record is invalid: an integer does not fit 64 bits")


def _narrowed(array: Array, name: str) -> bytes:
    if name != "u3":
        return array.astype("<" + name).tobytes()
    return array.astype("<u4").reshape(-1).view("u1").reshape(-1, 4)[:, :3].tobytes()


def unpack_integers(packed: Packed) -> Array:
    """The flat array that was packed.

    Raises:
        ValueError: an unknown type, or bytes that are no whole number of elements.

    """
    if packed.type not in (*_UNSIGNED, *_SIGNED) or len(packed.raw) % int(packed.type[1]):
        raise ValueError("not a packed integer array")
    if packed.type != "u3":
        return np.frombuffer(packed.raw, "<" + packed.type)
    wide = np.zeros((len(packed.raw) // 3, 4), "u1")
    wide[:, :3] = np.frombuffer(packed.raw, "u1").reshape(-1, 3)
    return wide.reshape(-1).view("<u4")


def pack_log_probs(values: Any) -> Packed:
    """Pack log probabilities: float32 if every value survives it bit for bit, else float64.

    Raises:
        InvalidRecordError: anything but finite floats in one dimension.

    """
    if isinstance(values, np.ndarray):
        if values.dtype.str not in _FLOAT_ARRAYS or values.ndim != 1:
            raise InvalidRecordError(_NO_FLOATS)
        wide = values.astype("<f8")
    else:
        # struct would also take what merely converts to a float, and change it silently.
        if not isinstance(values, list | tuple) or not all(
            issubclass(kind, _REALS) for kind in set(map(type, values))
        ):
            raise InvalidRecordError(_NO_FLOATS)
        try:
            wide = np.frombuffer(struct.pack(f"<{len(values)}d", *values), "<f8")
        except (struct.error, OverflowError):  # an integer beyond all floats
            raise InvalidRecordError(_NO_FLOATS) from None
    if not np.isfinite(wide).all():
        raise InvalidRecordError("the record is invalid: generation_log_probs holds NaN or an infinity")
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    exact = np.array_equal(narrow.astype("<f8"), wide)
    return Packed("f4", narrow.tobytes()) if exact else Packed("f8", wide.tobytes())


def unpack_log_probs(packed: Packed) -> Array:
    """The float array that was packed.

    Raises:
        ValueError: an unknown type, or bytes that are no whole number of elements.

    """
    if packed.type not in _FLOATS or len(packed.raw) % int(packed.type[1]):
        raise ValueError("not a packed float array")
    return np.frombuffer(packed.raw, "<" + packed.type)
