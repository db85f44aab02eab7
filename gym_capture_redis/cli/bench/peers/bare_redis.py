"""Plain redis-py: ``HSET`` and ``HMGET`` of as many bytes as this package stores, and no promises.

Which bytes does not matter to a server, so only their number is taken from what this package stored.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from gym_capture_redis.cli.bench.drive import timed
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.servers import Server
from gym_capture_redis.cli.bench.workload import Rollout

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


async def measure_stored_sizes(
    ours: OurTransport, server: Server, rollouts: Sequence[Rollout]
) -> StoredSizes:
    """Put all calls through this package once, and ask after each how many bytes its rollout has."""
    sizes: dict[tuple[str, str], int] = {}

    async def one(rollout: Rollout) -> None:
        before = 0
        for entry in rollout:
            await ours.put(entry)
            stored = int(await client.hget(ours.key(rollout), "s:bytes") or 0)
            sizes[entry.rollout_id, entry.model_call_id] = stored - before
            before = stored

    client = server.new_client()
    try:
        await ours.prepare(rollouts)
        await timed(one, rollouts)
    finally:
        await asyncio.gather(ours.clear(), client.aclose())
    return sizes
