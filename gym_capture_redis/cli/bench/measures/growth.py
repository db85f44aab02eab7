"""What a rollout costs to keep as its turns add up: every prompt repeats all turns before it."""

from __future__ import annotations

import itertools
from typing import Any

from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.peers import file_store
from gym_capture_redis.cli.bench.peers.file_store import FileStore
from gym_capture_redis.cli.bench.peers.ours import NAME as OURS
from gym_capture_redis.cli.bench.rounds import growth_exponent
from gym_capture_redis.cli.bench.section import Grid, Section
from gym_capture_redis.cli.bench.shape import Shape
from gym_capture_redis.cli.bench.workload import Rollout, new_information

NAME = "growth"
TURNS = 40
SHAPE = Shape(rollouts=1, calls=TURNS, first_prompt=2_000, growth=600, generated=200)
INFORMATION = "new information"
SHOWN_TURNS = (10, 20, 30, 40)
KIB = 1024


async def measure(bench: Bench) -> Section:
    """Bytes after each turn of one rollout, in Redis (MEMORY USAGE) and in the file store."""
    rollout = SHAPE.rollout(0)
    sizes = {
        OURS: await _in_redis(bench, rollout),
        INFORMATION: list(itertools.accumulate(new_information(rollout))),
    }
    lacks = file_store.missing()
    if not lacks:
        sizes[file_store.NAME] = await _in_file_store(bench, rollout)
    section = Section(NAME, grids=[_grid(sizes)], data={"bytes_after_turn": sizes, "shape": str(SHAPE)})
    section.notes = [f"{file_store.NAME} is left out: it needs {lacks}"] if lacks else []
    return section


async def _in_redis(bench: Bench, rollout: Rollout) -> list[int]:
    ours = bench.ours()
    sizes: list[int] = []
    try:
        await ours.prepare([rollout])
        with bench.progress(f"Growth, one rollout of {TURNS} turns", TURNS) as advance:
            for entry in rollout:
                await ours.put(entry)
                usage: Any = bench.servers.main.client.memory_usage(ours.key(rollout), samples=0)
                sizes.append(int(usage))
                advance()
        await ours.read(rollout)
    finally:
        await ours.clear()
    return sizes


async def _in_file_store(bench: Bench, rollout: Rollout) -> list[int]:
    store = FileStore(bench.directory)
    sizes: list[int] = []
    try:
        await store.prepare([rollout])
        for entry in rollout:
            await store.put(entry)
            sizes.append(store.stored_bytes)
    finally:
        await store.clear()
    return sizes


def _grid(sizes: dict[str, list[int]]) -> Grid:
    rows = [
        (
            name,
            *(f"{after[turn - 1] / KIB:,.0f}" for turn in SHOWN_TURNS),
            f"turns^{growth_exponent(after):.2f}",
        )
        for name, after in sizes.items()
    ]
    columns = ("KiB after turn", *map(str, SHOWN_TURNS), "grows as")
    return Grid(
        f"Bytes against turns: {SHAPE.growth} new ids a turn, {SHAPE.generated} generated", columns, rows
    )
