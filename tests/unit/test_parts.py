"""Long values in parts: what was cut comes back exactly, and no part passes for another."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gym_capture_redis.parts import NAME_BYTES, PART_BYTES, PartStore, cut, named

AROUND = (0, 1, 2, PART_BYTES // 2, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1)
LENGTHS = (*AROUND, *(length + PART_BYTES for length in AROUND[1:]), 5 * PART_BYTES + 3)
LONG = random.Random(1).randbytes(3 * PART_BYTES + 17)


def store_of(parts: list[tuple[bytes, bytes]]) -> PartStore:
    store = PartStore()
    for name, content in parts:
        store.add(name, content)
    return store


def joined(store: PartStore, names: list[bytes]) -> bytes:
    return b"".join(store.of(names))


def names_of(value: bytes) -> list[bytes]:
    return [name for name, _ in named(cut(value))]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_value_of_any_length_comes_back(length: int) -> None:
    value = random.Random(length).randbytes(length)
    parts = list(named(cut(value)))
    assert [len(content) for _, content in parts[:-1]] == [PART_BYTES] * (len(parts) - 1)
    assert len(parts) == -(-length // PART_BYTES)
    assert all(1 <= len(content) <= PART_BYTES for _, content in parts)
    assert {len(name) for name, _ in parts} <= {NAME_BYTES}
    assert joined(store_of(parts), names_of(value)) == value


@pytest.mark.parametrize("seed", range(3))
def test_parts_may_be_stored_in_any_order_and_again(seed: int) -> None:
    parts = list(named(cut(LONG)))
    shuffled = parts * 2
    random.Random(seed).shuffle(shuffled)
    store = store_of(shuffled)
    assert len(store) == len(parts)
    assert joined(store, names_of(LONG)) == LONG


def test_equal_contents_have_equal_names_and_are_stored_once() -> None:
    value = bytes(4 * PART_BYTES) + b"end"
    parts = list(named(cut(value)))
    assert [content for _, content in parts] == [bytes(PART_BYTES)] * 4 + [b"end"]
    assert len(set(names_of(value))) == len(store_of(parts)) == 2
    assert joined(store_of(parts), names_of(value)) == value


@pytest.mark.parametrize("same_bytes", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
def test_values_that_begin_alike_share_the_parts_that_are_wholly_alike(same_bytes: int) -> None:
    other = LONG[:same_bytes] + bytes([LONG[same_bytes] ^ 1]) + LONG[same_bytes + 1 :]
    shared = [one == another for one, another in zip(names_of(LONG), names_of(other), strict=True)]
    assert shared == [number != same_bytes // PART_BYTES for number in range(len(shared))]


def test_a_value_that_goes_on_keeps_its_full_parts() -> None:
    for shorter, longer in pairwise(range(PART_BYTES // 2, len(LONG), PART_BYTES // 2)):
        full = shorter // PART_BYTES
        assert names_of(LONG[:longer])[:full] == names_of(LONG[:shorter])[:full]


# Damage

DAMAGE = {
    "emptied": b"",
    "cut short": LONG[: PART_BYTES - 1],
    "one byte longer": LONG[: PART_BYTES + 1],
    "the next part": LONG[PART_BYTES : 2 * PART_BYTES],
    "zeros": bytes(PART_BYTES),
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_content_of_another_name_is_refused_and_not_kept(content: bytes) -> None:
    (name, right), *others = list(named(cut(LONG)))
    store = store_of(others)
    with pytest.raises(ValueError, match="not the part of this name"):
        store.add(name, content)
    assert len(store) == len(others)
    with pytest.raises(KeyError):
        joined(store, names_of(LONG))
    store.add(name, right)
    assert joined(store, names_of(LONG)) == LONG


@given(bit=st.integers(0, 8 * PART_BYTES - 1))
@example(bit=0)
@example(bit=8 * PART_BYTES - 1)
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    (name, content), *_ = list(named(cut(LONG)))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="not the part of this name"):
        PartStore().add(name, bytes(flipped))


@pytest.mark.parametrize("name", [b"", b"\0", b"x" * NAME_BYTES, names_of(LONG)[0][:-1], names_of(LONG)[1]])
def test_a_part_under_another_name_is_refused(name: bytes) -> None:
    with pytest.raises(ValueError, match="not the part of this name"):
        PartStore().add(name, LONG[:PART_BYTES])


@pytest.mark.parametrize("missing", range(4))
def test_a_value_with_a_missing_part_is_not_put_together(missing: int) -> None:
    parts = list(named(cut(LONG)))
    store = store_of([part for number, part in enumerate(parts) if number != missing])
    with pytest.raises(KeyError):
        joined(store, names_of(LONG))


def test_a_value_of_no_parts_is_empty() -> None:
    assert list(named(cut(b""))) == []
    assert joined(PartStore(), []) == b""
