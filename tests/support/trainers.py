"""Trainers that keep a ledger: one that reads everything in the end, and one that may be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.ledger import Ledger, RecordedSource
from support.verdict import violations

from gym_capture_redis.protocols import TokenCaptureSnapshot
from gym_capture_redis.source import RedisTokenSource


async def read_and_judge(
    url: str,
    ledger: Ledger,
    rollouts: Iterable[str],
    *,
    server_kept_all: bool = False,
    settings: dict[str, Any],
) -> dict[str, TokenCaptureSnapshot]:
    """Freeze every rollout twice, once each through a client of its own, and fail if a law is broken."""
    rollouts = list(rollouts)
    for _ in range(2):
        async with RedisTokenSource(url, **settings) as source:
            recorded = RecordedSource(source, ledger)
            snapshots = await asyncio.gather(*(recorded.freeze(rollout) for rollout in rollouts))
    broken = violations(ledger.lines(), server_kept_all=server_kept_all)
    assert not broken, "\n".join(broken)
    return {snapshot.rollout_id: snapshot for snapshot in snapshots if snapshot is not None}


async def consume(url: str, ledger: Ledger, rollouts: Iterable[str], *, settings: dict[str, Any]) -> None:
    """Freeze and drop each of them; fail if one is not dropped, or a law is broken."""
    async with RedisTokenSource(url, **settings) as source:
        recorded = RecordedSource(source, ledger)
        for rollout in rollouts:
            snapshot = await recorded.freeze(rollout)
            assert snapshot is not None
            assert await recorded.drop(snapshot)
    broken = violations(ledger.lines())
    assert not broken, "\n".join(broken)


@dataclass(frozen=True)
class Consumption:
    """For a ``WriterProcess``: freeze a rollout, and drop it, or wait to be killed."""

    url: str
    ledger: Path
    rollout: str
    drops: bool
    settings: dict[str, Any] = field(default_factory=dict)

    async def run(self, _: str) -> None:
        ledger = Ledger(self.ledger)
        async with RedisTokenSource(self.url, **self.settings) as source:
            recorded = RecordedSource(source, ledger)
            snapshot = await recorded.freeze(self.rollout)
            assert snapshot is not None
            if not self.drops:
                await asyncio.Event().wait()
            await recorded.drop(snapshot)
        ledger.close()
