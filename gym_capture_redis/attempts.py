"""What a sink remembers of the attempts it works on: to which one a call was announced, and how far it was.

A server that comes back without its newest writes shows it here: it does not know the attempt, or counts
fewer steps than it has acknowledged.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple, TypeVar

from gym_capture_redis.scripts import Reply

MAX_REMEMBERED = 100_000
"""Calls, and rollouts, that are remembered; far above what one process has in flight."""

REMEMBERED_S = 3_600.0
"""After this time another attempt under the same id is no surprise, whatever server it is on."""

K = TypeVar("K")
V = TypeVar("V")


class Position(NamedTuple):
    """How far a rollout was when a server last answered, and which server that was.

    ``own_seq`` and ``own_trace`` tell of the newest step of this sink: where another step has its number, a
    server has lost it.
    """

    incarnation: str
    seq: int
    run_id: str
    at_s: float
    own_seq: int = 0
    own_trace: bytes = b""


class AttemptMemory:
    """Newest announcements and positions. Its steps are atomic, so that threads may share it."""

    def __init__(self) -> None:
        self._announced: OrderedDict[tuple[str, str], Reply] = OrderedDict()
        self._joined: OrderedDict[str, str] = OrderedDict()
        self._positions: OrderedDict[str, Position] = OrderedDict()

    def announce(self, rollout_id: str, model_call_id: str, reply: Reply) -> None:
        """The call was announced, and ``reply`` says to which attempt."""
        _store(self._announced, (rollout_id, model_call_id), reply)
        self.join(rollout_id, reply)

    def announcement(self, rollout_id: str, model_call_id: str) -> Reply | None:
        """What announcing this call was answered, if it was announced here."""
        return self._announced.get((rollout_id, model_call_id))

    def join(self, rollout_id: str, reply: Reply) -> None:
        """By ``reply`` the rollout is there, and will stay."""
        _store(self._joined, rollout_id, reply.incarnation)

    def joined(self, rollout_id: str) -> str:
        """The attempt that was there when a call was last announced or put here; empty if none was."""
        return self._joined.get(rollout_id, "")

    def has_moved_on(self, rollout_id: str, announced: Reply) -> bool:
        """Whether this process has spoken to a later attempt of the rollout than the announced one."""
        now = self._positions.get(rollout_id)
        return now is not None and now.incarnation != announced.incarnation

    def has_lost(self, rollout_id: str, reply: Reply) -> bool:
        """Whether ``reply`` comes from another server, which lacked acknowledged steps of the rollout.

        Only asks: what was noticed stays so until ``note`` is called, so that a mark that fails is made
        by the next step. ``reply`` is one of a step that counts itself when it is accepted (OK).
        """
        before = self._positions.get(rollout_id)
        if before is None or before.run_id == reply.run_id or time.monotonic() - before.at_s > REMEMBERED_S:
            return False
        seq_before_step = reply.seq - (reply.code == "OK")
        return reply.incarnation != before.incarnation or seq_before_step < before.seq

    def position(self, rollout_id: str) -> Position | None:
        """How far the rollout was when this process last heard of it."""
        return self._positions.get(rollout_id)

    def forget(self, rollout_id: str) -> None:
        """This process ended the attempt itself: that it is gone is no loss."""
        self._positions.pop(rollout_id, None)

    def on_others(self, run_id: str) -> list[tuple[str, Position]]:
        """The rollouts of which another server than this one was the last to answer."""
        return [item for item in list(self._positions.items()) if item[1].run_id != run_id]

    def note(self, rollout_id: str, reply: Reply, trace: bytes = b"") -> None:
        """Remember how far the rollout was by ``reply``, and which trace the step left if it was accepted."""
        own = (reply.seq, trace) if trace and reply.code == "OK" else (0, b"")
        seq = reply.seq
        before = self._positions.get(rollout_id)
        # Replies to concurrent calls come in any order: an older one must not lower what was acknowledged.
        if before and before.incarnation == reply.incarnation:
            own = max(own, (before.own_seq, before.own_trace))
            if before.run_id == reply.run_id:
                seq = max(seq, before.seq)
        _store(
            self._positions,
            rollout_id,
            Position(reply.incarnation, seq, reply.run_id, time.monotonic(), *own),
        )


def _store(kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > MAX_REMEMBERED:
        kept.popitem(last=False)
