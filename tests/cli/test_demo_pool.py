"""The workers of the demo, as real processes."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.servers import RealServer

pytest.importorskip("typer")

from gym_capture_redis.cli.demo_pool import ENDING_S, DemoError, WorkerPool
from gym_capture_redis.cli.demo_worker import Target


async def test_workers_that_do_not_end_are_killed_soon_where_the_demo_fails(
    valkey9: RealServer, namespace: str
) -> None:
    pool = WorkerPool(2, Target(valkey9.url, namespace, "aof"))
    await pool.__aenter__()
    for worker in pool.workers:
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGSTOP)  # as one whose imports take long
    began_s = time.monotonic()

    await pool.__aexit__(DemoError)

    assert [worker.process.exitcode for worker in pool.workers] == [-signal.SIGKILL] * 2
    assert time.monotonic() - began_s < ENDING_S / 2
