"""What a sink remembers of the blocks it has sent: it saves hashing and bytes, never correctness.

A name depends on content alone, so sequences of an earlier attempt still spare hashing; which blocks are
stored is known for one attempt (incarnation) only.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gym_capture_redis.blocks import ROOT, TokenSequence

MAX_BRANCHES = 4
"""Sequences kept for each rollout; older branches are hashed anew."""

_ROLLOUT_BYTES = 1_000
_NAME_BYTES = 100
"""About what Python needs for a rollout and for a name in a set."""


@dataclass
class _Rollout:
    incarnation: str = ""
    stored: set[bytes] = field(default_factory=set)
    sequences: tuple[TokenSequence, ...] = ()
    sequence_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return _ROLLOUT_BYTES + _NAME_BYTES * len(self.stored) + self.sequence_bytes

    def keep(self, sequence: TokenSequence) -> None:
        """Add a stored sequence, in place of those that it goes on from, unless it would spare no hashing."""
        earlier = [kept for kept in self.sequences if sequence.goes_on_from(kept)]
        known = max([len(kept.names) for kept in earlier if kept.end in self.stored], default=0)
        self.stored.update(sequence.names[known:])
        if sequence.names and not any(kept.goes_on_from(sequence) for kept in self.sequences):
            others = [kept for kept in self.sequences if kept not in earlier]
            self.sequences = (sequence.without_tail, *others)[:MAX_BRANCHES]
            self.sequence_bytes = sum([kept.ids.nbytes + 8 * len(kept.names) for kept in self.sequences])


class _Contents:
    """All that one process remembers."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self.nbytes = 0

    def taken_out(self, rollout_id: str, incarnation: str) -> _Rollout:
        """What is remembered of this attempt, to be changed."""
        rollout = self.rollouts.pop(rollout_id, None)
        if rollout is None:
            return _Rollout(incarnation)
        self.nbytes -= rollout.nbytes
        if rollout.incarnation != incarnation:
            rollout.incarnation, rollout.stored = incarnation, set()
        return rollout

    def put_back(self, rollout_id: str, rollout: _Rollout, max_bytes: int) -> None:
        """Remember it as the newest; the oldest make room for it."""
        self.rollouts[rollout_id] = rollout
        self.nbytes += rollout.nbytes
        while self.nbytes > max_bytes and self.rollouts:
            _, oldest = self.rollouts.popitem(last=False)
            self.nbytes -= oldest.nbytes


class BlockCache:
    """The newest rollouts, up to about ``max_bytes``. Used from several threads; empty after a fork."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._own = _Contents()

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return self._contents().nbytes

    def sequences(self, rollout_id: str) -> tuple[TokenSequence, ...]:
        """Sequences of earlier calls, newest first."""
        contents = self._contents()
        with contents.lock:
            rollout = contents.rollouts.get(rollout_id)
            return rollout.sequences if rollout else ()

    def incarnation(self, rollout_id: str) -> str:
        """The attempt that was learned of last, or an empty string."""
        contents = self._contents()
        with contents.lock:
            rollout = contents.rollouts.get(rollout_id)
            return rollout.incarnation if rollout else ""

    def first_unknown(self, rollout_id: str, incarnation: str, sequence: TokenSequence) -> int:
        """Number of the first block of ``sequence`` that is not known to be stored in this attempt."""
        contents = self._contents()
        with contents.lock:
            rollout = contents.rollouts.get(rollout_id)
            if rollout is None or rollout.incarnation != incarnation:
                return 0
            for index in range(len(sequence.names), 0, -1):
                if sequence.names[index - 1] in rollout.stored:
                    return index
            return 0

    def unknown(
        self, rollout_id: str, incarnation: str, parts: Sequence[tuple[bytes, bytes]]
    ) -> Sequence[tuple[bytes, bytes]]:
        """Those of the parts, given as name and content, that are not known to be stored in this attempt.

        Each once, however often a value repeats it.
        """
        if not parts:
            return parts
        distinct = list(dict(parts).items())
        contents = self._contents()
        with contents.lock:
            rollout = contents.rollouts.get(rollout_id)
            if rollout is None or rollout.incarnation != incarnation:
                return distinct
            return [part for part in distinct if part[0] not in rollout.stored]

    def learn(self, rollout_id: str, incarnation: str, names: Iterable[bytes]) -> None:
        """These blocks, and with them all before them, are stored."""
        contents = self._contents()
        with contents.lock:
            rollout = contents.taken_out(rollout_id, incarnation)
            rollout.stored.update(name for name in names if name != ROOT)
            contents.put_back(rollout_id, rollout, self._max_bytes)

    def remember(self, rollout_id: str, incarnation: str, sequence: TokenSequence) -> None:
        """The sequence is stored: keep it for the calls that go on from it."""
        contents = self._contents()
        with contents.lock:
            rollout = contents.taken_out(rollout_id, incarnation)
            rollout.keep(sequence)
            contents.put_back(rollout_id, rollout, self._max_bytes)

    def forget(self, rollout_id: str) -> None:
        """What was believed to be stored is not."""
        contents = self._contents()
        with contents.lock:
            rollout = contents.rollouts.get(rollout_id)
            if rollout is not None:
                contents.nbytes -= rollout.nbytes
                rollout.stored.clear()
                contents.nbytes += rollout.nbytes

    def _contents(self) -> _Contents:
        # After a fork the lock may be held by a thread of the parent, half-way through a change.
        if self._own.pid != os.getpid():
            self._own = _Contents()
        return self._own
