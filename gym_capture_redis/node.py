"""A server that holds rollouts, and the lanes that lead to it."""

from __future__ import annotations

import asyncio

from gym_capture_redis.lanes import Job, Lanes, OpenLink
from gym_capture_redis.scripts import MAX_JOINED_BYTES, Call
from gym_capture_redis.settings import ConnectionSettings

_LARGE_LANES = 2
"""One sends while the server works on what the other has sent."""


class Node:
    """The lanes to one server. Belongs to one event loop; opens nothing until used.

    Urgent steps (marks and refusals) have a connection of their own, so that they wait for no put. Large ones
    have their own too, so that no small step waits for them.
    """

    def __init__(self, settings: ConnectionSettings, open_link: OpenLink) -> None:
        self._common = Lanes(settings, open_link, count=settings.connections, name="lane")
        self._large = Lanes(settings, open_link, count=_LARGE_LANES, name="large lane")
        self._urgent = Lanes(settings, open_link, count=1, name="urgent lane")
        self.is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for a reply."""
        return self._common.is_idle and self._large.is_idle and self._urgent.is_idle

    def submit(self, call: Call, *, urgent: bool, by_source: bool, asking: bool, deadline: float) -> Job:
        """Queue a step.

        Raises:
            BackendUnavailableError: the lanes were closed.

        """
        lanes = self._common
        if urgent:
            lanes = self._urgent
        elif call.nbytes > MAX_JOINED_BYTES:
            lanes = self._large
        return lanes.submit(call, by_source=by_source, asking=asking, deadline=deadline)

    def renew(self) -> None:
        """Use no connection of now for anything more: the server may have changed its role meanwhile."""
        for lanes in (self._common, self._large, self._urgent):
            lanes.renew()

    async def close(self) -> None:
        """End the lanes and their connections. What still waits is answered with an error."""
        self.is_closed = True
        await asyncio.gather(self._common.close(), self._large.close(), self._urgent.close())
