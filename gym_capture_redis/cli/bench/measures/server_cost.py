"""What a put costs the server: processor time, bytes of the append-only file, memory.

Read from INFO before and after, so it is only right on a server that nobody else uses meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.drive import put_all, read_all
from gym_capture_redis.cli.bench.goals import Figure, NotMeasured
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.rounds import ratio
from gym_capture_redis.cli.bench.section import Grid, Section
from gym_capture_redis.cli.bench.servers import Server

NAME = "cost"
FLUSHING_S = 5.0
"""How long the server may take to write its append-only buffer to the file."""
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Reading:
    """What INFO tells at one moment."""

    cpu_s: float
    aof_bytes: int
    aof_base_bytes: int
    memory_bytes: int
    pipelines: int

    @classmethod
    async def take(cls, server: Server) -> Reading:
        """Ask once the server has written all of its append-only file."""
        deadline = time.monotonic() + FLUSHING_S
        info = server.info()
        while info.get("aof_buffer_length") and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            info = server.info()
        return cls(
            cpu_s=info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"],
            aof_bytes=info.get("aof_current_size", 0),
            aof_base_bytes=info.get("aof_base_size", 0),
            memory_bytes=info["used_memory"],
            pipelines=_calls(info, "echo") or _calls(info, "evalsha"),
        )


def _calls(info: dict[str, Any], command: str) -> int:
    calls: int = info.get(f"cmdstat_{command}", {}).get("calls", 0)
    return calls


@dataclass
class Costs:
    """Per put, a value for each round."""

    ours_cpu_us: list[float]
    plain_cpu_us: list[float]
    aof_bytes: list[float]
    announcing_aof_bytes: list[float]
    memory_bytes: list[float]
    batch: list[float]
    aof_was_rewritten: bool = False


async def measure(bench: Bench) -> Section:
    """Compare puts with plain HSETs of as many bytes, sent in pipelines of the same length."""
    costs = Costs([], [], [], [], [], [])
    sizes = list((await bench.stored_sizes()).values())
    await _warm_up(bench)
    rounds = bench.options.rounds
    with bench.progress(f"Server cost, {rounds} rounds", 2 * rounds) as advance:
        for _ in range(rounds):
            await _ours(bench, costs)
            advance()
            await _plain(bench, sizes, max(1, round(costs.batch[-1])), costs)
            advance()
    return _section(bench, costs)


async def _warm_up(bench: Bench) -> None:
    """Load the scripts: a server keeps them, and they belong to no put."""
    ours = bench.ours()
    try:
        await ours.prepare(bench.workload.rollouts[:1])
        await put_all(ours, bench.workload.rollouts[:1])
    finally:
        await ours.clear()


async def _ours(bench: Bench, costs: Costs) -> None:
    ours, server, calls = bench.ours(), bench.servers.main, bench.workload.calls
    before = await Reading.take(server)
    try:
        await ours.prepare(bench.workload.rollouts)
        announced = await Reading.take(server)
        await put_all(ours, bench.workload.rollouts)
        put = await Reading.take(server)
        await read_all(ours, bench.workload.rollouts)
        await ours.sink.close()
        await ours.source.close()
        after = await Reading.take(server)
    finally:
        await ours.clear()
    costs.ours_cpu_us.append((put.cpu_s - announced.cpu_s) / calls * MICROSECONDS)
    costs.batch.append(calls / max(1, put.pipelines - announced.pipelines))
    costs.aof_bytes.append((put.aof_bytes - before.aof_bytes) / calls)
    costs.announcing_aof_bytes.append((announced.aof_bytes - before.aof_bytes) / calls)
    costs.memory_bytes.append((after.memory_bytes - before.memory_bytes) / calls)
    costs.aof_was_rewritten |= put.aof_base_bytes != before.aof_base_bytes


async def _plain(bench: Bench, sizes: Sequence[int], batch: int, costs: Costs) -> None:
    """One HSET of one field for each call, over as many connections as a sink has."""
    server, key = bench.servers.main, f"{bench.mark}-{secrets.token_hex(4)}"
    connections = OurTransport.connections()
    payload = memoryview(secrets.token_bytes(max(sizes)))
    clients = [server.new_client() for _ in range(connections)]
    try:
        for client in clients:
            await client.ping()
        before = await Reading.take(server)
        await asyncio.gather(
            *(
                _pipelines(client, key, number, sizes[number::connections], payload, batch)
                for number, client in enumerate(clients)
            )
        )
        after = await Reading.take(server)
        await clients[0].unlink(key)
    finally:
        await asyncio.gather(*(client.aclose() for client in clients))
    costs.plain_cpu_us.append((after.cpu_s - before.cpu_s) / len(sizes) * MICROSECONDS)


async def _pipelines(
    client: Any, key: str, number: int, sizes: Sequence[int], payload: memoryview, batch: int
) -> None:
    for start in range(0, len(sizes), batch):
        pipe = client.pipeline(transaction=False)
        for offset, size in enumerate(sizes[start : start + batch], start):
            pipe.hset(key, f"{number}-{offset}", payload[:size])
        await pipe.execute()


def _section(bench: Bench, costs: Costs) -> Section:
    section = Section(NAME)
    information = bench.workload.new_information / bench.workload.calls
    section.figures = {
        "server_cpu": ratio(costs.ours_cpu_us, costs.plain_cpu_us, unit="us"),
        "aof_bytes": _to_information(costs.aof_bytes, information),
        "memory_bytes": _to_information(costs.memory_bytes, information),
    }
    if costs.aof_was_rewritten:
        section.figures["aof_bytes"] = NotMeasured("the server rewrote its append-only file meanwhile")
    section.data = vars(costs) | {"new_information_bytes": information}
    rows = [
        ("server CPU of a put", f"{median(costs.ours_cpu_us):,.0f} us"),
        ("server CPU of a plain HSET", f"{median(costs.plain_cpu_us):,.0f} us"),
        ("puts in a pipeline, both", f"{median(costs.batch):,.1f}"),
        ("new information", f"{information:,.0f} B"),
        ("append-only file, all", f"{median(costs.aof_bytes):,.0f} B"),
        ("append-only file, its announcement alone", f"{median(costs.announcing_aof_bytes):,.0f} B"),
        ("memory", f"{median(costs.memory_bytes):,.0f} B"),
    ]
    section.grids = [Grid("What a call costs the server (medians)", ("", "per call"), rows)]
    if any(entry.routed_experts for entry in bench.workload.rollouts[0]):
        section.notes.append("Routed experts are stored, but not counted as new information.")
    if not bench.servers.main.private:
        section.notes.append("Server costs are those of everybody who used the server meanwhile.")
    return section


def _to_information(stored: list[float], information: float) -> Figure:
    return ratio(stored, [information] * len(stored), unit="B a call")
