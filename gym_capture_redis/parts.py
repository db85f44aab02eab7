"""Long values, such as routed experts, in parts: so that no step moves or hashes more than a part at a time.

A part's name is the hash of its content. Equal beginnings give equal parts, which are stored once for each
rollout. No I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_128_digest

PART_BYTES = 2**20
"""Bytes of every part but the last. Part of the format, never a setting."""

NAME_BYTES = 16

Part = bytes | memoryview


def cut(value: bytes) -> list[bytes]:
    """The parts, in order."""
    return [value[start : start + PART_BYTES] for start in range(0, len(value), PART_BYTES)]


def named(parts: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    """The parts, each behind its name."""
    return [(_name(part), part) for part in parts]


class PartStore:
    """The parts of one rollout as they are read back."""

    def __init__(self) -> None:
        self._parts: dict[bytes, Part] = {}

    def __len__(self) -> int:
        """How many different parts were added."""
        return len(self._parts)

    def add(self, name: bytes, content: Part) -> None:
        """Take one stored part.

        Raises:
            ValueError: the content is not the one with this name.

        """
        if _name(content) != name:
            raise ValueError("not the part of this name")
        self._parts[name] = content

    def of(self, names: Iterable[bytes]) -> list[Part]:
        """The parts with these names: together they are the value that was cut.

        Raises:
            KeyError: a part is not here.

        """
        return [self._parts[name] for name in names]


def _name(content: Part) -> bytes:
    # It tells accidents, not attackers; and reads memory as fast as it can be read.
    return xxh3_128_digest(content)
