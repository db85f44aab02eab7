"""How long a put of a very long record keeps everything else on its event loop waiting."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np

from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.drive import keep_from_collector
from gym_capture_redis.cli.bench.goals import Figure
from gym_capture_redis.cli.bench.section import Grid, Section
from gym_capture_redis.cli.bench.shape import Shape
from gym_capture_redis.cli.bench.workload import Rollout

NAME = "loop"
GENERATED = 2_048
TOKENS = 131_072
BEAT_S = 0.001
QUIET_S = 0.5
MILLISECONDS = 1e3
LISTS, ARRAYS, NOTHING = "lists", "arrays", "nothing is put"


@dataclass
class Heart:
    """What a heartbeat saw: the longest time by which a beat was late, in seconds."""

    longest_pause_s: float = 0.0


async def measure(bench: Bench) -> Section:
    """Put the record while a task beats every millisecond; the worst put counts."""
    as_lists = Shape(calls=1, first_prompt=TOKENS - GENERATED, generated=GENERATED).rollout(0)
    keep_from_collector()
    pauses: dict[str, list[float]] = {LISTS: [], ARRAYS: [], NOTHING: []}
    rounds = bench.options.rounds
    with bench.progress(f"Event loop, puts of {TOKENS:,} ids", 2 * rounds) as advance:
        for _ in range(rounds):
            for form, rollout in ((LISTS, as_lists), (ARRAYS, _with_arrays(as_lists))):
                pauses[form].append(MILLISECONDS * await _longest_pause(bench, rollout))
                advance()
            async with _heartbeat() as quiet:
                await asyncio.sleep(QUIET_S)
            pauses[NOTHING].append(MILLISECONDS * quiet.longest_pause_s)
    section = Section(NAME, data={"longest_pause_ms": pauses})
    detail = ", ".join(f"{max(pauses[form]):.1f} ms: {form}" for form in pauses)
    each = (*pauses[LISTS], *pauses[ARRAYS])
    section.figures["event_loop"] = Figure(max(each), f"longest of {len(each)} puts; {detail}", each)
    rows = [(form, f"{max(of_form):.1f} ms") for form, of_form in pauses.items()]
    title = f"Longest pause of the event loop while a record of {TOKENS:,} ids is put"
    section.grids = [Grid(title, ("as", "worst"), rows)]
    return section


def _with_arrays(rollout: Rollout) -> Rollout:
    """The same call with arrays in place of lists, as an engine may hold it."""
    (entry,) = rollout
    arrays = {
        "prompt_token_ids": np.asarray(entry.prompt_token_ids, "i4"),
        "generation_token_ids": np.asarray(entry.generation_token_ids, "i4"),
        "generation_log_probs": np.asarray(entry.generation_log_probs, "f4"),
    }
    return [entry.model_copy(update=arrays)]


async def _longest_pause(bench: Bench, rollout: Rollout) -> float:
    ours = bench.ours()
    try:
        await ours.prepare([rollout])
        gc.collect()
        async with _heartbeat() as heart:
            await ours.put(rollout[0])
        await ours.read(rollout)
    finally:
        await ours.clear()
    return heart.longest_pause_s


@contextlib.asynccontextmanager
async def _heartbeat() -> AsyncIterator[Heart]:
    heart = Heart()
    task = asyncio.create_task(_beat(heart))
    await asyncio.sleep(10 * BEAT_S)
    heart.longest_pause_s = 0.0
    try:
        yield heart
        await asyncio.sleep(10 * BEAT_S)  # a pause is only seen by the beat that comes after it
    finally:
        task.cancel()


async def _beat(heart: Heart) -> None:
    last = time.perf_counter()
    while True:
        await asyncio.sleep(BEAT_S)
        now = time.perf_counter()
        heart.longest_pause_s = max(heart.longest_pause_s, now - last - BEAT_S)
        last = now
