"""The server's clock steps back and forth: that of its process only, by libfaketime."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.ledger import Kind, Ledger
from support.polling import wait_until
from support.sample_entries import sample_entry
from support.servers import RealServer
from support.trainers import consume, read_and_judge
from support.writers import Work, WriterProcess, all_work

from gym_capture_redis.errors import TokenCaptureRetiredError
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

LIBRARIES = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")
SETTINGS: dict[str, Any] = {"namespace": "run", "timeout_s": 30.0}
PATIENCE_S = 60.0
ROLLOUTS = tuple(f"r{number}" for number in range(8))
WRITERS = 16
CALLS = 24
STEPS_S = (-3_600, 2 * 86_400, -30 * 86_400, 0)
"""Off the true time; beyond the life of every tombstone among them."""


@dataclass(frozen=True)
class Clock:
    """What the server's process takes for the time."""

    server: RealServer
    file: Path

    def step(self, offset_s: int) -> None:
        self.file.write_text(f"{offset_s:+d}")
        wait_until(lambda: abs(self.offset_s() - offset_s) < 60, "the clock stepped", timeout_s=PATIENCE_S)

    def offset_s(self) -> float:
        with self.server.client() as client:
            answer: Any = client.time()
        return float(answer[0] - time.time())


@pytest.fixture
def clock(valkey9: RealServer, tmp_path: Path) -> Iterator[Clock]:
    """Of one kind only: the allocator of Debian's asks for the time before libfaketime is ready."""
    libraries = [path for pattern in LIBRARIES for path in Path("/").glob(pattern.removeprefix("/"))]
    if not libraries:
        pytest.skip("there is no libfaketime to step a server's clock with (Debian: apt install libfaketime)")
    file = tmp_path / "offset"
    file.write_text("+0")
    server = RealServer(valkey9.binary)
    server.environment |= {
        "LD_PRELOAD": str(libraries[0]),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with server:
        yield Clock(server, file)


async def test_a_clock_that_steps_under_writers_costs_nothing(
    clock: Clock, crew: list[WriterProcess], ledger: Ledger
) -> None:
    url = clock.server.url
    work = Work(url, ledger.path, ROLLOUTS, WRITERS, CALLS, settings=SETTINGS)
    writing = asyncio.create_task(all_work(crew, work))
    for number, offset_s in enumerate(STEPS_S, start=1):
        await asyncio.to_thread(ledger.wait_for, Kind.RECORD, 80 * number)
        await asyncio.to_thread(clock.step, offset_s)
    await writing
    assert not ledger.count(Kind.FAILED)
    snapshots = await read_and_judge(url, ledger, ROLLOUTS, server_kept_all=True, settings=SETTINGS)
    assert not any(snapshot.incomplete for snapshot in snapshots.values())
    await asyncio.to_thread(clock.step, STEPS_S[0])
    await consume(url, ledger, ROLLOUTS, settings=SETTINGS)


async def test_a_late_record_is_refused_though_the_clock_stepped_beyond_the_tombstone(
    clock: Clock,
) -> None:
    async with RedisTokenSink(clock.server.url, **SETTINGS) as sink:
        await sink.begin_call("r", "late")
        async with RedisTokenSource(clock.server.url, **SETTINGS) as source:
            assert (await source.retire(["r"]))["removed"] == ["r"]
            await asyncio.to_thread(clock.step, 2 * 86_400)
            with pytest.raises(TokenCaptureRetiredError):
                await sink.put(sample_entry("r", "late"))
            assert not (await source.freeze("r")).entries


async def test_an_open_and_a_frozen_rollout_outlive_any_step_of_the_clock(clock: Clock) -> None:
    async with (
        RedisTokenSink(clock.server.url, **SETTINGS) as sink,
        RedisTokenSource(clock.server.url, **SETTINGS) as source,
    ):
        for rollout in ("open", "frozen"):
            await sink.begin_call(rollout, "c")
            await sink.put(sample_entry(rollout, "c"))
        frozen = await source.freeze("frozen")
        await asyncio.to_thread(clock.step, 400 * 86_400)
        assert await source.freeze("frozen") == frozen
        assert [entry.model_call_id for entry in (await source.freeze("open")).entries] == ["c"]
