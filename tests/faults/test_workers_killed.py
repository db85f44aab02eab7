"""``kill -9`` of a worker between its intent and its put, inside the put, and before it hears the answer.

Another worker goes on in the same rollout, so that only the call of the dead one is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.ledger import Kind, Ledger, RecordedSink
from support.proxies import FaultyProxy
from support.servers import RealServer
from support.trainers import read_and_judge
from support.writers import WriterProcess, capture, entry_of

from gym_capture_redis.protocols import IncompleteCode, TokenCaptureSnapshot
from gym_capture_redis.sink import RedisTokenSink

SETTINGS: dict[str, Any] = {"namespace": "run", "timeout_s": 30.0}
PATIENCE_S = 60.0
BALLAST_BYTES = 2**20
BALLAST = b"x" * 1_000
"""Found in the put, and in nothing that comes before it."""


@dataclass(frozen=True)
class OneCall:
    """Announce a call, and put it, or wait to be killed."""

    url: str
    ledger: Path
    puts: bool
    settings: dict[str, Any] = field(default_factory=dict)

    async def run(self, name: str) -> None:
        async with RedisTokenSink(self.url, **self.settings) as sink:
            recorded = RecordedSink(sink, Ledger(self.ledger))
            entry = entry_of("r", name, ballast_bytes=BALLAST_BYTES)
            assert await recorded.announce(entry)
            if not self.puts:
                await asyncio.Event().wait()
            await recorded.put(entry)


@pytest.fixture
async def proxy(server: RealServer) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(server.socket_path) as running:
        yield running


async def read_what_is_left(server: RealServer, ledger: Ledger) -> TokenCaptureSnapshot:
    """Let a worker that lives go on in the rollout, and read it."""
    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        for number in range(3):
            await capture(RecordedSink(sink, ledger), entry_of("r", f"alive{number}"))
    snapshots = await read_and_judge(server.url, ledger, ["r"], server_kept_all=True, settings=SETTINGS)
    assert {f"alive{number}" for number in range(3)} <= {e.model_call_id for e in snapshots["r"].entries}
    return snapshots["r"]


def lost(snapshot: TokenCaptureSnapshot) -> list[tuple[str, str]]:
    return [(reason.code, reason.model_call_id) for reason in snapshot.reasons]


async def test_a_worker_killed_between_intent_and_put_leaves_its_rollout_incomplete(
    server: RealServer, ledger: Ledger
) -> None:
    with WriterProcess("dead") as worker:
        worker.start(OneCall(server.url, ledger.path, puts=False, settings=SETTINGS))
        await asyncio.to_thread(ledger.wait_for, Kind.INTENT, 1)
        worker.kill()
    assert lost(await read_what_is_left(server, ledger)) == [(IncompleteCode.LOST_CALL, "dead")]


async def test_a_worker_killed_inside_its_put_leaves_its_rollout_incomplete(
    server: RealServer, proxy: FaultyProxy, ledger: Ledger
) -> None:
    with WriterProcess("dead") as worker:
        proxy.hold_at(BALLAST)
        worker.start(OneCall(proxy.url, ledger.path, puts=True, settings=SETTINGS))
        async with asyncio.timeout(PATIENCE_S):
            await proxy.held.wait()
        worker.kill()
        proxy.cut()
    assert lost(await read_what_is_left(server, ledger)) == [(IncompleteCode.LOST_CALL, "dead")]


async def test_a_worker_killed_before_it_hears_of_its_put_has_lost_nothing(
    server: RealServer, proxy: FaultyProxy, ledger: Ledger
) -> None:
    async with RedisTokenSink(server.url, **SETTINGS) as sink:  # so that the server knows the script
        await capture(RecordedSink(sink, ledger), entry_of("r", "before"))
    with WriterProcess("dead") as worker:
        proxy.hold_reply_to(BALLAST)
        worker.start(OneCall(proxy.url, ledger.path, puts=True, settings=SETTINGS))
        async with asyncio.timeout(PATIENCE_S):
            await proxy.held.wait()
        worker.kill()
        proxy.cut()
    assert ledger.count(Kind.RECORD) == 1
    snapshot = await read_what_is_left(server, ledger)
    assert not snapshot.incomplete
    assert "dead" in {entry.model_call_id for entry in snapshot.entries}
