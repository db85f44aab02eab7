"""The base64 in route strings: many megabytes, in pieces that leave the interpreter to others.

Only the canonical form is decoded: what encoding the bytes gives back. pybase64 does it where it is installed
(the extra ``fast``), many times as fast as the standard library.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

_PIECE_BYTES = 3 * 2**16
_PIECE_CHARACTERS = _PIECE_BYTES // 3 * 4


class _Base64(NamedTuple):
    """Whose base64 it is. ``decode`` raises ValueError for what is no base64."""

    decode: Callable[[str], bytes]
    encode: Callable[[memoryview], str]


_STANDARD = _Base64(
    decode=partial(binascii.a2b_base64, strict_mode=True),
    encode=lambda raw: binascii.b2a_base64(raw, newline=False).decode("ascii"),
)


def _fastest() -> _Base64:
    try:
        import pybase64
    except ImportError:
        return _STANDARD
    return _Base64(decode=partial(pybase64.b64decode, validate=True), encode=pybase64.b64encode_as_string)


_BASE64 = _fastest()


def decode_base64(text: str, start: int = 0) -> bytes | None:
    """The bytes whose base64 is all of ``text`` from ``start`` on; None if it is that of none, exactly."""
    starts = range(start, len(text), _PIECE_CHARACTERS)
    try:
        raw = b"".join([_BASE64.decode(text[at : at + _PIECE_CHARACTERS]) for at in starts])
    except ValueError:
        return None
    # Decoders ignore bits that the last group has too many. Where an earlier group was padded there are too few
    # bytes for the last one.
    groups, beside = divmod(len(text) - start, 4)
    last_group = text[max(start, len(text) - 4) :]
    return raw if not beside and encode_base64(raw[3 * groups - 3 :]) == last_group else None


def encode_base64(raw: bytes, head: str = "") -> str:
    """The canonical base64 of ``raw``, behind ``head``."""
    view = memoryview(raw)
    starts = range(0, len(raw), _PIECE_BYTES)
    return "".join([head, *[_BASE64.encode(view[at : at + _PIECE_BYTES]) for at in starts]])
