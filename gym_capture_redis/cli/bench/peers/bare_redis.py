"""Plain redis-py: ``HSET`` and ``HMGET`` of as many bytes as this package stores, and no promises.

Which bytes does not matter to a server, so only their number is taken from what this package stored.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from gym_capture_redis.cli.bench.drive import put_all, read_all
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.servers import Server
from gym_capture_redis.cli.bench.workload import Rollout, new_information

NAME = "bare redis-py"

StoredSizes = Mapping[tuple[str, str], int]
"""Bytes that this package stores for a call, by rollout and call: its record and the blocks it brings."""


class BareRedis:
    """One hash for each rollout, one field for each call, one connection for each put in flight."""

    name = NAME
    several_machines = True
    gives_back = "bytes, not decoded"

    def __init__(self, server: Server, mark: str, sizes: StoredSizes) -> None:
        self.durability = server.durability
        self._server = server
        self._mark = mark
        self._sizes = sizes
        self._payload = memoryview(os.urandom(max(sizes.values())))
        self._keys: dict[str, str] = {}

    async def open(self) -> None:
        """Nothing: connections are opened at the first call."""

    async def prepare(self, rollouts: Sequence[Rollout]) -> None:
        """Choose keys."""
        prefix = f"{self._mark}-{secrets.token_hex(4)}"
        self._client = self._server.new_client()
        self._keys = {rollout[0].rollout_id: f"{prefix}:{rollout[0].rollout_id}" for rollout in rollouts}

    async def put(self, entry: Any) -> None:
        """``HSET``."""
        size = self._sizes[entry.rollout_id, entry.model_call_id]
        await self._client.hset(self._keys[entry.rollout_id], entry.model_call_id, self._payload[:size])

    async def read(self, rollout: Rollout) -> int:
        """``HMGET``; nothing is decoded."""
        names = [entry.model_call_id for entry in rollout]
        values = await self._client.hmget(self._keys[rollout[0].rollout_id], names)
        return sum(value is not None for value in values)

    async def clear(self) -> None:
        """Unlink the keys."""
        try:
            if self._keys:
                await self._client.unlink(*self._keys.values())
        finally:
            self._keys = {}
            await self._client.aclose()

    async def close(self) -> None:
        """Nothing: a round closes what it opened."""


async def measure_stored_sizes(ours: OurTransport, rollouts: Sequence[Rollout]) -> StoredSizes:
    """Put and freeze all calls through this package once, to see how many bytes it holds for them.

    A snapshot tells that of a whole rollout; its calls share it as they share the new information.
    """
    try:
        await ours.prepare(rollouts)
        await put_all(ours, rollouts)
        await read_all(ours, rollouts)
        stored = ours.stored_bytes
    finally:
        await ours.clear()
    sizes: dict[tuple[str, str], int] = {}
    for rollout in rollouts:
        information = new_information(rollout)
        factor = stored[rollout[0].rollout_id] / sum(information)
        for entry, new in zip(rollout, information, strict=True):
            sizes[entry.rollout_id, entry.model_call_id] = max(1, round(factor * new))
    return sizes
