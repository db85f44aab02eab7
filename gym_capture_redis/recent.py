"""The newest steps that servers acknowledged to a sink, kept until they cannot be forgotten any more. No I/O.

A step is let go when the server that acknowledged it has answered anything ``settle_s`` later: while the
server is away nothing gets older.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from gym_capture_redis.scripts import CAN_BE_LOST, Call, Reply
from gym_capture_redis.subject import Subject

STEP_BYTES = 1024
"""What a step takes beside its variable arguments."""


class RecentStep(NamedTuple):
    """A step as it was sent, and what it was answered; ``seq`` is its own number, 0 if it is not known."""

    call: Call
    subject: Subject
    incarnation: str
    seq: int
    at_s: float
    nbytes: int
    """About how much memory it takes."""
    missing_since_s: float = 0.0
    """Since when it waits for what other workers have to put back before it; 0 if it does not."""


class _Server:
    """What one server process acknowledged, oldest first, and when it last answered."""

    def __init__(self) -> None:
        self.steps: deque[RecentStep] = deque()
        self.alive_at_s = 0.0


class RecentSteps:
    """Steps by the run id of the server that acknowledged them. Threads may share it."""

    def __init__(self, *, max_bytes: int, settle_s: float) -> None:
        self._max_bytes = max_bytes
        self._settle_s = settle_s
        self._servers: dict[str, _Server] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """About how much memory the steps take."""
        return self._nbytes

    def note(self, call: Call, subject: Subject, reply: Reply) -> bool:
        """A server has answered a step: let go what is old enough, and keep this one if it can be lost.

        Returns whether anything is kept.
        """
        now_s = time.monotonic()
        with self._lock:
            server = self._alive(reply.run_id, now_s)
            steps = server.steps
            while steps and steps[0].at_s < now_s - self._settle_s:
                self._nbytes -= steps.popleft().nbytes
            # SAME answers a repeat: its first reply was lost, or it is settled by another step.
            # What puts a step back is no step of its own: the healer keeps that one on.
            if reply.code in ("OK", "SAME") and call.step in CAN_BE_LOST and not call.healing:
                seq = reply.seq if reply.code == "OK" else 0
                nbytes = call.nbytes + STEP_BYTES
                self._keep(server, RecentStep(call, subject, reply.incarnation, seq, now_s, nbytes))
            return bool(steps)

    def keep(self, step: RecentStep, run_id: str) -> None:
        """Keep a step that was put back: this server has acknowledged it now."""
        now_s = time.monotonic()
        with self._lock:
            self._keep(self._alive(run_id, now_s), step._replace(at_s=now_s))

    def others(self, run_id: str) -> list[str]:
        """Run ids of other servers than this one whose steps are kept."""
        with self._lock:
            return [other for other, server in self._servers.items() if other != run_id and server.steps]

    def newest(self) -> list[tuple[str, RecentStep]]:
        """The newest step of each server, with its run id."""
        with self._lock:
            return [(run_id, server.steps[-1]) for run_id, server in self._servers.items() if server.steps]

    def count(self, run_id: str) -> int:
        """How many steps of this server are kept."""
        with self._lock:
            server = self._servers.get(run_id)
            return len(server.steps) if server is not None else 0

    def take(self, run_id: str, *, max_steps: int, max_bytes: int) -> list[RecentStep]:
        """Take the oldest steps of a server out, within these bounds but at least one if there is any."""
        taken: list[RecentStep] = []
        nbytes = 0
        with self._lock:
            server = self._servers.get(run_id)
            while server is not None and server.steps and len(taken) < max_steps and nbytes < max_bytes:
                step = server.steps.popleft()
                taken.append(step)
                nbytes += step.nbytes
                self._nbytes -= step.nbytes
        return taken

    def give_back(self, run_id: str, steps: Iterable[RecentStep]) -> None:
        """Keep steps that were taken and could not be put back, behind the others."""
        with self._lock:
            for step in steps:
                self._keep(self._servers.setdefault(run_id, _Server()), step)

    def alive_at_s(self, run_id: str) -> float | None:
        """When this server last answered. None if that is not known any more."""
        with self._lock:
            server = self._servers.get(run_id)
            return server.alive_at_s if server is not None else None

    def _alive(self, run_id: str, now_s: float) -> _Server:
        server = self._servers.get(run_id)
        if server is None:
            server = self._servers[run_id] = _Server()
        server.alive_at_s = now_s
        return server

    def _keep(self, server: _Server, step: RecentStep) -> None:
        server.steps.append(step)
        self._nbytes += step.nbytes
        while self._nbytes > self._max_bytes:
            kept = [other.steps for other in self._servers.values() if other.steps]
            oldest = kept[0] if len(kept) == 1 else min(kept, key=lambda steps: steps[0].at_s)
            self._nbytes -= oldest.popleft().nbytes
