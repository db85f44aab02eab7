"""The newest steps that servers acknowledged to a sink, kept until they cannot be forgotten any more. No I/O.

A step is let go when the server that acknowledged it has answered anything that it was asked ``settle_s``
later: while the server is away nothing gets older, nor while a reply waits to be read. The server is watched
for longer: it may come back with nothing at all.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gym_capture_redis.scripts import CAN_BE_LOST, Call, Reply
from gym_capture_redis.subject import Subject

STEP_BYTES = 1024
"""What a step takes beside its variable arguments."""

WATCHED_S = 86_400.0
"""For how long after its newest step a server is watched: a mark of what it forgot then stays as long."""


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


class NewestStep(NamedTuple):
    """By which rollout to ask for the server that acknowledged a step, and when it did."""

    key: bytes
    subject: Subject
    at_s: float


class _Server:
    """What one server process acknowledged, oldest first, and when it was asked what it answered last."""

    def __init__(self) -> None:
        self.steps: deque[RecentStep] = deque()
        self.newest: NewestStep | None = None
        """Of those that can be lost, or were verified; kept or not."""
        self.alive_at_s = 0.0

    @property
    def may_forget(self) -> bool:
        return bool(self.steps) or self.newest is not None


class _Contents:
    """What one process keeps."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.servers: dict[str, _Server] = {}
        self.nbytes = 0

    def server(self, run_id: str) -> _Server:
        return self.servers.setdefault(run_id, _Server())

    def keep(self, server: _Server, step: RecentStep, max_bytes: int) -> None:
        """Keep a step; the oldest of all servers make room for it."""
        server.steps.append(step)
        server.newest = _newest(step)
        self.nbytes += step.nbytes
        while self.nbytes > max_bytes:
            kept = [other.steps for other in self.servers.values() if other.steps]
            oldest = kept[0] if len(kept) == 1 else min(kept, key=lambda steps: steps[0].at_s)
            self.nbytes -= oldest.popleft().nbytes


class RecentSteps:
    """Steps by the run id of the server that acknowledged them. Threads may share it; empty after a fork."""

    def __init__(self, *, max_bytes: int, settle_s: float) -> None:
        self._max_bytes = max_bytes
        self._settle_s = settle_s
        self._own = _Contents()

    @property
    def nbytes(self) -> int:
        """About how much memory the steps take."""
        return self._contents().nbytes

    def note(self, call: Call, subject: Subject, reply: Reply, *, asked_at_s: float) -> bool:
        """A server has answered a step: let go what is old enough, and keep this one if it can be lost.

        It was alive when it was asked (``time.monotonic``); its reply may have waited since. Returns whether
        it may still forget anything, kept or not.
        """
        contents = self._contents()
        with contents.lock:
            server = contents.server(reply.run_id)
            server.alive_at_s = max(server.alive_at_s, asked_at_s)
            steps = server.steps
            while steps and steps[0].at_s < asked_at_s - self._settle_s:
                contents.nbytes -= steps.popleft().nbytes
            if server.newest is not None and server.newest.at_s < asked_at_s - WATCHED_S:
                server.newest = None
            # SAME answers a repeat: its first reply was lost, or it is settled by another step.
            # What puts a step back is no step of its own: the healer keeps that one on.
            if reply.code in ("OK", "SAME") and call.step in CAN_BE_LOST and not call.healing:
                seq = reply.seq if reply.code == "OK" else 0
                nbytes = call.nbytes + STEP_BYTES
                step = RecentStep(call, subject, reply.incarnation, seq, time.monotonic(), nbytes)
                contents.keep(server, step, self._max_bytes)
            return server.may_forget

    def keep(self, step: RecentStep, run_id: str) -> None:
        """Keep a step that was put back: this server has acknowledged it now."""
        self.give_back(run_id, [step._replace(at_s=time.monotonic())])

    def watch(self, key: bytes, subject: Subject, run_id: str) -> None:
        """This server, too, may forget the rollout from now on, of which nothing may be kept."""
        contents = self._contents()
        with contents.lock:
            contents.server(run_id).newest = NewestStep(key, subject, time.monotonic())

    def others(self, run_id: str) -> list[str]:
        """Run ids of other servers than this one that may have forgotten something."""
        contents = self._contents()
        with contents.lock:
            return [
                other for other, server in contents.servers.items() if other != run_id and server.may_forget
            ]

    def settle(self, run_id: str, owns: Callable[[bytes], bool], *, until_s: float) -> None:
        """What this server acknowledged until then was dealt with, for the keys that ``owns`` names."""
        contents = self._contents()
        with contents.lock:
            server = contents.server(run_id)
            newest = server.newest
            if newest is not None and newest.at_s <= until_s and owns(newest.key):
                server.newest = None

    def newest(self) -> list[tuple[str, NewestStep]]:
        """The newest step of each server that may forget something, with its run id."""
        contents = self._contents()
        with contents.lock:
            return [
                (run_id, server.newest or _newest(server.steps[-1]))
                for run_id, server in contents.servers.items()
                if server.may_forget
            ]

    def count(self, run_id: str) -> int:
        """How many steps of this server are kept."""
        contents = self._contents()
        with contents.lock:
            server = contents.servers.get(run_id)
            return len(server.steps) if server is not None else 0

    def take(self, run_id: str, *, max_steps: int, max_bytes: int) -> list[RecentStep]:
        """Take the oldest steps of a server out, within these bounds but at least one if there is any."""
        taken: list[RecentStep] = []
        nbytes = 0
        contents = self._contents()
        with contents.lock:
            server = contents.servers.get(run_id)
            while server is not None and server.steps and len(taken) < max_steps and nbytes < max_bytes:
                step = server.steps.popleft()
                taken.append(step)
                nbytes += step.nbytes
                contents.nbytes -= step.nbytes
        return taken

    def give_back(self, run_id: str, steps: Iterable[RecentStep]) -> None:
        """Keep steps that were taken and could not be put back, behind the others."""
        contents = self._contents()
        with contents.lock:
            for step in steps:
                contents.keep(contents.server(run_id), step, self._max_bytes)

    def alive_at_s(self, run_id: str) -> float | None:
        """When this server was last asked what it has answered. None if that is not known any more."""
        contents = self._contents()
        with contents.lock:
            server = contents.servers.get(run_id)
            return server.alive_at_s if server is not None else None

    def _contents(self) -> _Contents:
        # After a fork the lock may be held by a thread of the parent; its steps are its own to put back.
        if self._own.pid != os.getpid():
            self._own = _Contents()
        return self._own


def _newest(step: RecentStep) -> NewestStep:
    return NewestStep(step.call.key, step.subject, step.at_s)
