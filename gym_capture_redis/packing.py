"""Arrays as bytes: the narrowest little-endian type that holds them, so that equal content gives equal bytes.

Types are named like numpy's (``u1 u2 u4 u8 i1 i2 i4 i8 f4 f8``) with ``u3`` besides: token ids of today's
vocabularies fit three bytes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from gym_capture_redis.errors import InvalidRecordError

MAX_ID = 2**63 - 1
_NARROW_IDS = np.dtype("<u4")
_TYPES = {code: (np.dtype(code), np.dtype(code).newbyteorder("<")) for code in "IQd"}
"""Of the standard library's arrays, by their code: as this machine has them, and as they are stored."""

Array = np.ndarray[Any, np.dtype[Any]]

UNSIGNED = ("u1", "u2", "u3", "u4", "u8")
_SIGNED = ("i1", "i2", "i4", "i8")
_FLOATS = ("f4", "f8")
_INTEGERS = frozenset((*UNSIGNED, *_SIGNED))
WIDTHS = {name: int(name[1]) for name in (*UNSIGNED, *_SIGNED, *_FLOATS)}
"""Bytes of an element, by its type."""
_STORED = {name: np.dtype("<" + name) for name in WIDTHS if name != "u3"}
"""What numpy calls them."""

_THREE_BYTES = 2**24 - 1
_BITS = 64
_NARROWEST: dict[tuple[str, ...], tuple[str, ...]] = {
    types: tuple(next(name for name in types if bits <= 8 * WIDTHS[name]) for bits in range(_BITS + 1))
    for types in (UNSIGNED, _SIGNED)
}
"""The narrowest of these types, for each number of bits."""
_FEW = 256
"""So few numbers are worked on sooner one by one than it takes to call numpy, between two other things."""
_FLOAT_ARRAYS = ("<f2", "<f4", "<f8", ">f2", ">f4", ">f8")
_REALS = (float, int, np.float16, np.float32, np.integer)
_FLOAT_ONLY: set[type] = {float}
_NO_FLOATS = "the record is invalid: generation_log_probs must be a list or one-dimensional array of floats"


class Packed(NamedTuple):
    """A flat array: type name and little-endian bytes."""

    type: str
    raw: bytes

    @property
    def length(self) -> int:
        """How many elements it has."""
        return len(self.raw) // WIDTHS[self.type]


def joined_ids(prompt: Any, generation: Any) -> tuple[Array, int]:
    """Prompt and generation in one array, of uint32, or uint64 if any id needs it, and the prompt's length.

    Raises:
        InvalidRecordError: either is no list or array of integers from 0 to 2**63 - 1.

    """
    if isinstance(prompt, list) and isinstance(generation, list):
        try:  # nearly always, and without another copy
            numbers = array("I")
            numbers.fromlist(prompt)
            numbers.fromlist(generation)
        except (OverflowError, TypeError):
            pass
        else:
            return _as_array(numbers), len(prompt)
    parts = [
        _id_array("prompt_token_ids", prompt),
        _id_array("generation_token_ids", generation),
    ]
    return np.concatenate(parts), len(parts[0])


def _id_array(name: str, ids: Any) -> Array:
    if isinstance(ids, np.ndarray):
        numbers = ids if ids.dtype.kind in "iu" and is_plain_row(ids) else None
    else:
        numbers = _from_list(ids)
    if numbers is None:
        raise InvalidRecordError(
            f"the record is invalid: {name} must be a list or one-dimensional array of integers "
            "from 0 to 2**63 - 1"
        )
    if not numbers.size:
        return np.empty(0, "<u4")
    if numbers.dtype == _NARROW_IDS:
        return numbers
    if int(numbers.min()) < 0 or int(numbers.max()) > MAX_ID:
        raise InvalidRecordError(f"the record is invalid: {name} holds an id outside 0 to 2**63 - 1")
    # The one type for the same ids, whatever they came in.
    return numbers.astype("<u4" if int(numbers.max()) < 2**32 else "<u8")


def is_plain_row(numbers: Array) -> bool:
    """Whether it has one dimension and no mask, under which values would be stored as if they counted."""
    return numbers.ndim == 1 and not isinstance(numbers, np.ma.MaskedArray)


def _from_list(ids: Any) -> Array | None:
    if not isinstance(ids, list | tuple):
        return None
    for code in ("I", "Q"):  # several times faster than numpy's own conversion
        try:
            return _as_array(array(code, ids))
        except (OverflowError, TypeError):
            continue
    return None


def _as_array(numbers: array[Any]) -> Array:
    native, little_endian = _TYPES[numbers.typecode]
    if not numbers:
        return np.empty(0, little_endian)
    return np.frombuffer(numbers, native).astype(little_endian, copy=False)


def pack_integers(numbers: Array) -> Packed:
    """Pack an integer array, of any shape and sign, in the narrowest type."""
    if not numbers.size:
        return Packed(UNSIGNED[0], b"")
    low, high = 0 if numbers.dtype.kind == "u" else int(numbers.min()), int(numbers.max())
    if low < 0:
        name = _narrowest(_SIGNED, max(max(high, 0).bit_length(), (-low - 1).bit_length()) + 1)
    else:
        name = _narrowest(UNSIGNED, high.bit_length())
    return Packed(name, _narrowed(numbers, name))


