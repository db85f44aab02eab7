"""Edits of one field of a stored rollout, each by name: what a disk, a person or a program may do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import redis
from support import stored_state

BITS_OF_A_LONG_VALUE = 61
"""About how many bits of a long value are flipped, one at a time; every bit of a short one."""

LONG_VALUE_BYTES = 256
"""The state, traces, and the rows of calls are shorter."""

NUMBERS = [
    *(b"0", b"1", b"2", b"-1", b"1.5", b"1e1", b"0x10", b" 3", b"inf", b"-inf", b"nan"),
    *(b"1" + b"0" * 15, b"9" * 5_000),
]
STATUSES = [b"open", b"frozen", b"retired", b"OPEN", b"frozen "]


@dataclass(frozen=True)
class Edit:
    """``value`` None: the field is deleted; ``name`` not None: it is given that name instead."""

    what: str
    field: bytes
    value: bytes | None
    name: bytes | None = None

    def apply(self, client: redis.Redis, key: bytes) -> None:
        if self.name is not None:
            fields: Any = client.hgetall(key)
            client.hdel(key, self.field)
            client.hset(key, self.name, fields[self.field])
        elif self.value is None:
            client.hdel(key, self.field)
        else:
            client.hset(key, self.field, self.value)

    def __str__(self) -> str:
        return f"{self.field!r}: {self.what}"


def edits_of(field: bytes, value: bytes) -> Iterator[Edit]:
    """Every kind of damage to one field that leaves the other fields as they are."""
    yield Edit("deleted", field, None)
    values = dict(_values(value))
    if field == stored_state.FIELD:
        values |= dict(_states(stored_state.parse_state(value)))
    for what, damaged in values.items():
        if damaged != value:
            yield Edit(what, field, damaged)
    for name in (field + b"2", b"z" + field[1:], field[:2] + b"other", field[:-1]):
        if name != field:
            yield Edit(f"renamed to {name!r}", field, None, name)


def _values(value: bytes) -> Iterator[tuple[str, bytes]]:
    yield from _other_values(value)
    bits = 8 * len(value)
    for bit in range(0, bits, max(1, bits // BITS_OF_A_LONG_VALUE) | 1 if bits > 8 * LONG_VALUE_BYTES else 1):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(flipped)


def _other_values(value: bytes) -> Iterator[tuple[str, bytes]]:
    yield "emptied", b""
    yield "lost its end", value[:-1]
    yield "lost half", value[: len(value) // 2]
    yield "grew", value + b"0"
    yield "became garbage", b"\x80\xff\x00garbage"
    for other in (*NUMBERS, *STATUSES):
        yield f"became {other[:20]!r} of {len(other)} bytes", other


def _states(state: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Damage to one word of the state, or to the spaces around it."""
    for name, word in state.items():
        for what, damaged in _other_values(word):
            yield f"{name} {what}", stored_state.format_state(state | {name: damaged})
        others = [state[other] for other in state if other != name]
        yield f"{name} is gone with its space", b" ".join(others)
        yield f"{name} is there twice", stored_state.format_state(state | {name: word + b" " + word})
        for more in (b" ", b"0"):
            yield f"{name} begins with {more!r}", stored_state.format_state(state | {name: more + word})
    for one, other in pairwise(state):
        exchanged = state | {one: state[other], other: state[one]}
        yield f"{one} and {other} are exchanged", stored_state.format_state(exchanged)
