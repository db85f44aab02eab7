"""A network that cuts, delays, splits and swallows: what was acknowledged is there, once, and whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.ledger import Kind, Ledger
from support.proxies import FaultyProxy
from support.servers import RealServer
from support.trainers import read_and_judge
from support.writers import Work, WriterProcess, all_work

SETTINGS: dict[str, Any] = {"namespace": "run", "timeout_s": 40.0}
ROLLOUTS = tuple(f"r{number}" for number in range(4))
WRITERS = 8
CALLS = 16
LONGEST_DELAY_S = 0.02
POLL_S = 0.005

FAULTS: dict[str, Callable[[FaultyProxy], object]] = {
    "cuts": FaultyProxy.cut,
    "swallowed replies": FaultyProxy.swallow_a_reply,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_at_every_tenth_record_costs_nothing(
    server: RealServer, crew: list[WriterProcess], ledger: Ledger, fault: str
) -> None:
    async with FaultyProxy(server.socket_path) as proxy:
        work = Work(proxy.url, ledger.path, ROLLOUTS, WRITERS, CALLS, settings=SETTINGS)
        writing = asyncio.create_task(all_work(crew, work))
        faults = 0
        while not writing.done():
            if ledger.count(Kind.RECORD) >= 10 * faults:
                FAULTS[fault](proxy)
                faults += 1
            await asyncio.sleep(POLL_S)
        await writing
        assert faults > 10
        assert bool(proxy.swallowed) == (fault == "swallowed replies")
    await nothing_is_lost(server, ledger)


@pytest.mark.parametrize("network", ["delays", "single bytes"])
async def test_a_slow_network_and_one_that_splits_messages_cost_nothing(
    server: RealServer, crew: list[WriterProcess], ledger: Ledger, network: str
) -> None:
    async with FaultyProxy(server.socket_path) as proxy:
        if network == "delays":
            proxy.longest_delay_s = LONGEST_DELAY_S
        else:
            proxy.slice_bytes = 1
        await all_work(crew, Work(proxy.url, ledger.path, ROLLOUTS, 2, CALLS, settings=SETTINGS))
    await nothing_is_lost(server, ledger)


async def nothing_is_lost(server: RealServer, ledger: Ledger) -> None:
    assert not ledger.count(Kind.FAILED)
    snapshots = await read_and_judge(server.url, ledger, ROLLOUTS, server_kept_all=True, settings=SETTINGS)
    assert not any(snapshot.incomplete for snapshot in snapshots.values())
