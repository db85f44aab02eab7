"""``ray.util.queue.Queue``: one actor that keeps pickled entries in memory, first in, first out."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from gym_capture_redis.cli.bench.peers.ray_runtime import is_installed, start_ray, stop_ray
from gym_capture_redis.cli.bench.workload import Rollout

NAME = "Ray Queue"
HOW_TO_GET = "pip install ray"


def missing() -> str | None:
    """Say what it lacks here, or None."""
    return None if is_installed("ray") else HOW_TO_GET


class RayQueue:
    """A queue for each round. It knows no rollouts: a reader gets as many calls as it asks for."""

    name = NAME
    durability = "nothing but the memory of one Ray actor"
    several_machines = True
    gives_back = "entries, as they come"

    async def open(self) -> None:
        """Start Ray."""
        start_ray()

    async def prepare(self, rollouts: Sequence[Rollout]) -> None:
        """Start the actor."""
        del rollouts
        self._queue: Any = importlib.import_module("ray.util.queue").Queue()
        await self._queue.put_async(None)
        await self._queue.get_async()

    async def put(self, entry: Any) -> None:
        """Send the entry as it is."""
        await self._queue.put_async(entry)

    async def read(self, rollout: Rollout) -> int:
        """Take the next so many entries, one call of the actor for all."""
        taken = await self._queue.actor.get_nowait_batch.remote(len(rollout))
        return len(taken)

    async def clear(self) -> None:
        """End the actor."""
        self._queue.shutdown(force=True)

    async def close(self) -> None:
        """End Ray."""
        stop_ray()
