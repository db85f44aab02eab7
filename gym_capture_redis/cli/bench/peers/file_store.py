"""Gym's own ``TokenCaptureStore``, in a temporary directory: what this package is to be faster than."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gym_capture_redis import gym_compat
from gym_capture_redis.cli.bench.workload import Rollout

NAME = "Gym file store"
HOW_TO_GET = "pip install --no-deps --ignore-requires-python nemo-gym==0.7.0, and orjson"


def missing() -> str | None:
    """Say what it lacks here, or None."""
    return None if gym_compat.gym_attribute("store", "TokenCaptureStore") else HOW_TO_GET


class FileStore:
    """A directory of its own for each round, below ``directory``."""

    name = NAME
    durability = "fsync of the record before every acknowledgement"
    several_machines = False
    gives_back = "entries, in a snapshot"

    def __init__(self, directory: Path) -> None:
        self._parent = directory
        self._store_class: Any = gym_compat.gym_attribute("store", "TokenCaptureStore")

    async def open(self) -> None:
        """Nothing: a directory is made for each round."""

    async def prepare(self, rollouts: Sequence[Rollout]) -> None:
        """Make the directory; its intents are not compared here."""
        del rollouts
        self._directory = Path(tempfile.mkdtemp(prefix="file-store-", dir=self._parent))
        self._store = self._store_class(self._directory)

    async def put(self, entry: Any) -> None:
        """Store one call."""
        await self._store.put(entry)

    async def read(self, rollout: Rollout) -> int:
        """Freeze, as its reader does."""
        snapshot = await self._store.freeze(rollout[0].rollout_id)
        return 0 if snapshot.incomplete else len(snapshot.entries)

    def lineage_store(self) -> Any:
        """One that reads what is put in this round."""
        store_class: Any = gym_compat.required_attribute("lineage", "FileLineageStore")
        return store_class(self._directory)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored lines."""
        return sum(path.stat().st_size for path in self._directory.glob("*.tokens.jsonl"))

    async def clear(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self._directory, ignore_errors=True)

    async def close(self) -> None:
        """Nothing is open."""
