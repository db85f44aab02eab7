"""SIGSTOP of the server beyond every deadline, with nobody told: calls end, and nothing passes as whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.ledger import Kind, Ledger
from support.servers import RealServer
from support.trainers import read_and_judge
from support.writers import Work, WriterProcess, all_work

from gym_capture_redis.errors import BackendUnavailableError
from gym_capture_redis.source import RedisTokenSource

TIMEOUT_S = 1.0
PATIENCE_S = 60.0
WRITERS = 16
CALLS = 40
SETTINGS: dict[str, Any] = {"namespace": "run", "timeout_s": TIMEOUT_S}
PATIENT: dict[str, Any] = {"namespace": "run", "timeout_s": PATIENCE_S}
ROLLOUTS = tuple(f"r{number}" for number in range(8))


async def test_calls_to_a_paused_server_end_and_what_they_lost_shows(
    server: RealServer, crew: list[WriterProcess], ledger: Ledger
) -> None:
    work = Work(server.url, ledger.path, ROLLOUTS, WRITERS, CALLS, settings=SETTINGS)
    writing = asyncio.create_task(all_work(crew, work))
    await asyncio.to_thread(ledger.wait_for, Kind.RECORD, 50)
    server.pause()
    try:
        async with RedisTokenSource(server.url, **SETTINGS) as source, asyncio.timeout(PATIENCE_S):
            with pytest.raises(BackendUnavailableError, match="gave no answer within 1 s"):
                await source.freeze("unheard")
            await asyncio.to_thread(ledger.wait_for, Kind.FAILED, len(crew) * WRITERS)
    finally:
        server.resume()
    await writing
    await read_and_judge(server.url, ledger, ROLLOUTS, server_kept_all=True, settings=PATIENT)
