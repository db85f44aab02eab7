"""How much memory a worker takes while its puts wait for a server that has stalled."""

from __future__ import annotations

import asyncio
import os
import signal
import tracemalloc
from typing import Any

from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.drive import LostCallError, read_all
from gym_capture_redis.cli.bench.goals import Figure, NotMeasured
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.section import Grid, Section
from gym_capture_redis.cli.bench.servers import Server, private_server
from gym_capture_redis.cli.bench.shape import Shape
from gym_capture_redis.cli.bench.workload import Rollout
from gym_capture_redis.errors import ConfigurationError
from gym_capture_redis.settings import SinkSettings

NAME = "memory"
SETTING = "max_inflight_bytes"
PUTS = 1_000
LIMIT_BYTES, QUICK_LIMIT_BYTES = 64 * 2**20, 16 * 2**20
PROMPT_IDS, QUICK_PROMPT_IDS = 32_768, 8_192
"""So that all puts together would take several times the limit."""
SAMPLE_S = 0.1
STEADY_SAMPLES = 15
"""Memory that did not grow in so many samples has stopped growing."""
LONGEST_S = 60.0
TIMEOUT_S = 300.0
MIB = 2**20


async def measure(bench: Bench) -> Section:
    """Stall a private server under 1,000 puts, and let it go again: all of them must arrive."""
    section = Section(NAME)
    if SETTING not in SinkSettings.model_fields:
        section.figures["client_memory"] = NotMeasured(f"this version has no setting {SETTING}")
        return section
    try:
        with (
            private_server(bench.directory / "stalled") as server,
            bench.progress(f"Client memory, {PUTS:,} puts on a stalled server", 1) as advance,
        ):
            limit = QUICK_LIMIT_BYTES if bench.options.quick else LIMIT_BYTES
            peak = await _peak_while_stalled(bench, server, limit)
            advance()
    except ConfigurationError as error:
        section.figures["client_memory"] = NotMeasured(str(error))
        return section
    detail = f"{peak / MIB:,.1f} MiB with {SETTING} at {limit / MIB:,.0f} MiB"
    section.figures["client_memory"] = Figure(peak / limit, detail)
    section.data = {"peak_bytes": peak, SETTING: limit, "puts": PUTS}
    section.grids = [
        Grid("Client memory", ("", ""), [(f"{PUTS:,} puts waiting on a stalled server", detail)])
    ]
    return section


async def _peak_while_stalled(bench: Bench, server: Server, limit: int) -> int:
    rollouts = _single_calls(QUICK_PROMPT_IDS if bench.options.quick else PROMPT_IDS)
    settings: dict[str, Any] = {SETTING: limit, "timeout_s": TIMEOUT_S}
    ours = OurTransport(server, bench.mark, **settings)
    try:
        await ours.prepare(rollouts)
        gate = asyncio.Event()
        # The callers and what they hold are there before: their memory is theirs.
        puts = [asyncio.create_task(_put_when(gate, ours, rollout)) for rollout in rollouts]
        await asyncio.sleep(0)
        peak = await _stalled(server, gate, puts)
        await asyncio.gather(*puts)
        await read_all(ours, rollouts)
    finally:
        await ours.clear()
    return peak


async def _put_when(gate: asyncio.Event, ours: OurTransport, rollout: Rollout) -> None:
    await gate.wait()
    await ours.put(rollout[0])


async def _stalled(server: Server, gate: asyncio.Event, puts: list[asyncio.Task[None]]) -> int:
    """Open the gate on a stopped server and watch memory until it stops growing."""
    pid = int(server.info()["process_id"])
    os.kill(pid, signal.SIGSTOP)
    try:
        tracemalloc.start()
        gate.set()
        return await _steady_peak(puts)
    finally:
        tracemalloc.stop()
        os.kill(pid, signal.SIGCONT)


async def _steady_peak(puts: list[asyncio.Task[None]]) -> int:
    peak, unchanged = 0, 0
    for _ in range(int(LONGEST_S / SAMPLE_S)):
        await asyncio.sleep(SAMPLE_S)
        before, peak = peak, tracemalloc.get_traced_memory()[1]
        unchanged = unchanged + 1 if peak == before else 0
        if unchanged == STEADY_SAMPLES:
            break
    ended = sum(put.done() for put in puts)
    if ended:
        raise LostCallError(f"{ended} puts ended while the server was stopped")
    return peak


def _single_calls(prompt_ids: int) -> list[Rollout]:
    """Rollouts of one call each, which share their arrays: what they hold is not of interest here."""
    (entry,) = Shape(calls=1, first_prompt=prompt_ids, generated=128).rollout(0)
    return [[entry.model_copy(update={"rollout_id": f"stalled-{number}"})] for number in range(PUTS)]
