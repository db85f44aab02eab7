"""A server at its memory limit refuses records and nothing else; a server that stalls fills no client."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.ledger import Kind, Ledger
from support.polling import wait_until
from support.sample_entries import sample_entry
from support.servers import RealServer
from support.trainers import consume, read_and_judge
from support.writers import Work, WriterProcess, all_work

from gym_capture_redis.errors import BackendUnavailableError
from gym_capture_redis.protocols import IncompleteCode
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

SETTINGS: dict[str, Any] = {"namespace": "run", "timeout_s": 30.0}
PATIENCE_S = 60.0
ROLLOUTS = tuple(f"r{number}" for number in range(8))
LATER = tuple(f"later{number}" for number in range(8))
BALLAST_BYTES = 2**16
ROOM_BYTES = 2**23
"""Less than half of what is written."""

WRITERS = 8
CALLS = 20

INFLIGHT_BYTES = 2**23
STALLED_PUTS = 300
STALLED_BYTES = 2**20
ALLOWED_BYTES = 8 * INFLIGHT_BYTES
"""Records under way, as taken and as encoded, the buffers of connections, and what an allocator keeps; all
puts at once would take five times as much."""


async def test_at_the_memory_limit_nothing_is_half_stored_and_after_drops_puts_go_on(
    server: RealServer, crew: list[WriterProcess], ledger: Ledger
) -> None:
    with server.client() as client:
        info: Any = client.info("memory")
        client.config_set("maxmemory", info["used_memory"] + ROOM_BYTES)
    work = Work(server.url, ledger.path, ROLLOUTS, WRITERS, CALLS, BALLAST_BYTES, settings=SETTINGS)
    await all_work(crew, work)

    failed = [line for line in ledger.lines() if line.kind is Kind.FAILED]
    assert {line.facts["step"] for line in failed} <= {"begin_call", "put"}, "marks and refusals go on"
    assert {line.facts["error"] for line in failed} == {"BackendUnavailableError"}
    assert all(
        "out of memory and refused the write; nothing was stored" in line.facts["why"] for line in failed
    )

    snapshots = await read_and_judge(server.url, ledger, ROLLOUTS, server_kept_all=True, settings=SETTINGS)
    stored = {entry.model_call_id for snapshot in snapshots.values() for entry in snapshot.entries}
    assert len(stored) * BALLAST_BYTES > ROOM_BYTES // 2
    assert stored.isdisjoint(line.call for line in failed)
    codes = Counter(reason.code for snapshot in snapshots.values() for reason in snapshot.reasons)
    assert codes.keys() <= {IncompleteCode.MARKED, IncompleteCode.LOST_CALL}

    async with RedisTokenSource(server.url, **SETTINGS) as source:
        assert (await source.retire(ROLLOUTS[:4]))["removed"] == list(ROLLOUTS[:4])
    await consume(server.url, ledger, ROLLOUTS[4:], settings=SETTINGS)
    await asyncio.to_thread(
        wait_until, lambda: used_share(server) < 0.5, "the memory was freed", timeout_s=PATIENCE_S
    )
    work = Work(server.url, ledger.path, LATER, 1, CALLS, settings=SETTINGS)
    await all_work(crew, work)
    later = await read_and_judge(server.url, ledger, LATER, server_kept_all=True, settings=SETTINGS)
    assert not any(snapshot.incomplete for snapshot in later.values())


def used_share(server: RealServer) -> float:
    with server.client() as client:
        info: Any = client.info("memory")
    return float((info["used_memory"] - info["used_memory_startup"]) / ROOM_BYTES)


@dataclass(frozen=True)
class StalledPuts:
    """Puts to a server that does not answer; fails if the process grows beyond the bound."""

    url: str
    ready: Path
    settings: dict[str, Any] = field(default_factory=dict)

    async def run(self, _: str) -> None:
        text = "x" * STALLED_BYTES
        entries = [sample_entry("r", f"c{number}", ballast=text) for number in range(STALLED_PUTS)]
        async with RedisTokenSink(self.url, **self.settings) as sink:
            await asyncio.gather(*(sink.begin_call("r", entry.model_call_id) for entry in entries))
            self.ready.touch()
            paused = partial(
                wait_until, lambda: not self.ready.exists(), "it was paused", timeout_s=PATIENCE_S
            )
            await asyncio.to_thread(paused)
            before = _reset_peak_bytes()
            puts = [asyncio.create_task(sink.put(entry)) for entry in entries]
            outcomes = await asyncio.gather(*puts, return_exceptions=True)
            grown = _peak_bytes() - before
        assert {type(outcome) for outcome in outcomes} == {BackendUnavailableError}
        assert grown < ALLOWED_BYTES, f"grew by {grown / 2**20:.0f} MiB"


def _reset_peak_bytes() -> int:
    """Begin to count anew; returns what the process takes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc"
)
async def test_the_memory_of_a_client_stays_bounded_while_the_server_stalls(
    one_server: RealServer, crew: list[WriterProcess], tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    settings = SETTINGS | {"max_inflight_bytes": INFLIGHT_BYTES, "timeout_s": 3.0}
    putting = asyncio.create_task(all_work(crew[:1], StalledPuts(one_server.url, ready, settings)))
    await asyncio.to_thread(wait_until, ready.exists, "the calls were announced", timeout_s=PATIENCE_S)
    one_server.pause()
    ready.unlink()
    try:
        await putting
    finally:
        one_server.resume()
