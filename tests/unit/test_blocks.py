"""Sequences cut into blocks and put together again are the same; no other block passes for one of them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sequences import (
    conversations,
    distinct_blocks,
    growing_conversation,
    id_array,
    lengths,
    random_ids,
    sequence_of,
    tree_of,
)

from gym_capture_redis.blocks import BLOCK_IDS, NAME_BYTES, ROOT, BlockTree, TokenSequence, cut, joined
from gym_capture_redis.packing import Packed, pack_integers, unpack_integers

IDS = random_ids(2 * BLOCK_IDS + 88)


def taken(tree: BlockTree, sequence: TokenSequence, prompt_length: int, *, arrays: bool) -> tuple[Any, Any]:
    return tree.split(sequence.end, sequence.tail, prompt_length, arrays=arrays)


def assert_comes_back(tree: BlockTree, ids: list[int], prompt_length: int) -> None:
    sequence = sequence_of(ids)
    expected = ids[:prompt_length], ids[prompt_length:]
    lists = taken(tree, sequence, prompt_length, arrays=False)
    assert lists == expected
    assert {type(part) for part in lists} == {list}
    assert {type(each) for part in lists for each in part} <= {int}
    arrays = taken(tree, sequence, prompt_length, arrays=True)
    assert tuple(array.tolist() for array in arrays) == expected
    assert {array.dtype for array in arrays} <= {np.dtype("i4"), np.dtype("i8")}


# Together again


@given(conversation=conversations, data=st.data())
def test_every_sequence_of_a_conversation_comes_back_exactly(
    conversation: list[list[int]], data: st.DataObject
) -> None:
    tree = tree_of(*map(sequence_of, conversation))
    for ids in conversation:
        assert_comes_back(tree, ids, data.draw(st.integers(0, len(ids))))


@given(conversation=conversations, data=st.data())
def test_the_order_of_sequences_does_not_matter(conversation: list[list[int]], data: st.DataObject) -> None:
    tree = tree_of(*map(sequence_of, data.draw(st.permutations(conversation))))
    for ids in conversation:
        assert_comes_back(tree, ids, len(ids) // 2)


@given(conversation=conversations)
def test_a_tree_holds_every_prefix_once(conversation: list[list[int]]) -> None:
    assert len(tree_of(*map(sequence_of, conversation))) == distinct_blocks(conversation)


@pytest.mark.parametrize("position", range(len(IDS) + 1))
def test_a_branch_may_begin_anywhere(position: int) -> None:
    other = IDS[:position] + random_ids(len(IDS), seed=1)
    for order in ([IDS, other], [other, IDS]):
        tree = tree_of(*map(sequence_of, order))
        for ids in order:
            assert_comes_back(tree, ids, position)


@pytest.mark.parametrize("position", [0, 1, 255, 256, 257, 511, 512, 513, 599, 600])
@pytest.mark.parametrize("large", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1])
def test_a_large_id_among_small_ones_keeps_every_bit(position: int, large: int) -> None:
    small = [7] * 600
    ids = [*small[:position], large, *small[position:]]
    tree = tree_of(sequence_of(small), sequence_of(ids))
    assert_comes_back(tree, ids, 300)
    assert_comes_back(tree, small, 300)


@pytest.mark.parametrize(
    ("large", "dtype"), [(2**31 - 1, np.int32), (2**31, np.int64), (2**32, np.int64), (2**63 - 1, np.int64)]
)
def test_arrays_are_int32_unless_an_id_needs_more(large: int, dtype: Any) -> None:
    ids = [*range(300), large]
    sequence = sequence_of(ids)
    for part in taken(tree_of(sequence), sequence, 150, arrays=True):
        assert part.dtype == dtype


@pytest.mark.parametrize("prompt_length", [0, 1, 255, 256, 300])
@pytest.mark.parametrize("new_ids", [300, 500, 512, 600])
def test_arrays_of_a_linear_conversation_are_views_of_one_buffer(prompt_length: int, new_ids: int) -> None:
    sequences = [sequence_of(ids) for ids in growing_conversation(8, new_ids)]
    tree = tree_of(*sequences)
    whole, _ = taken(tree, sequences[-1], len(sequences[-1].ids), arrays=True)
    for sequence in sequences:
        parts = taken(tree, sequence, prompt_length, arrays=True)
        assert all(np.shares_memory(part, whole) for part in parts if part.size)


def test_lists_of_one_conversation_are_independent() -> None:
    sequences = [sequence_of(ids) for ids in growing_conversation(2, 600)]
    tree = tree_of(*sequences)
    prompt, _ = taken(tree, sequences[0], 600, arrays=False)
    prompt.clear()
    assert_comes_back(tree, sequences[0].ids.tolist(), 600)
    assert_comes_back(tree, sequences[1].ids.tolist(), 600)


# Names


@given(conversation=conversations)
def test_blocks_have_one_name_exactly_if_they_end_the_same_prefix(conversation: list[list[int]]) -> None:
    for one, other in combinations(conversation, 2):
        names, others = sequence_of(one).names, sequence_of(other).names
        for index, name in enumerate(names):
            end = (index + 1) * BLOCK_IDS
            assert (name in others) == (one[:end] == other[:end])
            assert name not in others[:index]
            assert name not in others[index + 1 :]


@given(conversation=conversations, unrelated=conversations)
def test_names_do_not_depend_on_which_sequences_were_cut_before(
    conversation: list[list[int]], unrelated: list[list[int]]
) -> None:
    alone = [sequence_of(ids) for ids in conversation]
    others = [sequence_of(ids) for ids in unrelated]
    for ids, expected in zip(conversation, alone, strict=True):
        for earlier in ([], others, alone, alone[::-1], [expected], others + alone):
            again = sequence_of(ids, earlier)
            assert (again.names, again.tail) == (expected.names, expected.tail)
            assert again.ids.tolist() == ids
            for index in range(len(again.names) + 1):
                assert again.blocks_from(index) == expected.blocks_from(index)


@given(keep=lengths, seed=st.integers(1, 3), longer=st.booleans())
def test_a_shorter_longer_or_branching_sequence_spares_nothing_but_hashing(
    keep: int, seed: int, *, longer: bool
) -> None:
    earlier = sequence_of(IDS[:keep] + (random_ids(600, seed) if longer else []))
    assert earlier.shared_blocks(id_array(IDS)) == min(keep, len(IDS)) // BLOCK_IDS
    assert sequence_of(IDS, [earlier]).names == sequence_of(IDS).names


@given(conversation=conversations)
def test_only_the_blocks_that_were_hashed_keep_their_values(conversation: list[list[int]]) -> None:
    known: list[TokenSequence] = []
    for ids in conversation:
        sequence = sequence_of(ids, known)
        shared = max((other.shared_blocks(sequence.ids) for other in known), default=0)
        assert len(sequence.values) == len(sequence.names) - shared
        assert list(sequence.values) == [value for _, value in sequence.blocks_from(shared)]
        known.append(sequence)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 512, 600])
def test_a_sequence_without_its_tail_has_the_same_blocks(count: int) -> None:
    sequence = sequence_of(IDS[:count])
    kept = sequence.without_tail
    assert (kept.names, kept.end, kept.values) == (sequence.names, sequence.end, ())
    assert kept.ids.tolist() == IDS[: count // BLOCK_IDS * BLOCK_IDS]
    assert unpack_integers(kept.tail).size == 0
    assert kept.blocks_from(0) == sequence.blocks_from(0)
    following = id_array(IDS)
    assert kept.shared_blocks(following) == sequence.shared_blocks(following)
    assert sequence_of(IDS, [kept]).blocks_from(0) == sequence_of(IDS).blocks_from(0)


@pytest.mark.parametrize("widths", [(2**8, 2**40, 2**8), (2**40, 2**8, 2**17), (2**32, 2**32 + 1, 2**24)])
def test_blocks_of_mixed_widths_are_each_as_narrow_as_alone(widths: tuple[int, ...]) -> None:
    pieces = [random_ids(BLOCK_IDS, seed, below) for seed, below in enumerate(widths)]
    blocks = sequence_of([number for piece in pieces for number in piece]).blocks_from(0)
    for piece, (_, value) in zip(pieces, blocks, strict=True):
        packed = pack_integers(np.array(piece, np.uint64))
        assert value[NAME_BYTES:] == packed.type.encode() + packed.raw


@pytest.mark.parametrize("carrier", [list, tuple, lambda ids: np.array(ids, np.int64), np.array])
def test_ids_have_the_same_blocks_in_whatever_they_come(carrier: Any) -> None:
    sequence = cut(id_array(carrier(IDS)))
    assert sequence.blocks_from(0) == sequence_of(IDS).blocks_from(0)


def test_a_large_id_does_not_rename_the_blocks_before_it() -> None:
    assert sequence_of([*IDS[: 2 * BLOCK_IDS], 2**40]).names == sequence_of(IDS).names


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 511, 512, 513, 600])
def test_only_full_blocks_are_blocks_and_the_tail_is_the_rest(count: int) -> None:
    sequence = sequence_of(IDS[:count])
    full = count // BLOCK_IDS
    assert len(sequence.names) == full
    assert sequence.end == (sequence.names[-1] if full else ROOT)
    assert unpack_integers(sequence.tail).tolist() == IDS[full * BLOCK_IDS : count]


def test_a_sequence_tells_how_long_it_is_up_to_a_block() -> None:
    sequence, another = sequence_of(IDS), sequence_of(IDS[::-1])
    lengths_up_to = [sequence.length_up_to(name) for name in (ROOT, *sequence.names, another.end)]
    assert lengths_up_to == [0, BLOCK_IDS, 2 * BLOCK_IDS, 0]


def test_every_block_names_the_one_before_it() -> None:
    sequence = sequence_of(IDS)
    blocks = sequence.blocks_from(0)
    assert [name for name, _ in blocks] == list(sequence.names)
    assert {len(name) for name in sequence.names} == {NAME_BYTES}
    assert [value[:NAME_BYTES] for _, value in blocks] == [ROOT, sequence.names[0]]
    assert [sequence.parent(index) for index in range(3)] == [ROOT, *sequence.names]
    for index in range(3):
        assert sequence.blocks_from(index) == blocks[index:]


# What is not the block of its name


def is_refused(name: bytes, value: bytes, *, parents: tuple[tuple[bytes, bytes], ...] = ()) -> bool:
    tree = BlockTree()
    tree.add_blocks([*parents, (name, value)])
    return len(tree) == len(parents) and tree.unusable == 1


FIRST, SECOND = sequence_of(IDS).blocks_from(0)


@pytest.mark.parametrize(("block", "parents"), [(FIRST, ()), (SECOND, (FIRST,))], ids=["first", "second"])
def test_a_block_with_a_flipped_bit_is_refused(
    block: tuple[bytes, bytes], parents: tuple[tuple[bytes, bytes], ...]
) -> None:
    name, value = block
    for bit in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        assert is_refused(name, bytes(flipped), parents=parents)
    for bit in range(8 * NAME_BYTES):
        renamed = bytearray(name)
        renamed[bit // 8] ^= 1 << bit % 8
        assert is_refused(bytes(renamed), value, parents=parents)


def test_a_truncated_or_longer_block_is_refused() -> None:
    name, value = FIRST
    for size in range(len(value)):
        assert is_refused(name, value[:size])
    for more in (b"\0", b"\0\0\0", value):
        assert is_refused(name, value + more)


def test_a_block_without_its_parent_is_refused() -> None:
    assert is_refused(*SECOND)
    unrelated = sequence_of(random_ids(BLOCK_IDS, seed=1)).blocks_from(0)[0]
    assert is_refused(*SECOND, parents=(unrelated,))


def test_a_block_under_the_name_of_another_is_refused() -> None:
    assert is_refused(SECOND[0], FIRST[1], parents=(FIRST,))
    assert is_refused(ROOT, FIRST[1])


@pytest.mark.parametrize("count", [0, 1, BLOCK_IDS - 1, BLOCK_IDS + 1, 2 * BLOCK_IDS])
def test_a_block_of_another_size_is_refused_though_its_name_fits(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("gym_capture_redis.blocks.BLOCK_IDS", count or 1)
        ((name, value), *_) = sequence_of([1] * (count or 1)).blocks_from(0)
    assert is_refused(name, value)


@pytest.mark.parametrize("kind", [b"", b"u", b"u9", b"f4", b"\xff\xff", b"\0\0"])
def test_a_block_of_an_unknown_type_is_refused(kind: bytes) -> None:
    assert is_refused(FIRST[0], ROOT + kind + FIRST[1][NAME_BYTES + 2 :])
    assert is_refused(FIRST[0], ROOT + kind)


def test_a_block_given_twice_is_there_once() -> None:
    tree = BlockTree()
    tree.add_blocks((FIRST, FIRST, SECOND, FIRST, SECOND))
    assert len(tree) == 2
    assert_comes_back(tree, IDS[: 2 * BLOCK_IDS], 300)


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("prompt_length", [-1, len(IDS) + 1, 2**63])
def test_a_prompt_longer_than_its_sequence_is_refused(prompt_length: int, *, arrays: bool) -> None:
    sequence = sequence_of(IDS)
    with pytest.raises(ValueError, match="no such sequence"):
        taken(tree_of(sequence), sequence, prompt_length, arrays=arrays)


@pytest.mark.parametrize("arrays", [False, True])
def test_a_sequence_whose_last_block_is_not_there_is_refused(*, arrays: bool) -> None:
    sequence = sequence_of(IDS)
    tree = BlockTree()
    tree.add_blocks([FIRST])
    tree.add_tail(sequence.end, sequence.tail)
    with pytest.raises(ValueError, match="no such sequence"):
        taken(tree, sequence, 300, arrays=arrays)


def test_a_tail_of_another_sequence_changes_nothing() -> None:
    sequence, tree = sequence_of(IDS), tree_of(sequence_of(IDS))
    tree.add_tail(sequence.end, Packed("u1", b"\1" * 200))
    tree.add_tail(sequence.names[0], Packed("u1", b"\2" * 200))
    assert_comes_back(tree, IDS, 300)


# One sequence, beside others that are known


@given(conversation=conversations, data=st.data())
def test_a_sequence_comes_back_from_what_is_stored_and_what_is_known(
    conversation: list[list[int]], data: st.DataObject
) -> None:
    sequences = [sequence_of(ids) for ids in conversation]
    number = data.draw(st.integers(0, len(sequences) - 1))
    wanted, ids = sequences[number], conversation[number]
    known = [each.without_tail for each in data.draw(st.lists(st.sampled_from(sequences), max_size=3))]
    here = {name for each in known for name in each.names}
    stored = {name: value for name, value in wanted.blocks_from(0) if name not in here}
    back = joined(wanted.end, wanted.tail, stored, known)
    assert (back.ids.tolist(), back.names) == (ids, wanted.names)
    for name, value in stored.items():
        for damaged in ({}, {name: value[:-1] + bytes([value[-1] ^ 1])}, {name: value[:-1]}):
            rest = {other: kept for other, kept in stored.items() if other != name}
            with pytest.raises(ValueError, match="not the block of this name"):
                joined(wanted.end, wanted.tail, rest | damaged, known)
