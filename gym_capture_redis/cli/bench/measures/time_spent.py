"""Where the time of a put and of a freeze goes, in parts that add up to the whole."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import Any

from gym_capture_redis import batches, codec, scripts, taking
from gym_capture_redis.blocks import BlockTree
from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.drive import IN_FLIGHT, put_all, read_all
from gym_capture_redis.cli.bench.section import Grid, Section
from gym_capture_redis.cli.bench.server_reading import Reading
from gym_capture_redis.cli.bench.stopwatch import LapCost, Split, Splitting, Watched
from gym_capture_redis.cli.bench.workload import Rollout
from gym_capture_redis.connection import Link
from gym_capture_redis.snapshot import SnapshotAssembly

NAME = "profile"
MICROSECONDS = 1e6

PACKING = "packing"
CUTTING = "cutting blocks, hashing"
ENCODING = "other encoding"
SENDING = "redis-py: sending, replies"
RECEIVING = "receiving, parsing replies"
CHECKING = "checking hashes"
UNPACKING = "unpacking"
SLICING = "cutting out prompts"
BUILDING = "building entries"
COLLECTOR = "garbage collector"
REST = "rest of this process"
WAITING = "waiting"
SERVER = "server, meanwhile"

PUT = "put"
ENTRIES = "freeze to entries"
KEPT = "freeze to entries, all kept"
ARRAYS = "freeze to arrays"

_OF_BOTH = (COLLECTOR, REST, WAITING)
PARTS_OF_PUT = (PACKING, CUTTING, ENCODING, SENDING, *_OF_BOTH)
PARTS_OF_FREEZE = (RECEIVING, CHECKING, UNPACKING, SLICING, BUILDING, *_OF_BOTH)

IN_A_PUT = (
    Watched(taking, "take", ENCODING),
    Watched(codec, "encode_taken", ENCODING),
    Watched(codec, "joined_ids", PACKING),
    Watched(codec, "pack_log_probs", PACKING),
    Watched(codec, "pack_experts", PACKING),
    Watched(codec, "cut", CUTTING),
    Watched(hashlib, "blake2b", CUTTING),
    Watched(codec, "xxh3_128_digest", CUTTING),
    Watched(Link, "pipeline", SENDING),
    Watched(Link, "begin", SENDING),
    Watched(Link, "finish", SENDING),
    Watched(batches, "read_replies", SENDING),
)
IN_A_FREEZE = (
    Watched(Link, "pipeline", RECEIVING),
    Watched(Link, "begin", RECEIVING),
    Watched(Link, "finish", RECEIVING),
    Watched(batches, "read_replies", RECEIVING),
    Watched(scripts.Frozen, "parse", RECEIVING),
    Watched(scripts.Chunk, "parse", RECEIVING),
    Watched(hashlib, "blake2b", CHECKING),
    Watched(codec, "xxh3_128_digest", CHECKING),
    Watched(SnapshotAssembly, "add", UNPACKING),
    Watched(BlockTree, "split", SLICING),
    Watched(SnapshotAssembly, "finish", BUILDING),
)
ABOUT_PARTS = (
    f"Up to {IN_FLIGHT} rollouts in flight. The parts add up to the time of a call (wall clock / calls): the "
    "processor time of this process, and the time in which it had nothing to do or no processor. The server "
    "works at the same time; what it took longer than the waiting must have overlapped with this process."
)
ABOUT_NAMES = (
    f"{ENCODING}: taking and checking the entry, JSON, msgpack. {REST}: queueing, retry loop, caches, "
    "freeing memory, the event loop and its sockets."
)
ABOUT_COLLECTOR = (
    f"{KEPT}: as by a trainer that holds all entries until the last one is read. The others let go of each "
    "rollout once it is read. The collector's part is the time between its callbacks."
)


@dataclass(frozen=True)
class Spent:
    """Microseconds for each call: the parts of the whole, and beside them the server."""

    parts: dict[str, float]
    server: float
    noting: float

    @property
    def whole(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def shares(self) -> dict[str, float]:
        """Each part of the whole; the server's share does not count into it."""
        return {part: us / self.whole for part, us in self.parts.items()}

    @property
    def overlap(self) -> float:
        """How long server and this process worked at the same time, at least."""
        return max(0.0, self.server - self.parts[WAITING])

    def as_data(self) -> dict[str, Any]:
        """Everything, for JSON and plots."""
        return {
            "parts_us": self.parts,
            "shares": self.shares,
            "whole_us": self.whole,
            "server_us": self.server,
            "overlap_us": self.overlap,
            "noting_us": self.noting,
        }


