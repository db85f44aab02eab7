"""The base64 in route strings: many megabytes, in pieces that leave the interpreter to others.

Only the canonical form is decoded: what encoding the bytes gives back. pybase64 does it where it is installed
(the extra ``fast``), many times as fast as the standard library. No I/O here.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from gym_capture_redis.parts import PART_BYTES, Part, cut

_ROUND_CHARACTERS = 4 * PART_BYTES
"""Of three parts: the fewest that are whole groups of characters and whole parts."""


class _Base64(NamedTuple):
    """Whose base64 it is. ``decode`` raises ValueError for what is no base64.

    ``piece_bytes``, whole groups of three, are what it is given at once: it holds the interpreter.
    """

    decode: Callable[[str], bytes]
    encode: Callable[[memoryview], str]
    piece_bytes: int


_STANDARD = _Base64(
    decode=partial(binascii.a2b_base64, strict_mode=True),
    encode=lambda raw: binascii.b2a_base64(raw, newline=False).decode("ascii"),
    piece_bytes=3 * 2**16,
)


def _fastest() -> _Base64:
    try:
        import pybase64
    except ImportError:
        return _STANDARD
    return _Base64(
        decode=partial(pybase64.b64decode, validate=True),
        encode=pybase64.b64encode_as_string,
        piece_bytes=3 * PART_BYTES,
    )


_BASE64 = _fastest()


def decode_base64(text: str, start: int = 0) -> list[bytes] | None:
    """The bytes, in parts, whose base64 is all of ``text`` from ``start`` on; None if there are none such."""
    groups, beside = divmod(len(text) - start, 4)
    if beside:
        return None
    parts: list[bytes] = []
    last = text[max(start, len(text) - 4) :]
    try:
        end = _BASE64.decode(last)
        for at in range(start, len(text), _ROUND_CHARACTERS):
            parts += cut(b"".join(_decoded_pieces(text, at, min(len(text), at + _ROUND_CHARACTERS))))
    except ValueError:
        return None
    # Decoders ignore bits that the last group has too many, and each takes the end of its piece for the last.
    is_padded_before = sum(map(len, parts)) - len(end) != max(0, 3 * groups - 3)
    return None if is_padded_before or encode_base64([end]) != last else parts


def encode_base64(parts: Iterable[Part], head: str = "") -> str:
    """The canonical base64 of all ``parts`` together, behind ``head``."""
    text = head
    for groups in _whole_groups(parts):
        # CPython lets the one string grow: no copy of the whole, which would hold the interpreter for long.
        text += _BASE64.encode(groups)
    return text


def _decoded_pieces(text: str, start: int, stop: int) -> Iterator[bytes]:
    characters = _BASE64.piece_bytes // 3 * 4
    for at in range(start, stop, characters):
        yield _BASE64.decode(text[at : min(stop, at + characters)])


def _whole_groups(parts: Iterable[Part]) -> Iterator[memoryview]:
    """All bytes in order, in pieces of whole groups of three; only the last may be any."""
    rest = b""
    for part in parts:
        view = memoryview(part)
        begin = -len(rest) % 3
        if len(view) < begin:
            rest += view
            continue
        yield memoryview(rest + view[:begin])
        end = begin + (len(view) - begin) // 3 * 3
        for start in range(begin, end, _BASE64.piece_bytes):
            yield view[start : min(end, start + _BASE64.piece_bytes)]
        rest = bytes(view[end:])
    yield memoryview(rest)
