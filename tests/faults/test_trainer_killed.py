"""``kill -9`` of a trainer between freeze and drop, and of one that does not hear of its drop any more."""

from __future__ import annotations

import asyncio
from typing import Any

from support.ledger import Kind, Ledger, RecordedSink, RecordedSource
from support.proxies import FaultyProxy
from support.servers import RealServer
from support.trainers import Consumption, read_and_judge
from support.verdict import violations
from support.writers import WriterProcess, capture, entry_of

from gym_capture_redis.protocols import TokenCaptureSnapshot
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

SETTINGS: dict[str, Any] = {"namespace": "run", "timeout_s": 30.0}
PATIENCE_S = 60.0
CALLS = 5


async def write(server: RealServer, ledger: Ledger, rollout: str = "r") -> None:
    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        for number in range(CALLS):
            await capture(RecordedSink(sink, ledger), entry_of(rollout, f"c{number}"))


async def freeze(server: RealServer, ledger: Ledger, rollout: str = "r") -> TokenCaptureSnapshot:
    snapshots = await read_and_judge(server.url, ledger, [rollout], server_kept_all=True, settings=SETTINGS)
    return snapshots[rollout]


async def drop(server: RealServer, ledger: Ledger, snapshot: TokenCaptureSnapshot) -> bool:
    async with RedisTokenSource(server.url, **SETTINGS) as source:
        dropped = await RecordedSource(source, ledger).drop(snapshot)
    assert not violations(ledger.lines(), server_kept_all=True)
    return dropped


async def kill_after_its_freeze(server: RealServer, ledger: Ledger) -> None:
    with WriterProcess("trainer") as trainer:
        trainer.start(Consumption(server.url, ledger.path, "r", drops=False, settings=SETTINGS))
        await asyncio.to_thread(ledger.wait_for, Kind.SNAPSHOT, 1)
        trainer.kill()


async def test_another_trainer_consumes_what_the_killed_one_had_frozen(
    server: RealServer, ledger: Ledger
) -> None:
    await write(server, ledger)
    await kill_after_its_freeze(server, ledger)
    snapshot = await freeze(server, ledger)
    assert (len(snapshot.entries), snapshot.incomplete) == (CALLS, False)
    assert await drop(server, ledger, snapshot)


async def test_a_mark_after_the_killed_trainer_froze_is_seen_by_the_next_one(
    server: RealServer, ledger: Ledger
) -> None:
    await write(server, ledger)
    await kill_after_its_freeze(server, ledger)
    (frozen,) = [line for line in ledger.lines() if line.kind is Kind.SNAPSHOT]
    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        await RecordedSink(sink, ledger).mark("r", "late")
    snapshot = await freeze(server, ledger)
    assert snapshot.incomplete
    async with RedisTokenSource(server.url, **SETTINGS) as source:
        old = {"snapshot_id": frozen.facts["id"], "version": frozen.facts["version"]}
        assert not await source.drop("r", **old)
    assert await drop(server, ledger, snapshot)


async def test_a_drop_that_a_killed_trainer_did_not_hear_of_is_repeated_by_another(
    server: RealServer, ledger: Ledger
) -> None:
    await write(server, ledger, "other")
    assert await drop(server, ledger, await freeze(server, ledger, "other"))  # the server knows the script
    await write(server, ledger)
    snapshot = await freeze(server, ledger)
    with WriterProcess("trainer") as trainer:
        async with FaultyProxy(server.socket_path) as proxy:
            proxy.hold_reply_to(snapshot.snapshot_id.encode())
            trainer.start(Consumption(proxy.url, ledger.path, "r", drops=True, settings=SETTINGS))
            async with asyncio.timeout(PATIENCE_S):
                await proxy.held.wait()
            trainer.kill()
    assert ledger.count(Kind.DROP) == 1
    async with RedisTokenSource(server.url, **SETTINGS) as source:
        assert await RecordedSource(source, ledger).freeze("r") is None
    assert await drop(server, ledger, snapshot)
