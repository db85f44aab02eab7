"""What it costs to find the call that a request goes on from, as the turns of a rollout add up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

from gym_capture_redis import gym_compat
from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.goals import NotMeasured
from gym_capture_redis.cli.bench.peers import file_store
from gym_capture_redis.cli.bench.peers.file_store import FileStore
from gym_capture_redis.cli.bench.peers.ours import NAME as OURS
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.rounds import ratio
from gym_capture_redis.cli.bench.section import Grid, Section
from gym_capture_redis.cli.bench.shape import Shape
from gym_capture_redis.cli.bench.workload import Rollout
from gym_capture_redis.scripts import Call, Reply
from gym_capture_redis.subject import Subject

NAME = "lineage"
TURNS = 91
SHAPE = Shape(rollouts=1, calls=TURNS, first_prompt=2_000, growth=300, generated=200)
SHOWN_TURNS = (10, 30, 60, 91)
KIB = 1024

_NOTE = (
    "first seen: the last turn, by a worker that meets the rollout then. Reading: the hooks of each store. "
    "Gym's own: all else, the same code for both: hashing the request, making and hashing a list of all ids, "
    "more with every turn; and a change of threads."
)
_HOOKS = ("_fetch_new_entries", "_load_entries")
"""What Gym calls of a store. All else is its own."""

Items = list[dict[str, Any]]


class NoParentError(Exception):
    """A store did not find the call that a request goes on from."""


class Resolved(NamedTuple):
    """What it took to find the call of one turn."""

    seconds: float
    reading_s: float
    round_trips: int
    received_bytes: int


class Round(NamedTuple):
    """Every turn, right after its put; and the last one by a worker that meets the rollout then."""

    turns: list[Resolved]
    cold: Resolved


async def measure(bench: Bench) -> Section:
    """Put the calls of one rollout, and find each as the one that the next request goes on from."""
    lacks = file_store.missing()
    if lacks:
        why = f"it needs {lacks}"
        figure = NotMeasured(why)
        return Section(NAME, figures={"lineage": figure}, notes=[f"Lineage stores are left out: {why}"])
    rollout = SHAPE.rollout(0)
    requests = _stamped(rollout)
    found: dict[str, list[Round]] = {OURS: [], file_store.NAME: []}
    rounds = bench.options.rounds
    with bench.progress(f"Lineage, one rollout of {TURNS} turns, {rounds} rounds", 2 * rounds) as advance:
        for _ in range(rounds):
            for peer in (bench.ours(), FileStore(bench.directory)):
                found[peer.name].append(await _round(peer, rollout, requests))
                advance()
    section = Section(NAME, grids=[_grid(found)])
    theirs, ours = (
        [1000 * sum(turn.seconds for turn in one.turns) / TURNS for one in found[name]]
        for name in (file_store.NAME, OURS)
    )
    section.figures["lineage"] = ratio(theirs, ours, unit="ms a turn")
    section.data = {"shape": str(SHAPE), "found": {name: _plain(of) for name, of in found.items()}}
    section.notes = [_NOTE]
    return section


async def _round(peer: OurTransport | FileStore, rollout: Rollout, requests: list[Items]) -> Round:
    try:
        await peer.prepare([rollout])
        store, newcomer = _Store(peer.lineage_store()), _Store(peer.lineage_store())
        try:
            for each in (store, newcomer):
                await each.store.resolve("another", requests[0])  # so that its connection is there
            turns = []
            for entry, request in zip(rollout, requests, strict=True):
                await peer.put(entry)
                turns.append(await store.resolve(entry, request))
            return Round(turns, await newcomer.resolve(rollout[-1], requests[-1]))
        finally:
            await store.store.close()
            await newcomer.store.close()
    finally:
        await peer.clear()


class _Store:
    """A lineage store whose reading is timed and, if it is ours, counted."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._reading_s = 0.0
        for hook in _HOOKS:
            setattr(store, hook, self._timed(getattr(store, hook)))
        self._replies: list[Reply] = []
        client = getattr(store, "_client", None)
        if client is not None:
            self._run, client.run = client.run, self._counted

    async def resolve(self, entry: Any, request: Items) -> Resolved:
        """Find the call that the request goes on from, which must be that of the entry."""
        self._replies.clear()
        self._reading_s = 0.0
        begin = time.perf_counter()
        resolution = await self.store.resolve(entry.rollout_id, request)
        seconds = time.perf_counter() - begin
        if resolution.match is None or resolution.match.model_call_id != entry.model_call_id:
            raise NoParentError(f"{self.store!r} did not find {entry.model_call_id} of {entry.rollout_id}")
        received = sum(_nbytes(reply.rest) for reply in self._replies)
        return Resolved(seconds, self._reading_s, len(self._replies), received)

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return hook(*args)
            finally:
                self._reading_s += time.perf_counter() - begin

        return timed

    def _counted(self, call: Call, subject: Subject, *, deadline: float) -> Reply:
        reply: Reply = self._run(call, subject, deadline=deadline)
        self._replies.append(reply)
        return reply


def _stamped(rollout: Rollout) -> list[Items]:
    """Stamp each entry as the capture does; the request that goes on from each."""
    stamp: Any = gym_compat.required_attribute("lineage", "stamp_continuation")
    request: Items = [{"role": "user", "content": "the task"}]
    requests = []
    for number, entry in enumerate(rollout):
        stamp(entry, list(request))
        request = [
            *request,
            *entry.output_items,
            {"role": "user", "content": f"what the tool said, {number}"},
        ]
        requests.append(request)
    return requests


def _nbytes(reply: Any) -> int:
    if isinstance(reply, list | tuple):
        return sum(map(_nbytes, reply))
    return len(reply) if isinstance(reply, bytes) else 0


def _grid(found: dict[str, list[Round]]) -> Grid:
    rows = []
    for name, rounds in found.items():
        shown = [[one.turns[turn - 1] for one in rounds] for turn in SHOWN_TURNS]
        shown.append([one.cold for one in rounds])
        rows += [
            (f"{name}, ms", *(_ms(one.seconds for one in of) for of in shown)),
            ("  reading", *(_ms(one.reading_s for one in of) for of in shown)),
            ("  Gym's own", *(_ms(one.seconds - one.reading_s for one in of) for of in shown)),
        ]
        if name == OURS:
            rows.append(("  round trips", *(f"{max(one.round_trips for one in of)}" for of in shown)))
            kib = (max(one.received_bytes for one in of) / KIB for of in shown)
            rows.append(("  received, KiB", *(f"{each:,.1f}" for each in kib)))
    columns = ("", *(f"turn {turn}" for turn in SHOWN_TURNS), "first seen")
    return Grid("Finding the call that a request goes on from", columns, rows)


def _ms(seconds: Iterable[float]) -> str:
    return f"{1000 * median(seconds):.2f}"


def _plain(rounds: list[Round]) -> dict[str, Any]:
    return {
        "resolve_ms": [[1000 * turn.seconds for turn in one.turns] for one in rounds],
        "reading_ms": [[1000 * turn.reading_s for turn in one.turns] for one in rounds],
        "cold_ms": [1000 * one.cold.seconds for one in rounds],
        "round_trips": [[turn.round_trips for turn in one.turns] for one in rounds],
        "received_bytes": [[turn.received_bytes for turn in one.turns] for one in rounds],
        "cold_received_bytes": [one.cold.received_bytes for one in rounds],
    }
