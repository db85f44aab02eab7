"""This package: ``RedisTokenSink`` and ``RedisTokenSource``, every call announced before it is put."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from gym_capture_redis.cli.bench.servers import Server
from gym_capture_redis.cli.bench.workload import Rollout
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import TokenCaptureSnapshot
from gym_capture_redis.settings import Durability, SinkSettings
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

NAME = "gym-capture-redis"
DELETE_BATCH = 256


class IncompleteError(Exception):
    """A rollout of ours came back incomplete, for the reasons named."""


class OurTransport:
    """A sink and a source of their own for each round, in a namespace of its own."""

    several_machines = True
    gives_back = "entries, in a checked snapshot"

    def __init__(self, server: Server, mark: str, *, durability: Durability = "aof", **settings: Any) -> None:
        self.name = NAME if durability == "aof" else f"{NAME}, {durability}"
        self.durability = server.durability
        self._url = server.url
        self._mark = mark
        self._durability = durability
        self._settings = settings
        self._rollout_ids: list[str] = []
        self.stored_bytes: dict[str, int] = {}

    @staticmethod
    def connections() -> int:
        """How many connections a sink has, if nothing else is asked for."""
        count: int = SinkSettings.model_fields["connections"].default
        return count

    async def open(self) -> None:
        """Nothing: connections are opened at the first call."""

    async def prepare(self, rollouts: Sequence[Rollout]) -> None:
        """Announce all calls."""
        self.namespace = f"{self._mark}-{secrets.token_hex(4)}"
        common: dict[str, Any] = {"namespace": self.namespace, "durability": self._durability}
        self.sink = RedisTokenSink(self._url, **common, **self._settings)
        self.source = RedisTokenSource(self._url, **common)
        self._rollout_ids = [rollout[0].rollout_id for rollout in rollouts]
        self.stored_bytes = {}
        await asyncio.gather(
            *(
                self.sink.begin_call(entry.rollout_id, entry.model_call_id)
                for rollout in rollouts
                for entry in rollout
            )
        )

    async def put(self, entry: Any) -> None:
        """Store one call."""
        await self.sink.put(entry)

    async def read(self, rollout: Rollout) -> int:
        """Freeze; raises IncompleteError where anything is missing."""
        return len((await self.freeze(rollout)).entries)

    async def freeze(self, rollout: Rollout) -> TokenCaptureSnapshot:
        """Freeze, and give the snapshot."""
        snapshot = await self.source.freeze(rollout[0].rollout_id)
        self.stored_bytes[snapshot.rollout_id] = snapshot.stored_bytes
        return _complete(snapshot)

    async def read_arrays(self, rollout: Rollout) -> int:
        """Freeze into numpy arrays."""
        return len(_complete(await self.source.freeze_arrays(rollout[0].rollout_id)).entries)

    def lineage_store(self) -> Any:
        """One that reads what is put in this round; needs Gym."""
        from gym_capture_redis import RedisLineageStore

        return RedisLineageStore(self._url, namespace=self.namespace, durability=self._durability)

    def key(self, rollout: Rollout) -> bytes:
        """The rollout's key in Redis."""
        return rollout_key(self.namespace, rollout[0].rollout_id)

    async def clear(self) -> None:
        """Delete all rollouts, fences included, and close the connections."""
        try:
            for start in range(0, len(self._rollout_ids), DELETE_BATCH):
                await self.source.delete(self._rollout_ids[start : start + DELETE_BATCH])
        finally:
            self._rollout_ids = []
            await self.sink.close()
            await self.source.close()

    async def close(self) -> None:
        """Nothing: a round closes what it opened."""


def _complete(snapshot: TokenCaptureSnapshot) -> TokenCaptureSnapshot:
    if snapshot.incomplete:
        raise IncompleteError(f"{snapshot.rollout_id} came back incomplete: {snapshot.reasons}")
    return snapshot
