"""What a sink remembers of the blocks it has sent: it saves hashing and bytes, never correctness.

A name depends on content alone, so sequences of an earlier attempt still spare hashing; which blocks are
stored is known for one attempt (incarnation) only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from gym_capture_redis.blocks import BLOCK_IDS, ROOT, TokenSequence

MAX_BRANCHES = 4
"""Sequences kept for each rollout; older branches are hashed anew."""


@dataclass
class _Rollout:
    incarnation: str = ""
    stored: set[bytes] = field(default_factory=set)
    sequences: tuple[TokenSequence, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(sequence.ids.nbytes + 64 * len(sequence.names) for sequence in self.sequences)


class BlockCache:
    """The newest rollouts, up to about ``max_bytes`` of ids. Used from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._lock = threading.Lock()

    def sequences(self, rollout_id: str) -> tuple[TokenSequence, ...]:
        """Sequences of earlier calls, newest first."""
        with self._lock:
            rollout = self._rollouts.get(rollout_id)
            return rollout.sequences if rollout else ()

    def first_unknown(self, rollout_id: str, incarnation: str, sequence: TokenSequence) -> int:
        """Number of the first block of ``sequence`` that is not known to be stored in this attempt."""
        with self._lock:
            rollout = self._rollouts.get(rollout_id)
            if rollout is None or rollout.incarnation != incarnation:
                return 0
            for index in range(len(sequence.names), 0, -1):
                if sequence.names[index - 1] in rollout.stored:
                    return index
            return 0

    def learn(self, rollout_id: str, incarnation: str, names: Iterable[bytes]) -> None:
        """These blocks, and with them all before them, are stored."""
        with self._lock:
            self._of(rollout_id, incarnation).stored.update(name for name in names if name != ROOT)

    def remember(self, rollout_id: str, incarnation: str, sequence: TokenSequence) -> None:
        """The sequence is stored: keep it for the calls that go on from it."""
        with self._lock:
            rollout = self._of(rollout_id, incarnation)
            rollout.stored.update(sequence.names)
            before = rollout.nbytes
            full = TokenSequence(sequence.ids[: len(sequence.names) * BLOCK_IDS], sequence.names)
            others = [kept for kept in rollout.sequences if kept.end not in sequence.names and kept.names]
            rollout.sequences = (full, *others)[:MAX_BRANCHES]
            self._nbytes += rollout.nbytes - before
            while self._nbytes > self._max_bytes and self._rollouts:
                _, oldest = self._rollouts.popitem(last=False)
                self._nbytes -= oldest.nbytes

    def forget(self, rollout_id: str) -> None:
        """What was believed to be stored is not."""
        with self._lock:
            rollout = self._rollouts.get(rollout_id)
            if rollout is not None:
                rollout.stored.clear()

    def _of(self, rollout_id: str, incarnation: str) -> _Rollout:
        rollout = self._rollouts.setdefault(rollout_id, _Rollout())
        self._rollouts.move_to_end(rollout_id)
        if rollout.incarnation != incarnation:
            rollout.incarnation, rollout.stored = incarnation, set()
        return rollout
