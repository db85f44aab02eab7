"""How long a put takes when nothing else is under way, one call at a time, and what of it is ours."""

from __future__ import annotations

import time
from statistics import median

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


async def measure(bench: Bench) -> Section:
    """Time every single put of every contender."""
    rollouts = _some(bench.workload.rollouts)
    seconds: dict[str, list[list[float]]] = {}
    packing: list[float] = []
    async with line_up(bench) as lineup:
        rounds = bench.options.rounds
        with bench.progress(f"Latency, {rounds} rounds", rounds * len(lineup.peers)) as advance:
            for number in range(rounds):
                for peer in rotated(lineup.peers, number):
                    seconds.setdefault(peer.name, []).append(await _each_put(peer, rollouts))
                    advance()
                packing.append(median(_each_packing(rollouts)))
    section = Section(NAME, grids=[_grid(seconds)])
    section.figures["latency"] = _added(seconds[OURS], seconds[bare_redis.NAME], packing)
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


async def _each_put(peer: Peer, rollouts: list[Rollout]) -> list[float]:
    taken: list[float] = []
    try:
        await peer.prepare(rollouts)
        for rollout in rollouts:
            for entry in rollout:
                begin = time.perf_counter()
                await peer.put(entry)
                taken.append(time.perf_counter() - begin)
    finally:
        await peer.clear()
    return taken


def _each_packing(rollouts: list[Rollout]) -> list[float]:
    taken: list[float] = []
    for rollout in rollouts:
        for entry in rollout:
            begin = time.perf_counter()
            floors.pack(entry)
            taken.append(time.perf_counter() - begin)
    return taken


def _added(ours: list[list[float]], bare: list[list[float]], packing: list[float]) -> Figure:
    """(Median put - its packing) / median bare HSET of the stored bytes, in each round."""
    rounds = tuple(
        (median(puts) - packed) / median(plain)
        for puts, plain, packed in zip(ours, bare, packing, strict=True)
    )
    detail = (
        f"({_written(median(map(median, ours)))} - {_written(median(packing))} packing) "
        f"against {_written(median(map(median, bare)))}"
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
