"""A Cluster: which node holds which slots, as far as is known, and the lanes to each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from redis import exceptions as redis_errors
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from gym_capture_redis.connection import Connected, Link, ask, prepare, user_of
from gym_capture_redis.faults import is_transient
from gym_capture_redis.node import Node
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ConnectionSettings

_ASK_TIMEOUT_S = 1.0
"""One that is away must leave time to ask the others."""


class Cluster:
    """Sends the steps of a rollout to the primary of its slot (``topology.Topology``).

    The map of slots is asked for when it is first needed, and again when a node is away or the Cluster is
    down; a slot that has moved is learned from the node that had it.
    """

    def __init__(self, settings: ConnectionSettings, connected: Connected) -> None:
        self._settings = settings
        self._connected = connected
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._stale = True
        self._loading: asyncio.Task[None] | None = None

    def node_of(self, key: bytes) -> Node | None:
        """The primary of the key's slot. None where the map must be asked for first."""
        address = self._slots[key_slot(key)]
        return None if self._stale or address is None else self._node(address)

    async def refresh(self) -> None:
        """Ask a node for the map of slots, once for all who wait for it.

        Raises:
            redis.exceptions.RedisError, OSError: no node could tell.

        """
        await asyncio.shield(self._load_soon())

    def learn(self, error: BaseException, node: Node) -> Node | None:
        """Learn where a slot is, from what a step met. A node to ask this once, while a slot is moving."""
        if isinstance(error, redis_errors.AskError):
            address = self._named_by(error, node)
            if not isinstance(error, redis_errors.MovedError):
                return self._node(address)
            self._slots[error.slot_id] = address
            self._load_soon()  # one slot has moved, or the node is a replica now
        elif is_transient(error) and not isinstance(error, redis_errors.TryAgainError):
            self._stale = True
        return None

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
        return await prepare(
            link, partial(self._connected, link, lambda key: self._slots[key_slot(key)] == address)
        )

    def _named_by(self, error: redis_errors.AskError, node: Node) -> Address:
        """The address in a redirection; a node that does not know its own host leaves it out."""
        return Address(error.host or self._address_of(node).host, error.port)

    def _address_of(self, node: Node) -> Address:
        return next(address for address, known in self._nodes.items() if known is node)

    def _load_soon(self) -> asyncio.Task[None]:
        if self._loading is None or self._loading.done():
            self._loading = asyncio.get_running_loop().create_task(self._load())
            self._loading.add_done_callback(_take_note)  # nobody may wait for it
        return self._loading

    async def _load(self) -> None:
        last: BaseException = redis_errors.ClusterDownError("no node knows all slots")
        for address in self._to_ask():
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    answer = await ask(self._settings, address, "CLUSTER", "SLOTS", **user_of(self._settings))
            except TimeoutError:
                last = redis_errors.TimeoutError(f"{address} gave no answer")
                continue
            except (redis_errors.RedisError, OSError) as error:
                if not is_transient(error):
                    raise
                last = error
                continue
            slots = _read_slots(answer, address)
            if any(slots):
                self._slots, self._stale = slots, False
                await self._forget_nodes()
                return
        raise last

    def _to_ask(self) -> list[Address]:
        """All nodes in random order, so that one with an old view is not asked again and again."""
        addresses = list({*self._nodes, *self._settings.url.addresses})
        random.shuffle(addresses)
        return addresses

    async def _forget_nodes(self) -> None:
        """Leave the connections to nodes without slots: until they have some again, much may have changed."""
        for address in self._nodes.keys() - set(self._slots):
            if self._nodes[address].is_idle:
                await self._nodes.pop(address).close()
            else:
                self._nodes[address].renew()


def _take_note(loading: asyncio.Task[None]) -> None:
    if not loading.cancelled():
        loading.exception()


def _read_slots(answer: Any, asked: Address) -> list[Address | None]:
    """The primary of each slot, from the reply of ``CLUSTER SLOTS``."""
    slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, address in _ranges(answer, asked):
        slots[first : last + 1] = [address] * (last + 1 - first)
    return slots


def _ranges(answer: Any, asked: Address) -> Iterator[tuple[int, int, Address]]:
    try:
        for first, last, (host, port, *_), *_ in answer:
            # No host: the same as that of the node that was asked.
            yield int(first), int(last), Address(host.decode() if host else asked.host, int(port))
    except (TypeError, ValueError, AttributeError):
        raise redis_errors.InvalidResponse("not a map of slots") from None
