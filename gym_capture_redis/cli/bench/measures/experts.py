"""The largest field: one call of a mixture-of-experts model, with the experts of each token."""

from __future__ import annotations

from typing import Any

import numpy as np

from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.drive import keep_from_collector, put_all, read_all
from gym_capture_redis.cli.bench.goals import Figure, NotMeasured
from gym_capture_redis.cli.bench.peers import file_store
from gym_capture_redis.cli.bench.peers.file_store import FileStore
from gym_capture_redis.cli.bench.peers.ours import NAME as OURS
from gym_capture_redis.cli.bench.peers.peer import Peer
from gym_capture_redis.cli.bench.rounds import ratio, rotated
from gym_capture_redis.cli.bench.section import Grid, Section
from gym_capture_redis.cli.bench.shape import EXPERTS, Shape
from gym_capture_redis.cli.bench.workload import Rollout

NAME = "experts"
LAYERS, TOP_K = 48, 8
GENERATED = 768
TOKENS, QUICK_TOKENS = 32_768, 2_048
ROUNDS_FACTOR = 3
STRING, LISTS = "string", "nested lists"


async def measure(bench: Bench) -> Section:
    """Put and freeze the call in both forms that Gym has for the field; the string form counts."""
    tokens = QUICK_TOKENS if bench.options.quick else TOKENS
    seconds: dict[str, dict[str, list[float]]] = {}
    peers: list[Peer] = [bench.ours()]
    lacks = file_store.missing()
    if not lacks:
        peers.append(FileStore(bench.directory))
    # One call is soon done, and pages that are new to a process or the page cache take as long: more rounds.
    # Nested lists are millions of objects and slow for everyone: one round tells enough.
    forms = [
        (STRING, _in_string_form(tokens), ROUNDS_FACTOR * bench.options.rounds),
        (LISTS, _in_list_form(tokens), 1),
    ]
    keep_from_collector()
    turns = sum(rounds for _, _, rounds in forms) * len(peers)
    with bench.progress(f"Routed experts, {tokens:,} tokens x {LAYERS} x {TOP_K}", turns) as advance:
        for form, rollout, rounds in forms:
            for number in range(rounds):
                for peer in rotated(peers, number):
                    taken = await _put_and_freeze(peer, rollout)
                    seconds.setdefault(form, {}).setdefault(peer.name, []).append(taken)
                    advance()
    section = Section(NAME, grids=[_grid(seconds, tokens)], data=dict(seconds))
    section.figures["experts_file_store"] = _figure(seconds[STRING], lacks)
    if tokens != TOKENS:
        section.notes.append(f"Routed experts were measured on {tokens:,} tokens, not on {TOKENS:,}.")
    return section


def _in_string_form(tokens: int) -> Rollout:
    shape = Shape(calls=1, first_prompt=tokens - GENERATED, generated=GENERATED, experts=(LAYERS, TOP_K))
    return shape.rollout(0)


def _in_list_form(tokens: int) -> Rollout:
    (entry,) = Shape(calls=1, first_prompt=tokens - GENERATED, generated=GENERATED).rollout(1)
    routes: Any = np.random.default_rng(0).integers(0, EXPERTS, (tokens, LAYERS, TOP_K), dtype="i1")
    entry.routed_experts = routes.tolist()
    return [entry]


async def _put_and_freeze(peer: Peer, rollout: Rollout) -> float:
    try:
        await peer.prepare([rollout])
        return await put_all(peer, [rollout]) + await read_all(peer, [rollout])
    finally:
        await peer.clear()


def _figure(seconds: dict[str, list[float]], lacks: str | None) -> Figure | NotMeasured:
    if lacks:
        return NotMeasured(f"{file_store.NAME} is left out: it needs {lacks}")
    theirs, ours = seconds[file_store.NAME], seconds[OURS]
    return ratio([1 / taken for taken in ours], [1 / taken for taken in theirs], unit="calls/s")


def _grid(seconds: dict[str, dict[str, list[float]]], tokens: int) -> Grid:
    rows = [
        (name, form, f"{sorted(taken)[len(taken) // 2]:,.2f} s")
        for form, by_name in seconds.items()
        for name, taken in by_name.items()
    ]
    title = f"One call of {tokens:,} tokens with routed experts, {LAYERS} x {TOP_K}"
    return Grid(title, ("", "form", "put + freeze"), rows)