async def measure(bench: Bench) -> Section:
    """Put and freeze the workload in each round, with a stopwatch in the functions that do the work."""
    rounds: dict[str, list[Spent]] = {PUT: [], ENTRIES: [], KEPT: [], ARRAYS: []}
    with bench.progress(
        f"Where the time goes, {bench.options.rounds} rounds", bench.options.rounds
    ) as advance:
        for _ in range(bench.options.rounds):
            await _one_round(bench, rounds)
            advance()
    return _section(rounds)


async def _one_round(bench: Bench, rounds: dict[str, list[Spent]]) -> None:
    ours, rollouts = bench.ours(), bench.workload.rollouts
    cost = LapCost.measured()
    kept: list[Any] = []

    async def read_and_keep(rollout: Rollout) -> int:
        kept.append(await ours.freeze(rollout))
        return len(kept[-1].entries)

    async def observed(watched: Sequence[Watched], work: Callable[..., Awaitable[float]]) -> Spent:
        splitting = Splitting(watched, COLLECTOR, cost)
        before = await Reading.take(bench.servers.main)
        await work(observed_by=splitting)
        after = await Reading.take(bench.servers.main)
        parts = PARTS_OF_PUT if watched is IN_A_PUT else PARTS_OF_FREEZE
        return spent_on(splitting.split, parts, after.cpu_s - before.cpu_s, bench.workload.calls)

    try:
        await ours.prepare(rollouts)
        rounds[PUT].append(await observed(IN_A_PUT, partial(put_all, ours, rollouts)))
        for name, read in ((ENTRIES, ours.read), (KEPT, read_and_keep), (ARRAYS, ours.read_arrays)):
            rounds[name].append(await observed(IN_A_FREEZE, partial(read_all, ours, rollouts, read)))
            kept.clear()
    finally:
        await ours.clear()


def spent_on(split: Split, names: Sequence[str], server_s: float, calls: int) -> Spent:
    """What one call took, from what all of them took; ``names`` are the parts in order."""
    seconds = {**split.parts_s, REST: split.rest_s, WAITING: split.waiting_s}
    parts = {name: seconds.get(name, 0.0) / calls * MICROSECONDS for name in names}
    return Spent(parts, server_s / calls * MICROSECONDS, split.noting_s / calls * MICROSECONDS)


def _section(rounds: dict[str, list[Spent]]) -> Section:
    medians = {name: _median_round(spent) for name, spent in rounds.items()}
    section = Section(NAME, notes=[ABOUT_PARTS, ABOUT_NAMES, ABOUT_COLLECTOR])
    section.grids = [
        _grid("Where the time of a put goes, per call", PARTS_OF_PUT, {PUT: medians[PUT]}),
        _grid(
            "Where the time of a freeze goes, per call",
            PARTS_OF_FREEZE,
            {name: medians[name] for name in (ENTRIES, KEPT, ARRAYS)},
        ),
    ]
    section.data = {
        name: medians[name].as_data() | {"rounds": [one.as_data() for one in rounds[name]]} for name in rounds
    }
    noting = f"{medians[PUT].noting:.0f} us of a put, {medians[ENTRIES].noting:.0f} us of a freeze"
    section.notes.append(f"The stopwatch itself took {noting}; that is taken off.")
    return section


def _median_round(spent: Sequence[Spent]) -> Spent:
    """The round whose whole is the median: medians of the parts would not add up."""
    whole = median_low(one.whole for one in spent)
    return next(one for one in spent if one.whole == whole)


def _grid(title: str, parts: Sequence[str], spent: dict[str, Spent]) -> Grid:
    """Microseconds and shares of each way, the server below the sum of the parts."""

    def row(name: str, microseconds: Iterable[float]) -> tuple[str, ...]:
        cells = [name]
        for us, one in zip(microseconds, spent.values(), strict=True):
            cells += [f"{us:.1f}", f"{us / one.whole:.1%}"]
        return tuple(cells)

    rows = [row(part, (one.parts[part] for one in spent.values())) for part in parts]
    rows += [
        row("the whole", (one.whole for one in spent.values())),
        row(SERVER, (one.server for one in spent.values())),
        row("overlapping, at least", (one.overlap for one in spent.values())),
    ]
    columns = (column for name in spent for column in (name.removeprefix("freeze "), "share"))
    return Grid(title, ("us", *columns), rows)
