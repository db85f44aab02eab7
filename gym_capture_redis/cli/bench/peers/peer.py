"""What every contender does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gym_capture_redis.cli.bench.workload import Rollout


class Peer(Protocol):
    """Stores the calls of rollouts and gives them back.

    ``open`` and ``close`` frame all rounds; ``prepare`` and ``clear`` frame one, and are never measured.
    """

    name: str
    durability: str
    """What an acknowledged put survives, in words."""
    several_machines: bool
    gives_back: str
    """What reading makes of a call, in words: the less, the faster."""

    async def open(self) -> None:
        """Start what it needs."""

    async def prepare(self, rollouts: Sequence[Rollout]) -> None:
        """Do whatever comes before generation."""

    async def put(self, entry: Any) -> None:
        """Store one call. On return it is as durable as this contender makes it."""

    async def read(self, rollout: Rollout) -> int:
        """Read back what was put of one rollout; how many of its calls came."""

    async def clear(self) -> None:
        """Remove what was stored in this round."""

    async def close(self) -> None:
        """End what was started."""
