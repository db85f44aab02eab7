"""What is staged beside a call, as bytes and back: the engine's extras, and a framework's attachments.

Both exact (docs/wire-format.md): extras are plain JSON values, attachments are bytes, numpy arrays and plain
values in nested mappings. Equal content gives equal bytes. Nothing decodes by executing. No I/O here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from gym_capture_redis.errors import InvalidRecordError
from gym_capture_redis.experts import in_one, pack_experts, unpack_experts
from gym_capture_redis.packing import Array

_BYTES, _ARRAY = 1, 2
"""Extension types of msgpack: bytes, and an array, whose content follows the tree."""

_LENGTH_BYTES = 4
_MOST_LEVELS = 32
_KINDS = frozenset("biufcmMSU")
"""Of arrays: booleans, numbers, times and strings of a fixed length."""

_PLATFORMS_OWN = frozenset("gG")
"""Long doubles, which have another size elsewhere."""


def pack_extras(extras: Mapping[str, Any]) -> bytes:
    """Plain JSON values by name; integers in rectangular lists, and route strings, are packed.

    Raises:
        ValueError, TypeError, OverflowError: what msgpack cannot carry.

    """
    packed: bytes = msgpack.packb({name: in_one(pack_experts(extras[name])) for name in sorted(extras)})
    return packed


def unpack_extras(packed: bytes) -> dict[str, Any]:
    """The extras from what ``pack_extras`` gave.

    Raises:
        ValueError, TypeError: the bytes are something else.

    """
    forms = msgpack.unpackb(packed, strict_map_key=True)
    return {name: unpack_experts(form, arrays=False) for name, form in forms.items()}


def pack_attachments(attachments: Mapping[str, Any]) -> bytes:
    """A tree of the mappings, and behind it the bytes and arrays, in the order of the tree.

    Raises:
        InvalidRecordError: what would not come back as it is; the message says where and why.

    """
    bodies: list[bytes] = []
    try:
        tree = msgpack.packb(_packable(attachments, "attachments", bodies, _MOST_LEVELS))
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, InvalidRecordError):
            raise
        reason = "an integer beyond 64 bits" if isinstance(error, OverflowError) else "text that is no UTF-8"
        raise InvalidRecordError(f"the attachments are refused: they hold {reason}") from None
    return b"".join([len(tree).to_bytes(_LENGTH_BYTES, "big"), tree, *bodies])


def unpack_attachments(packed: bytes) -> dict[str, Any]:
    """Attachments from what ``pack_attachments`` gave; arrays are writable and their own.

    Raises:
        ValueError, TypeError: the bytes are something else.

    """
    at = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "big")
    bodies = _Bodies(memoryview(packed)[at:])
    attachments = msgpack.unpackb(packed[_LENGTH_BYTES:at], strict_map_key=True, ext_hook=bodies.take)
    if not isinstance(attachments, dict) or bodies.rest:
        raise ValueError("not packed attachments")
    return attachments


def _packable(value: Any, where: str, bodies: list[bytes], levels: int) -> Any:
    """What msgpack writes for the value; bytes and arrays go to ``bodies``."""
    if not levels:
        raise _refused(where, f"it is nested more than {_MOST_LEVELS} levels deep")
    if isinstance(value, Mapping):
        names = list(value)
        if any(type(name) is not str for name in names):
            raise _refused(where, "a name in it is no string")
        return {
            name: _packable(value[name], f"{where}[{name!r}]", bodies, levels - 1) for name in sorted(names)
        }
    if isinstance(value, bytes | bytearray | memoryview):
        bodies.append(bytes(value))
        return msgpack.ExtType(_BYTES, msgpack.packb(len(bodies[-1])))
    if isinstance(value, np.ndarray):
        bodies.append(_array_bytes(value, where))
        return msgpack.ExtType(_ARRAY, msgpack.packb([value.dtype.str, list(value.shape)]))
    if type(value) is list:
        return [
            _packable(item, f"{where}[{number}]", bodies, levels - 1) for number, item in enumerate(value)
        ]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise _refused(where, f"it is of type {type(value).__name__}")


def _array_bytes(array: Array, where: str) -> bytes:
    kind = array.dtype
    if isinstance(array, np.ma.MaskedArray):
        raise _refused(where, "it is a masked array")
    if kind.kind not in _KINDS or kind.char in _PLATFORMS_OWN or not kind.itemsize:
        raise _refused(where, f"it is an array of {kind.name or kind}")
    return array.tobytes()


def _refused(where: str, why: str) -> InvalidRecordError:
    return InvalidRecordError(
        f"{where} is refused: {why}; attachments are bytes, numpy arrays of numbers, lists and plain values, "
        "in mappings with strings as names"
    )


class _Bodies:
    """The bytes behind a tree, which are taken in its order."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def take(self, code: int, data: bytes) -> Any:
        """What an extension type of the tree stands for."""
        form = msgpack.unpackb(data)
        if code == _BYTES:
            return bytes(self._next(form))
        if code != _ARRAY:
            raise ValueError("not packed attachments")
        name, shape = form
        kind = np.dtype(name)
        if kind.kind not in _KINDS:
            raise ValueError("not an array of numbers")
        count = int(np.prod(shape, dtype=object))
        return np.frombuffer(self._next(count * kind.itemsize), kind).reshape(shape).copy()

    def _next(self, nbytes: int) -> memoryview:
        if not 0 <= nbytes <= len(self.rest):
            raise ValueError("not packed attachments")
        body, self.rest = self.rest[:nbytes], self.rest[nbytes:]
        return body
