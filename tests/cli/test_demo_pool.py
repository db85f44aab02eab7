"""The workers of the demo, as real processes."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from support.servers import RealServer

pytest.importorskip("typer")

from gym_capture_redis.cli import demo_pool
from gym_capture_redis.cli.demo_pool import DemoError, WorkerPool
from gym_capture_redis.cli.demo_worker import Target

PATIENCE_S = 30.0


async def test_workers_that_do_not_end_are_killed_soon_where_the_demo_fails(
    valkey9: RealServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_pool, "ENDING_S", 2 * PATIENCE_S)  # as they get where it went well
    pool = WorkerPool(2, Target(valkey9.url, namespace, "aof"))
    await pool.__aenter__()
    for worker in pool.workers:
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGSTOP)  # as one whose imports take long

    async with asyncio.timeout(PATIENCE_S):
        await pool.__aexit__(DemoError)

    assert [worker.process.exitcode for worker in pool.workers] == [-signal.SIGKILL] * 2
