"""Token blocks: every prefix of a rollout is stored once.

The sequence of a call, prompt then generation, is cut into blocks of ``BLOCK_IDS`` ids. A block's name is
the hash of its parent's name and its own ids, so that one name stands for the whole prefix that ends with
it, and reading checks it for free. A record holds the name of its last full block and the unfinished tail.
No I/O here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from gym_capture_redis.packing import (
    UNSIGNED,
    WIDTHS,
    Array,
    Packed,
    pack_pieces,
    unpack_integers,
    unpack_rows,
)

BLOCK_IDS = 256
"""Ids in a block. Part of the format, never a setting."""

NAME_BYTES = 16
"""128 bits: no two prefixes of a rollout share a name."""

ROOT = b"\0" * NAME_BYTES
"""Stands for the empty prefix: the parent of a first block."""

_KINDS = {name.encode("ascii"): name for name in UNSIGNED}
_KIND_WIDTHS = {kind: WIDTHS[name] for kind, name in _KINDS.items()}
_VALUE_HEAD = NAME_BYTES + 2
"""Where the ids of a stored block begin: after the name of its parent and their type."""

_WIDE = frozenset(("u4", "u8"))
"""Types of ids that may need int64."""

_NOTHING = np.empty(0, "<u4")
_NO_TAIL = Packed("u1", b"")


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """The ids of a call, and ``names`` of its full blocks, root first.

    ``tail`` are the ids after the last of these, fewer than ``BLOCK_IDS``. ``values`` are the stored values
    of the last blocks, as many as had to be hashed for their names. ``raw`` are the bytes of ``ids`` where
    others are to be compared with them, or nothing.
    """

    ids: Array
    names: tuple[bytes, ...]
    tail: Packed = _NO_TAIL
    values: tuple[bytes, ...] = ()
    raw: bytes = b""

    @property
    def end(self) -> bytes:
        """Name of the last full block, or ``ROOT``."""
        return self.names[-1] if self.names else ROOT

    def parent(self, index: int) -> bytes:
        """Name of the block before full block number ``index``, or ``ROOT``."""
        return self.names[index - 1] if index else ROOT

    def length_up_to(self, name: bytes) -> int:
        """How many ids it has up to the end of its full block of this name; none if it has no such block."""
        return BLOCK_IDS * (self.names.index(name) + 1) if name in self.names else 0

    def blocks_from(self, index: int) -> list[tuple[bytes, bytes]]:
        """Names and stored values of the full blocks from number ``index`` on."""
        hashed = len(self.names) - len(self.values)
        if index >= hashed:
            values = list(self.values[index - hashed :])
        else:
            packed = pack_pieces(self.ids[index * BLOCK_IDS : hashed * BLOCK_IDS], BLOCK_IDS)
            parents = [self.parent(number) for number in range(index, hashed)]
            values = [*map(_block_value, parents, packed), *self.values]
        return list(zip(self.names[index:], values, strict=True))

    @cached_property
    def without_tail(self) -> TokenSequence:
        """Its full blocks, without their values: what is worth keeping for the calls that go on from it."""
        raw = self.ids[: len(self.names) * BLOCK_IDS].tobytes()
        return TokenSequence(np.frombuffer(raw, self.ids.dtype), self.names, raw=raw)

    def goes_on_from(self, other: TokenSequence) -> bool:
        """Whether its full blocks begin with all those of the other."""
        place = len(other.names)
        return not place or (place <= len(self.names) and self.names[place - 1] == other.names[-1])

    def shared_blocks(self, ids: Array) -> int:
        """How many of its full blocks another sequence begins with."""
        length = min(len(self.names), len(ids) // BLOCK_IDS) * BLOCK_IDS
        ours, theirs = self.ids[:length], ids[:length]
        if length and ours.dtype == theirs.dtype and self.raw.startswith(theirs.data.cast("B")):
            return length // BLOCK_IDS  # nearly always, and told sooner than id by id
        equal = ours == theirs
        return (length if equal.all() else int(equal.argmin())) // BLOCK_IDS


def cut(ids: Array, earlier: Iterable[TokenSequence] = ()) -> TokenSequence:
    """Cut ``ids`` into blocks. ``earlier`` sequences spare hashing the prefixes they share."""
    known: tuple[bytes, ...] = ()
    for sequence in earlier:
        shared = sequence.shared_blocks(ids)
        if shared > len(known):
            known = sequence.names[:shared]
    names, values = list(known), []
    full = len(ids) // BLOCK_IDS - len(known)
    pieces = pack_pieces(ids[len(known) * BLOCK_IDS :], BLOCK_IDS)
    for packed in pieces[:full]:
        values.append(_block_value(names[-1] if names else ROOT, packed))
        names.append(_name(values[-1]))
    tail = pieces[full] if full < len(pieces) else _NO_TAIL
    return TokenSequence(ids, tuple(names), tail, tuple(values))


def joined(
    end: bytes, tail: Packed, blocks: Mapping[bytes, bytes], known: Iterable[TokenSequence]
) -> TokenSequence:
    """The sequence that ends with this block and tail, from stored ``blocks`` and ``known`` sequences.

    Raises:
        ValueError: a block is missing, or is not the one of its name.

    """
    places = {name: (number, sequence) for sequence in known for number, name in enumerate(sequence.names, 1)}
    names: list[bytes] = []
    values: list[bytes] = []
    before = end
    while before != ROOT and before not in places:
        value = blocks.get(before, b"")
        if not _is_block(before, value):
            raise ValueError("not the block of this name")
        values.append(value)
        names.append(before)
        before = value[:NAME_BYTES]
    number, sequence = places.get(before, (0, TokenSequence(_NOTHING, ())))
    parts = [sequence.ids[: number * BLOCK_IDS], *map(_unpacked, _runs(values[::-1])), unpack_integers(tail)]
    ids = np.concatenate(parts)
    return TokenSequence(ids, (*sequence.names[:number], *names[::-1]), tail)


@dataclass
class _Branch:
    """Stored blocks that follow each other, root first, and the longest tail seen at their end."""

    blocks: list[bytes] = field(default_factory=list)
    tail: Packed = _NO_TAIL

    def goes_on(self, blocks: int, tail: Packed) -> bool:
        """Whether these ids follow so many of its blocks."""
        kind, raw = tail
        if not raw:
            return True
        if blocks == len(self.blocks):
            follows = self.tail.type == kind and self.tail.raw.startswith(raw)
        else:
            following = self.blocks[blocks]
            follows = following.startswith(raw, _VALUE_HEAD) and _kind(following) == kind
        return follows or self._holds(blocks, tail)

    def _holds(self, blocks: int, tail: Packed) -> bool:
        """The same, told id by id: they may be of another type beside larger ones."""
        ids = _signed(unpack_integers(tail))
        here = self.ids[blocks * BLOCK_IDS :][: len(ids)]
        return len(here) == len(ids) and bool((here == ids).all())

    @cached_property
    def ids(self) -> Array:
        """All ids, as one buffer. Used only when no block is added any more."""
        runs = _runs(self.blocks)
        pieces = [*map(_unpacked, runs), unpack_integers(self.tail)]
        if _WIDE.isdisjoint([self.tail.type, *(_kind(run[0]) for run in runs)]):
            return np.concatenate(pieces, dtype="i4", casting="unsafe")  # nearly always: no look at the ids
        return _signed(np.concatenate(pieces))

    @cached_property
    def listed(self) -> list[int]:
        """The same as a list, from which prompts are sliced."""
        listed: list[int] = self.ids.tolist()
        return listed


_Place = tuple[_Branch, int]
"""Where a block ends: on which branch, after how many blocks. One for each block: no class of its own."""


class BlockTree:
    """The blocks of one rollout as they are read back.

    First all blocks and tails are added, then sequences are taken.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, _Place] = {ROOT: (_Branch(), 0)}
        self._waiting: dict[bytes, list[tuple[bytes, bytes]]] = {}

    def __len__(self) -> int:
        """How many different blocks were added."""
        return len(self._places) - 1

    @property
    def unusable(self) -> int:
        """How many blocks were given that are not those of their names, or whose parents never came."""
        return sum(map(len, self._waiting.values()))

    def add_blocks(self, blocks: Iterable[tuple[bytes, bytes]]) -> None:
        """Take names and values of stored blocks, those that follow each other in this order.

        One without its parent waits for it: a step that was put back late may bring it.
        """
        places, waiting = self._places, self._waiting
        queue = list(blocks)
        for name, value in queue:
            parent = places.get(value[:NAME_BYTES])
            if parent is None or not _is_block(name, value):
                waiting.setdefault(value[:NAME_BYTES], []).append((name, value))
                continue
            if name not in places:
                branch, before = parent
                if not before or before != len(branch.blocks):
                    branch = _Branch(branch.blocks[:before])  # goes another way: it repeats the prefix
                branch.blocks.append(value)
                branch.tail = _NO_TAIL
                places[name] = (branch, before + 1)
            if waiting and name in waiting:
                queue += waiting.pop(name)  # their turn comes in this loop

    def add_tail(self, end: bytes, tail: Packed) -> None:
        """Take the tail of a record, so that its prompt becomes a view of the same buffer."""
        branch, blocks = self._places.get(end, (None, 0))
        if branch is None or blocks != len(branch.blocks):
            return
        if branch.tail is _NO_TAIL or tail.length > branch.tail.length:
            branch.tail = tail

    def length(self, end: bytes, tail: Packed) -> int:
        """How many ids the sequence has that ends with this block and tail.

        Raises:
            ValueError: the block is not here.

        """
        _, blocks = self._place(end)
        return blocks * BLOCK_IDS + tail.length

    def split(self, end: bytes, tail: Packed, prompt_length: int, *, arrays: bool) -> tuple[Any, Any]:
        """Prompt and generation of the sequence that ends with this block and tail.

        Lists, or with ``arrays`` int32 or int64 arrays, which are views of one buffer for each branch.

        Raises:
            ValueError: the block is not here, or the prompt is longer than the sequence.

        """
        branch, blocks = self._place(end)
        total = blocks * BLOCK_IDS + tail.length
        if not 0 <= prompt_length <= total:
            raise ValueError("no such sequence")
        if branch.goes_on(blocks, tail):
            whole: Any = branch.ids if arrays else branch.listed
        else:
            # Signed before they meet: beside an unsigned array numpy would take floats.
            ids = _signed(unpack_integers(tail))
            length = blocks * BLOCK_IDS
            if arrays:
                whole = _signed(np.concatenate([branch.ids[:length], ids]))
            else:
                whole = branch.listed[:length] + ids.tolist()
        return whole[:prompt_length], whole[prompt_length:total]

    def _place(self, end: bytes) -> _Place:
        place = self._places.get(end)
        if place is None:
            raise ValueError("no such sequence")
        return place


