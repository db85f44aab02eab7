"""How long a put takes when nothing else is under way, one call at a time, and what of it is ours.

What the goal compares takes turns at each call: a put, the packing of its ids, a bare HSET. So each meets the
processor as another left it, in the same moment; the caches of a core and its speed are worth more than the
difference that is looked for. The other contenders, and bare HSETs again, do all calls in a row.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from gym_capture_redis.cli.bench import floors
from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.goals import Figure
from gym_capture_redis.cli.bench.peers import bare_redis
from gym_capture_redis.cli.bench.peers.lineup import line_up
from gym_capture_redis.cli.bench.peers.ours import NAME as OURS
from gym_capture_redis.cli.bench.peers.peer import Peer
from gym_capture_redis.cli.bench.rounds import percentile, rotated
from gym_capture_redis.cli.bench.section import Grid, Section
from gym_capture_redis.cli.bench.workload import Rollout

NAME = "latency"
MAX_CALLS = 200
"""Enough for a distribution; one at a time is slow."""
MICROSECONDS = 1e6
SHARES = (0.5, 0.9, 0.99)
_PACKING = "packing"
IN_A_ROW = f"{bare_redis.NAME}, in a row"
TURNS_NOTE = (
    f"{OURS} and {bare_redis.NAME} take turns at each call, in random order, with packing its ids: neither "
    "has the processor's caches to itself. The others do all calls in a row."
)


async def measure(bench: Bench) -> Section:
    """Time every single put of every contender."""
    rollouts = _some(bench.workload.rollouts)
    seconds: dict[str, list[list[float]]] = {}
    async with line_up(bench) as lineup:
        others = {peer.name: peer for peer in lineup.peers}
        ours, bare = others.pop(OURS), others.pop(bare_redis.NAME)
        groups = [[ours, bare], [bare], *([peer] for peer in others.values())]
        rounds = bench.options.rounds
        with bench.progress(f"Latency, {rounds} rounds", rounds * len(groups)) as advance:
            for number in range(rounds):
                for group in rotated(groups, number):
                    for name, puts in (await _by_turns(group, rollouts, seed=number)).items():
                        seconds.setdefault(name, []).append(puts)
                    advance()
    packing = [median(one) for one in seconds.pop(_PACKING)]
    section = Section(NAME, grids=[_grid(seconds)], notes=[TURNS_NOTE])
    section.figures["latency"] = _added(seconds, packing)
    section.data = {
        "put_us": {name: [_microseconds(one) for one in rounds] for name, rounds in seconds.items()},
        "packing_us": _microseconds(packing),
    }
    return section


def _some(rollouts: list[Rollout]) -> list[Rollout]:
    """The first rollouts, up to about ``MAX_CALLS`` calls."""
    some: list[Rollout] = []
    for rollout in rollouts:
        if some and sum(map(len, some)) + len(rollout) > MAX_CALLS:
            break
        some.append(rollout)
    return some


async def _by_turns(peers: Sequence[Peer], rollouts: list[Rollout], *, seed: int) -> dict[str, list[float]]:
    """Seconds of each put, by contender; of several, also of packing each call's ids."""
    order = random.Random(seed)  # noqa: S311 - nothing to guess
    turns = [(_PACKING, _pack)] + [(peer.name, peer.put) for peer in peers]
    if len(peers) == 1:
        turns = [(IN_A_ROW if peers[0].name == bare_redis.NAME else peers[0].name, peers[0].put)]
    taken: dict[str, list[float]] = {name: [] for name, _ in turns}
    try:
        for peer in peers:
            await peer.prepare(rollouts)
        for rollout in rollouts:
            for entry in rollout:
                order.shuffle(turns)
                for name, put in turns:
                    begin = time.perf_counter()
                    await put(entry)
                    taken[name].append(time.perf_counter() - begin)
    finally:
        for peer in peers:
            await peer.clear()
    return taken


async def _pack(entry: Any) -> None:
    floors.pack(entry)


def _added(seconds: dict[str, list[list[float]]], packing: list[float]) -> Figure:
    """(Median put - its packing) / median bare HSET of the stored bytes, in each round."""
    ours, bare = seconds[OURS], seconds[bare_redis.NAME]
    rounds = tuple(
        (median(puts) - packed) / median(plain)
        for puts, plain, packed in zip(ours, bare, packing, strict=True)
    )
    detail = (
        f"({_written(median(map(median, ours)))} - {_written(median(packing))} packing) "
        f"against {_written(median(map(median, bare)))} "
        f"({_written(median(map(median, seconds[IN_A_ROW])))} in a row)"
    )
    return Figure(median(rounds), detail, rounds)


def _grid(seconds: dict[str, list[list[float]]]) -> Grid:
    rows = []
    for name, rounds in seconds.items():
        everything = [value for one in rounds for value in one]
        rows.append((name, *(_written(percentile(everything, share)) for share in SHARES)))
    return Grid("Latency of a put, one call at a time", ("", *(f"{share:.0%}" for share in SHARES)), rows)


def _written(seconds: float) -> str:
    return f"{seconds * 1000:,.2f} ms"


def _microseconds(seconds: list[float]) -> list[float]:
    return [round(value * MICROSECONDS, 1) for value in seconds]
