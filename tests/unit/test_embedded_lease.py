"""A client holds its embedded server once, and lets it go whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gym_capture_redis import embedded
from gym_capture_redis.connection import EmbeddedLease
from gym_capture_redis.settings import SinkSettings

PATIENCE_S = 30.0
COMPANY_S = 0.2
"""For so long one that is made waits for another; a longer time could only find more."""
STARTERS = 8


class Server:
    """Starts once it is let; counts who holds it."""

    made: ClassVar[list[Server]] = []

    def __init__(self, directory: str | None, **_: Any) -> None:
        self.socket_path = directory
        self.began_empty = True
        self.holds = 0
        self.made.append(self)
        with contextlib.suppress(threading.BrokenBarrierError):  # as it should be: nobody else comes
            MAKING.wait(COMPANY_S)

    def start(self) -> None:
        STARTING.set()
        assert MAY_START.wait(PATIENCE_S)
        self.holds = 1

    def stop(self) -> None:
        self.holds = 0


STARTING, MAY_START, MAKING = threading.Event(), threading.Event(), threading.Barrier(2)


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> EmbeddedLease:
    monkeypatch.setattr(embedded, "EmbeddedServer", Server)
    Server.made.clear()
    STARTING.clear()
    MAY_START.set()
    MAKING.reset()
    return EmbeddedLease(SinkSettings.build("embedded:/somewhere", "run", {}))


def test_threads_that_start_at_once_share_one_server(lease: EmbeddedLease) -> None:
    together = threading.Barrier(STARTERS)

    def start() -> str:
        together.wait(PATIENCE_S)
        return lease.start()

    with ThreadPoolExecutor(STARTERS) as threads:
        paths = [future.result() for future in [threads.submit(start) for _ in range(STARTERS)]]
    assert paths == ["/somewhere"] * STARTERS
    assert len(Server.made) == 1
    lease.stop()
    assert Server.made[0].holds == 0


async def test_a_start_whose_caller_left_is_let_go_all_the_same(lease: EmbeddedLease) -> None:
    MAY_START.clear()
    starting = asyncio.create_task(lease.started())
    assert await asyncio.to_thread(STARTING.wait, PATIENCE_S)
    starting.cancel()
    releasing = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    MAY_START.set()
    async with asyncio.timeout(PATIENCE_S):
        await releasing
    assert [server.holds for server in Server.made] == [0]
    with pytest.raises(RedisConnectionError, match="closed"):
        await lease.started()
    assert [server.holds for server in Server.made] == [0]


async def test_a_lease_that_was_never_used_needs_no_thread(
    lease: EmbeddedLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "to_thread", None)
    await lease.release()
    assert Server.made == []


def test_a_lease_may_be_used_again_after_it_was_stopped(lease: EmbeddedLease) -> None:
    for _ in range(2):
        lease.start()
        lease.stop()
    assert [server.holds for server in Server.made] == [0, 0]