def _signed(ids: Array) -> Array:
    """As int32, or as int64 where any id needs it: what tensors are made of."""
    return ids.astype("i4" if not ids.size or int(ids.max()) < 2**31 else "i8")


def _name(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=NAME_BYTES).digest()


def _is_block(name: bytes, value: bytes) -> bool:
    """Whether the value is that of the block of this name."""
    width = _KIND_WIDTHS.get(value[NAME_BYTES:_VALUE_HEAD])
    return width is not None and len(value) == _VALUE_HEAD + BLOCK_IDS * width and _name(value) == name


def _kind(value: bytes) -> str:
    """Type of the ids in a stored block that was checked."""
    return _KINDS[value[NAME_BYTES:_VALUE_HEAD]]


def _runs(values: Sequence[bytes]) -> list[list[bytes]]:
    """Stored blocks that follow each other, those of one type together: they have one length."""
    return [list(group) for _, group in groupby(values, key=len)]


def _unpacked(run: Sequence[bytes]) -> Array:
    """The ids in stored blocks of one type, which are unpacked at once."""
    return unpack_rows(_kind(run[0]), run, _VALUE_HEAD)


def _block_value(parent: bytes, packed: Packed) -> bytes:
    return parent + _typed(packed)


def _typed(packed: Packed) -> bytes:
    return packed.type.encode("ascii") + packed.raw
