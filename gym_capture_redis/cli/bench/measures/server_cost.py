"""What a put costs the server: processor time, bytes of the append-only file, memory.

Its processor time is held against plain HSETs of the same fields. A core slows down when its neighbour is
busy, so whoever sends them packs the same ids between its pipelines, as whoever puts has to.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gym_capture_redis.cli.bench import floors
from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.drive import put_all, read_all
from gym_capture_redis.cli.bench.goals import Figure, NotMeasured
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.rounds import ratio, rotated
from gym_capture_redis.cli.bench.section import Grid, Section
from gym_capture_redis.cli.bench.server_reading import Reading
from gym_capture_redis.cli.bench.stored_fields import Fields, Stored, StoredCall, learn_stored_fields

NAME = "cost"
MICROSECONDS = 1e6
COMPARISON_NOTE = (
    "A plain HSET stores the fields that puts were seen to add or change, as many in a call and with the "
    "state that every put rewrites; it does so in a hash of each rollout that holds its announced calls, in "
    "pipelines as long as those of the puts, over as many connections. The sender packs the ids of the same "
    "calls between its pipelines, so that the server has as busy a neighbour."
)


@dataclass
class Costs:
    """Per put, a value for each round."""

    ours_cpu_us: list[float] = field(default_factory=list)
    fields_cpu_us: list[float] = field(default_factory=list)
    one_value_cpu_us: list[float] = field(default_factory=list)
    aof_bytes: list[float] = field(default_factory=list)
    announcing_aof_bytes: list[float] = field(default_factory=list)
    memory_bytes: list[float] = field(default_factory=list)
    batch: list[float] = field(default_factory=list)
    aof_was_rewritten: bool = False

    @property
    def batch_size(self) -> int:
        """How many puts the newest round had in a pipeline."""
        return max(1, round(self.batch[-1]))


async def measure(bench: Bench) -> Section:
    """Compare puts with plain HSETs, taking turns in each round."""
    costs = Costs()
    # It also loads the scripts: a server keeps them, and they belong to no put.
    stored = await learn_stored_fields(bench.ours(), bench.servers.main, bench.workload.rollouts)
    payload = secrets.token_bytes(max(call.nbytes for call in stored.calls))

    def one_value(call: StoredCall) -> Fields:
        return {f"r:{call.entry.model_call_id}".encode(): payload[: call.nbytes]}

    async def plain_fields() -> None:
        costs.fields_cpu_us.append(await _plain(bench, stored, lambda call: call.fields, costs.batch_size))

    async def plain_value() -> None:
        costs.one_value_cpu_us.append(await _plain(bench, stored, one_value, costs.batch_size))

    async def ours() -> None:
        await _ours(bench, costs)

    turns = [ours, plain_fields, plain_value]
    rounds = bench.options.rounds
    with bench.progress(f"Server cost, {rounds} rounds", len(turns) * rounds) as advance:
        for number in range(rounds):
            for turn in rotated(turns, number):
                await turn()
                advance()
    return _section(bench, costs, stored)


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


async def _plain(
    bench: Bench, stored: Stored, fields_of: Callable[[StoredCall], Fields], batch: int
) -> float:
    """Microseconds of the server for one HSET, over as many connections as a sink has."""
    server, connections = bench.servers.main, OurTransport.connections()
    prefix = f"{bench.mark}-{secrets.token_hex(4)}"
    keys = [f"{prefix}:{number}" for number in range(len(stored.announced))]
    clients = [server.new_client() for _ in range(connections)]
    try:
        for client in clients:
            await client.ping()
        for key, announced in zip(keys, stored.announced, strict=True):
            await _hset(clients[0], key, announced)
        before = await Reading.take(server)
        await asyncio.gather(
            *(
                _pipelines(client, keys, stored.calls[number::connections], fields_of, batch)
                for number, client in enumerate(clients)
            )
        )
        after = await Reading.take(server)
    finally:
        await clients[0].unlink(*keys)
        await asyncio.gather(*(client.aclose() for client in clients))
    return (after.cpu_s - before.cpu_s) / len(stored.calls) * MICROSECONDS


async def _pipelines(
    client: Any,
    keys: Sequence[str],
    calls: Sequence[StoredCall],
    fields_of: Callable[[StoredCall], Fields],
    batch: int,
) -> None:
    for start in range(0, len(calls), batch):
        pipe = client.pipeline(transaction=False)
        for call in calls[start : start + batch]:
            floors.pack(call.entry)
            _hset(pipe, keys[call.rollout], fields_of(call))
        await pipe.execute()


def _hset(client: Any, key: str, fields: Fields) -> Any:
    return client.hset(key, items=[part for pair in fields.items() for part in pair])


def _section(bench: Bench, costs: Costs, stored: Stored) -> Section:
    section = Section(NAME)
    information = bench.workload.new_information / bench.workload.calls
    section.figures = {
        "server_cpu": ratio(costs.ours_cpu_us, costs.fields_cpu_us, unit="us"),
        "aof_bytes": _to_information(costs.aof_bytes, information),
        "memory_bytes": _to_information(costs.memory_bytes, information),
    }
    if costs.aof_was_rewritten:
        section.figures["aof_bytes"] = NotMeasured("the server rewrote its append-only file meanwhile")
    fields = sum(len(call.fields) for call in stored.calls) / len(stored.calls)
    section.data = vars(costs) | {"new_information_bytes": information, "fields": fields}
    section.notes = [COMPARISON_NOTE]
    rows = [
        ("server CPU of a put", f"{median(costs.ours_cpu_us):,.0f} us"),
        ("server CPU of a plain HSET, the same fields", f"{median(costs.fields_cpu_us):,.0f} us"),
        ("server CPU of a plain HSET, one value of their size", f"{median(costs.one_value_cpu_us):,.0f} us"),
        ("fields of a put", f"{fields:,.1f}"),
        ("puts in a pipeline", f"{median(costs.batch):,.1f}"),
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
