"""Which servers a client has met, and how long each may still be getting back what it forgot. No I/O.

A server that was started or promoted a moment ago may lack its newest steps, and the workers that know of
them need a moment to put them back.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass

from gym_capture_redis.scripts import ServerWords
from gym_capture_redis.server_check import ServerFacts

_NAME_LENGTH = 8


@dataclass(frozen=True)
class Standing:
    """One server process. ``replaced``: it took the place of another one that this client had met."""

    run_id: str = ""
    settled_at_s: float = 0.0
    replaced: bool = False

    @property
    def unsettled_s(self) -> float:
        """How long it may still be getting back what it forgot, from now."""
        return max(0.0, self.settled_at_s - time.monotonic())

    @property
    def words(self) -> ServerWords:
        """What the scripts are told of it."""
        name = self.run_id[:_NAME_LENGTH] or "-"
        if not self.unsettled_s:
            return ServerWords(name)
        # A rollout that it does not know may have been there before.
        return ServerWords("-", "any") if self.replaced else ServerWords(name, "other")


class ServersSeen:
    """The servers of one client, by where they are."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._newest: dict[Hashable, str] = {}
        self._standings: dict[str, Standing] = {}

    def meet(self, place: Hashable, facts: ServerFacts) -> Standing:
        """Take note of a server that a connection was opened to."""
        before = self._newest.get(place)
        self._newest[place] = facts.run_id
        standing = self._standings.get(facts.run_id)
        if standing is None:
            replaced = before is not None or (facts.was_promoted and bool(self._standings))
            # Its own clock does not count while it loaded its data, or was a replica.
            age_s = 0.0 if replaced or facts.was_promoted else facts.uptime_s
            settled_at_s = time.monotonic() + self._settle_s - age_s
            standing = self._standings[facts.run_id] = Standing(facts.run_id, settled_at_s, replaced)
        return standing

    def unsettled_s(self, run_id: str) -> float:
        """How long the server with this run id may still be getting back what it forgot."""
        standing = self._standings.get(run_id)
        return standing.unsettled_s if standing is not None else 0.0
