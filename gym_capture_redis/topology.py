"""Which server holds a rollout: the only one, the primary that sentinels know, or a node of a Cluster."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gym_capture_redis.cluster import Cluster
from gym_capture_redis.connection import EmbeddedLease, Link, follow
from gym_capture_redis.node import Node
from gym_capture_redis.sentinels import Sentinels
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ConnectionSettings


class Topology(Protocol):
    """Belongs to one event loop; opens nothing until used."""

    def node_of(self, key: bytes) -> Node | None:
        """The node to send steps on this key to. None: ``refresh`` must find out first."""

    async def refresh(self) -> None:
        """Find out where keys are.

        Raises:
            redis.exceptions.RedisError, OSError: nobody could tell.

        """

    def learn(self, error: BaseException, node: Node) -> Node | None:
        """Learn from what a step on ``node`` met. Returns the node that it must ask instead, this once."""

    async def close(self) -> None:
        """End all connections."""


class OneServer:
    """All rollouts are on one server; behind sentinels it is whichever is the primary now."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._embedded = EmbeddedLease(settings)
        self._sentinels = Sentinels(settings)
        self._node = Node(settings, self._open_link)

    def node_of(self, _: bytes) -> Node:
        """The only one."""
        return self._node

    async def refresh(self) -> None:
        """Nothing: each new connection finds the server anew."""

    def learn(self, _: BaseException, __: Node) -> None:
        """Nothing: a lane whose connection failed opens a new one."""

    async def close(self) -> None:
        """End all connections, and let the embedded server go."""
        await self._node.close()
        await asyncio.to_thread(self._embedded.stop)

    async def _open_link(self) -> Link:
        link = Link(self._settings, await self._place())
        await link.connect()
        return link

    async def _place(self) -> Address | str:
        url = self._settings.url
        if url.topology == "sentinel":
            return await follow(self._sentinels.primary(), self._settings)
        if url.scheme == "embedded":
            return await asyncio.to_thread(self._embedded.start)
        return url.path if url.scheme == "unix" else url.addresses[0]


def new_topology(settings: ConnectionSettings) -> Topology:
    """The topology that the URL names."""
    return Cluster(settings) if settings.url.topology == "cluster" else OneServer(settings)
