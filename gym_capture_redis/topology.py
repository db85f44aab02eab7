"""Which server holds a rollout: the only one, the primary that sentinels know, or a node of a Cluster."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from redis.exceptions import ReadOnlyError

from gym_capture_redis.cluster import Cluster
from gym_capture_redis.connection import Connected, EmbeddedLease, Link, follow, prepare
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

    def __init__(self, settings: ConnectionSettings, connected: Connected) -> None:
        self._settings = settings
        self._connected = connected
        self._embedded = EmbeddedLease(settings)
        self._sentinels = Sentinels(settings)
        self._node = Node(settings, self._open_link)

    def node_of(self, _: bytes) -> Node:
        """The only one."""
        return self._node

    async def refresh(self) -> None:
        """Nothing: each new connection finds the server anew."""

    def learn(self, error: BaseException, node: Node) -> None:
        """A server that is no primary any more is left; a connection that failed is opened anew anyway."""
        if isinstance(error, ReadOnlyError):
            node.renew()

    async def close(self) -> None:
        """End all connections, and let the embedded server go."""
        await self._node.close()
        await self._embedded.release()

    async def _open_link(self) -> Link:
        place = await self._place()
        link = Link(self._settings, place, began_empty=self._embedded.began_empty)
        return await prepare(link, partial(self._connected, link, lambda _: True))

    async def _place(self) -> Address | str:
        url = self._settings.url
        if url.topology == "sentinel":
            return await follow(self._sentinels.primary(), self._settings)
        if url.scheme == "embedded":
            return await self._embedded.started()
        return url.path if url.scheme == "unix" else url.addresses[0]


def new_topology(settings: ConnectionSettings, connected: Connected) -> Topology:
    """The topology that the URL names. ``connected`` is awaited before a new connection is used."""
    kind = Cluster if settings.url.topology == "cluster" else OneServer
    return kind(settings, connected)
