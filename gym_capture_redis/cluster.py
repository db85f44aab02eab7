"""A Cluster: the lanes to each of its nodes."""

from __future__ import annotations

import asyncio
from functools import partial

from redis.exceptions import MovedError

from gym_capture_redis.connection import Connected, Link, follow, prepare
from gym_capture_redis.lanes import closed_error
from gym_capture_redis.node import Node
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ConnectionSettings
from gym_capture_redis.slots import SlotMap


class Cluster:
    """Sends the steps of a rollout to the primary of its slot (``topology.Topology``)."""

    def __init__(self, settings: ConnectionSettings, connected: Connected) -> None:
        self._settings = settings
        self._connected = connected
        self._nodes: dict[Address, Node] = {}
        self._slots = SlotMap(settings)
        self._loading: asyncio.Task[None] | None = None

    def node_of(self, key: bytes) -> Node | None:
        """The primary of the key's slot. None where the map must be asked for first."""
        address = self._slots.address_of(key)
        return None if address is None else self._node(address)

    async def refresh(self) -> None:
        """Ask a node for the map of slots, once for all who wait for it.

        Raises:
            redis.exceptions.RedisError, OSError: no node could tell.
            BackendUnavailableError: the client was closed.

        """
        loading = self._load_soon()
        await asyncio.wait({loading})  # a caller that leaves does not end it
        if loading.cancelled():  # which is no cancellation of who waits
            raise closed_error()
        loading.result()

    def learn(self, error: BaseException, node: Node) -> Node | None:
        """Learn where a slot is, from what a step met. A node to ask this once, while a slot is moving."""
        asked = self._address_of(node)
        if asked is None:  # forgotten meanwhile, for a newer map
            return None
        address = self._slots.learn(error, asked)
        if isinstance(error, MovedError):
            self._load_soon()  # one slot has moved, or the node is a replica now
        return None if address is None else self._node(address)

    async def close(self) -> None:
        """End all connections."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node(self._settings, partial(self._open_link, address))
        return node

    async def _open_link(self, address: Address) -> Link:
        link = Link(self._settings, address)
        return await prepare(link, partial(self._connected, link, partial(self._slots.holds, address)))

    def _address_of(self, node: Node) -> Address | None:
        return next((address for address, known in self._nodes.items() if known is node), None)

    def _load_soon(self) -> asyncio.Task[None]:
        if self._loading is None or self._loading.done():
            self._loading = asyncio.get_running_loop().create_task(self._load())
            self._loading.add_done_callback(_take_note)  # nobody may wait for it
        return self._loading

    async def _load(self) -> None:
        await follow(self._slots.load(self._nodes), self._settings)
        await self._forget_nodes()

    async def _forget_nodes(self) -> None:
        """Leave the connections to nodes without slots: until they have some again, much may have changed."""
        for address in self._nodes.keys() - self._slots.addresses():
            if self._nodes[address].is_idle:
                await self._nodes.pop(address).close()
            else:
                self._nodes[address].renew()


def _take_note(loading: asyncio.Task[None]) -> None:
    if not loading.cancelled():
        loading.exception()
