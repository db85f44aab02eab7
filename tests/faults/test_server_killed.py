"""``kill -9`` of the server under 64 writers in two processes, and its restart, at each durability level."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.ledger import Kind, Ledger
from support.servers import RealServer
from support.trainers import read_and_judge
from support.writers import Work, WriterProcess, all_work

WRITERS = 32
"""In each of the two processes."""

CALLS = 24
KILLS_AT = (300, 700)
"""Acknowledged records; there are 1,344 in the end."""

ROLLOUTS = tuple(f"r{number}" for number in range(16))
PATIENCE_S = 60.0

LEVELS: dict[str, dict[str, str]] = {
    "memory": {"appendonly": "no"},
    "aof": {"appendfsync": "everysec"},
    "fsync": {"appendfsync": "always"},
}


@pytest.mark.parametrize("durability", LEVELS)
async def test_what_was_acknowledged_is_there_or_its_rollout_is_incomplete(
    real_server: RealServer, crew: list[WriterProcess], ledger: Ledger, durability: str
) -> None:
    settings: dict[str, Any] = {"namespace": "run", "timeout_s": PATIENCE_S, "durability": durability}
    keeps_all = durability != "memory"
    with RealServer(real_server.binary, **LEVELS[durability]) as server:
        work = Work(server.url, ledger.path, ROLLOUTS, WRITERS, CALLS, settings=settings)
        writing = asyncio.create_task(all_work(crew, work))
        for records in KILLS_AT:
            await asyncio.to_thread(ledger.wait_for, Kind.RECORD, records)
            assert not writing.done(), "the server is to be killed while it is written to"
            await asyncio.to_thread(kill_and_restart, server)
        await writing
        snapshots = await read_and_judge(
            server.url, ledger, ROLLOUTS, server_kept_all=keeps_all, settings=settings
        )
    if keeps_all:
        assert not ledger.count(Kind.FAILED)
        assert not any(snapshot.incomplete for snapshot in snapshots.values())
    else:
        assert all(snapshot.incomplete for snapshot in snapshots.values())


def kill_and_restart(server: RealServer) -> None:
    server.wait_until_written()
    server.kill()
    server.start()
