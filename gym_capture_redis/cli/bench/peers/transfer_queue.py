"""TransferQueue: tensors in storage units in memory, under keys, with Ray and torch beneath."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Sequence
from typing import Any

from gym_capture_redis.cli.bench.peers.ray_runtime import is_installed, start_ray, stop_ray
from gym_capture_redis.cli.bench.workload import Rollout

NAME = "TransferQueue"
HOW_TO_GET = "pip install ray torch TransferQueue"

_ARRAYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def missing() -> str | None:
    """Say what it lacks here, or None."""
    return None if all(map(is_installed, ("ray", "torch", "transfer_queue"))) else HOW_TO_GET


class TransferQueue:
    """A partition for each round, a key for each call: its arrays as tensors, the other fields as JSON."""

    name = NAME
    durability = "nothing but the memory of its storage units (Ray actors)"
    several_machines = True
    gives_back = "tensors"

    async def open(self) -> None:
        """Start Ray, its controller and its storage units."""
        os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")  # it warns of few cores at every put
        start_ray()
        self._torch: Any = importlib.import_module("torch")
        self._queue: Any = importlib.import_module("transfer_queue")
        self._queue.init()

    async def prepare(self, rollouts: Sequence[Rollout]) -> None:
        """Choose a partition."""
        self._partition = f"bench-{secrets.token_hex(4)}"
        self._keys = {
            rollout[0].rollout_id: [f"{entry.rollout_id}/{entry.model_call_id}" for entry in rollout]
            for rollout in rollouts
        }

    async def put(self, entry: Any) -> None:
        """Make tensors of the arrays and send them."""
        torch = self._torch
        fields: dict[str, Any] = {
            "prompt_token_ids": torch.tensor(entry.prompt_token_ids),
            "generation_token_ids": torch.tensor(entry.generation_token_ids),
            "generation_log_probs": torch.tensor(entry.generation_log_probs, dtype=torch.float64),
            "fields": entry.model_dump_json(exclude=set(_ARRAYS)),
        }
        key = f"{entry.rollout_id}/{entry.model_call_id}"
        await self._queue.async_kv_put(key=key, partition_id=self._partition, fields=fields)

    async def read(self, rollout: Rollout) -> int:
        """Fetch all calls of a rollout in one batch."""
        keys = self._keys[rollout[0].rollout_id]
        return len(await self._queue.async_kv_batch_get(keys=keys, partition_id=self._partition))

    async def clear(self) -> None:
        """Remove the keys."""
        keys = [key for keys in self._keys.values() for key in keys]
        await self._queue.async_kv_clear(keys=keys, partition_id=self._partition)

    async def close(self) -> None:
        """End TransferQueue, and Ray with it."""
        self._queue.close()
        stop_ray()
