"""Token sequences for tests: long ones, conversations that branch, and the trees they are read back from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gym_capture_redis.blocks import BLOCK_IDS, BlockTree, TokenSequence, cut
from gym_capture_redis.packing import Array, joined_ids

WIDTHS = (2**8, 2**17, 2**31, 2**32, 2**63)
"""Ids below these: one for every type that holds them."""


def random_ids(count: int, seed: int = 0, below: int = 150_000) -> list[int]:
    """Ids of no pattern, the same for the same arguments."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, below, count, dtype=np.uint64).tolist()
    return drawn


def id_array(ids: Any) -> Array:
    """Ids as they are kept, from whatever they come in."""
    array, _ = joined_ids(ids, [])
    return array


def sequence_of(ids: list[int], earlier: Iterable[TokenSequence] = ()) -> TokenSequence:
    return cut(id_array(ids), earlier)


def tree_of(*sequences: TokenSequence) -> BlockTree:
    """The tree that a reader has after the records of these sequences, in this order."""
    tree = BlockTree()
    for sequence in sequences:
        tree.add_blocks(sequence.blocks_from(0))
        tree.add_tail(sequence.end, sequence.tail)
    return tree


def distinct_blocks(sequences: Iterable[list[int]]) -> int:
    """How many blocks these sequences need, counted without hashing anything."""
    prefixes = {tuple(ids[:end]) for ids in sequences for end in range(BLOCK_IDS, len(ids) + 1, BLOCK_IDS)}
    return len(prefixes)


@dataclass(frozen=True)
class Turn:
    """Go on from the sequence number ``parent`` after ``keep`` of its ids, with ``new`` random ones."""

    parent: int
    keep: int
    new: int
    below: int
    seed: int


lengths = st.one_of(
    st.integers(0, 3 * BLOCK_IDS),
    st.builds(
        lambda blocks, beside: max(0, blocks * BLOCK_IDS + beside), st.integers(0, 3), st.integers(-1, 1)
    ),
)
turns = st.builds(
    Turn,
    parent=st.integers(0, 5),
    keep=lengths | st.just(10**6),
    new=lengths,
    below=st.sampled_from(WIDTHS),
    seed=st.integers(0, 3),
)


def _sequences(of: list[Turn]) -> list[list[int]]:
    made: list[list[int]] = [[]]
    for turn in of:
        parent = made[turn.parent % len(made)]
        made.append(parent[: turn.keep] + random_ids(turn.new, turn.seed, turn.below))
    return made


conversations: st.SearchStrategy[list[list[int]]] = st.lists(turns, min_size=1, max_size=6).map(_sequences)
"""Sequences of one rollout: continued, branched, rewritten, retried and cut short."""


def growing_conversation(turn_count: int, new_ids: int, *, seed: int = 0) -> list[list[int]]:
    """Sequences that each continue the one before."""
    whole = random_ids(turn_count * new_ids, seed)
    return [whole[:end] for _, end in pairwise(range(0, len(whole) + 1, new_ids))]
