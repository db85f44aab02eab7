"""Long values, such as routed experts, in parts: so that no step moves or hashes more than a part at a time.

A part's name is the hash of its content. Equal beginnings give equal parts, which are stored once for each
rollout. No I/O here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

PART_BYTES = 2**20
"""Bytes of every part but the last. Part of the format, never a setting."""

NAME_BYTES = 16


def cut_parts(value: bytes) -> list[tuple[bytes, bytes]]:
    """Names and contents of the parts, in order."""
    parts = (value[start : start + PART_BYTES] for start in range(0, len(value), PART_BYTES))
    return [(_name(part), part) for part in parts]


class PartStore:
    """The parts of one rollout as they are read back."""

    def __init__(self) -> None:
        self._parts: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        """How many different parts were added."""
        return len(self._parts)

    def add(self, name: bytes, content: bytes) -> None:
        """Take one stored part.

        Raises:
            ValueError: the content is not the one with this name.

        """
        if _name(content) != name:
            raise ValueError("not the part of this name")
        self._parts[name] = content

    def joined(self, names: Iterable[bytes]) -> bytes:
        """The value that was cut into these parts.

        Raises:
            KeyError: a part is not here.

        """
        return b"".join([self._parts[name] for name in names])


def _name(content: bytes) -> bytes:
    # For long values several times faster than BLAKE2b, where processors help with it.
    return hashlib.sha256(content).digest()[:NAME_BYTES]