def pack_pieces(numbers: Array, length: int) -> list[Packed]:
    """Pack each piece of ``length`` unsigned integers, the last may be shorter, as ``pack_integers`` does."""
    starts = range(0, len(numbers), length)
    if numbers.dtype.itemsize != _NARROW_IDS.itemsize:
        return [pack_integers(numbers[start : start + length]) for start in starts]
    # Nearly always. On few ids numpy would take longer to be called than to work.
    raw = numbers.astype(_NARROW_IDS, copy=False).tobytes()
    top, third, second = raw[3::4], raw[2::4], raw[1::4]
    narrowed: dict[int, bytes] = {}
    packed = []
    for start in starts:
        zeros = bytes(min(length, len(numbers) - start))
        if not top.startswith(zeros, start):
            width = 4
        elif not third.startswith(zeros, start):
            width = 3
        else:
            width = 1 if second.startswith(zeros, start) else 2
        if width not in narrowed:
            narrowed[width] = _first_bytes(raw, width)
        piece = narrowed[width][width * start : width * (start + length)]
        packed.append(Packed(UNSIGNED[width - 1], piece))
    return packed


def _narrowest(types: tuple[str, ...], bits: int) -> str:
    if bits > _BITS:
        raise InvalidRecordError("the record is invalid: an integer does not fit 64 bits")
    return _NARROWEST[types][bits]


def _narrowed(numbers: Array, name: str) -> bytes:
    if name != "u3":
        return numbers.astype(_STORED[name]).tobytes()
    return _first_bytes(numbers.astype(_NARROW_IDS, copy=False).tobytes(), 3)


def _first_bytes(raw: bytes, width: int) -> bytes:
    """The first ``width`` of each four bytes."""
    first = bytearray(raw)
    for left in range(4, width, -1):
        del first[left - 1 :: left]
    return bytes(first)


def check_integers(packed: Packed) -> None:
    """Check what was read, before it is unpacked.

    Raises:
        ValueError: an unknown type, or bytes that are no whole number of elements.

    """
    if packed.type not in _INTEGERS or len(packed.raw) % WIDTHS[packed.type]:
        raise ValueError("not a packed integer array")


def unpack_integers(packed: Packed) -> Array:
    """The flat array that was packed.

    Raises:
        ValueError: an unknown type, or bytes that are no whole number of elements.

    """
    check_integers(packed)
    if packed.type != "u3":
        return np.frombuffer(packed.raw, _STORED[packed.type])
    return _of_three_bytes([packed.raw], (packed.length,), 0, (3,))


def unpack_rows(name: str, rows: Sequence[bytes], start: int) -> Array:
    """The arrays of type ``name`` that rows of one length hold from byte ``start`` on, as one flat array."""
    row_bytes, width = len(rows[0]), WIDTHS[name]
    shape, strides = (len(rows), (row_bytes - start) // width), (row_bytes, width)
    if name == "u3":
        return _of_three_bytes(rows, shape, start, strides).reshape(-1)
    return np.ndarray(shape, _STORED[name], b"".join(rows), start, strides).reshape(-1)


def _of_three_bytes(
    pieces: Sequence[bytes], shape: tuple[int, ...], start: int, strides: tuple[int, ...]
) -> Array:
    # Four bytes are read at each place, of which one belongs to what follows.
    raw = b"".join([*pieces, b"\0"])
    wide: Array = np.ndarray(shape, _NARROW_IDS, raw, start, strides) & _THREE_BYTES
    return wide


def pack_log_probs(values: Any) -> Packed:
    """Pack log probabilities: float32 if every value survives it bit for bit, else float64.

    Raises:
        InvalidRecordError: anything but finite floats in one dimension.

    """
    if isinstance(values, np.ndarray):
        if values.dtype.str not in _FLOAT_ARRAYS or not is_plain_row(values):
            raise InvalidRecordError(_NO_FLOATS)
        wide = values.astype("<f8")
    else:
        # array would also take what merely converts to a float, and change it silently.
        if not isinstance(values, list | tuple) or not _are_real(set(map(type, values))):
            raise InvalidRecordError(_NO_FLOATS)
        if len(values) <= _FEW and (narrow_bytes := _exact_float32(values)) is not None:
            return Packed("f4", narrow_bytes)
        try:
            numbers = array("d", values)
        except (TypeError, OverflowError):  # such as an integer beyond all floats
            raise InvalidRecordError(_NO_FLOATS) from None
        wide = _as_array(numbers)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow, squares = wide.astype("<f4"), wide.dot(wide)
    # The sum of squares tells sooner, unless it is too large itself.
    if not isfinite(squares) and not np.isfinite(wide).all():
        raise InvalidRecordError("the record is invalid: generation_log_probs holds NaN or an infinity")
    raw = wide.tobytes()
    return Packed("f4", narrow.tobytes()) if narrow.astype("<f8").tobytes() == raw else Packed("f8", raw)


def _are_real(kinds: set[type]) -> bool:
    return kinds == _FLOAT_ONLY or all(issubclass(kind, _REALS) for kind in kinds)


def _exact_float32(values: Sequence[Any]) -> bytes | None:
    """Numbers as float32, if these are finite and equal to them."""
    form = f"<{len(values)}f"
    try:
        packed = struct.pack(form, *values)
    except (OverflowError, struct.error):
        return None
    narrowed = struct.unpack(form, packed)
    return packed if narrowed == tuple(values) and isfinite(sum(narrowed)) else None


def unpack_log_probs(kind: str, raw: bytes) -> Array:
    """The float array that was packed as this type and these bytes.

    Raises:
        ValueError: an unknown type, or bytes that are no whole number of elements.

    """
    if kind not in _FLOATS or len(raw) % WIDTHS[kind]:
        raise ValueError("not a packed float array")
    return np.frombuffer(raw, _STORED[kind])
