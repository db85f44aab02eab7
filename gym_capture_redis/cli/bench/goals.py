"""What this package set itself to reach, as data, and what a measured figure means against it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Better(StrEnum):
    """Which way a figure should go."""

    HIGHER = "higher"
    LOWER = "lower"


class Verdict(StrEnum):
    """What a figure means; the text is what the table says."""

    AIM = "aim met"
    AT_LEAST = "at least met"
    SHORT = "SHORT"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Goal:
    """One row: a figure, the least it must reach, and the aim where there is one."""

    key: str
    what: str
    compared_with: str
    at_least: float
    aim: float | None
    better: Better
    write: Callable[[float], str]


@dataclass(frozen=True)
class Figure:
    """What was measured: the median, what is behind it in words, and the value of every round."""

    value: float
    detail: str = ""
    rounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class NotMeasured:
    """Why there is no figure."""

    reason: str


def _times(value: float) -> str:
    return f"{value:.2f} x"


def _times_exactly(value: float) -> str:
    return f"{value:.3f} x"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _milliseconds(value: float) -> str:
    return f"{value:.1f} ms"


GOALS: tuple[Goal, ...] = (
    Goal("put_file_store", "put", "file store", 4, 8, Better.HIGHER, _times),
    Goal("put_packing", "put", "packing rate", 0.45, 0.75, Better.HIGHER, _percent),
    Goal("fsync_file_store", "put, each fsynced", "file store", 3, 6, Better.HIGHER, _times),
    Goal("fsync_packing", "put, each fsynced", "packing rate", 0.35, 0.60, Better.HIGHER, _percent),
    Goal("latency", "latency a put adds", "bare HSET", 2.5, 1.5, Better.LOWER, _times),
    Goal("workers", "many workers", "bare limit", 0.3, 0.5, Better.HIGHER, _times),
    Goal("server_cpu", "server CPU of a put", "plain HSET", 3, 2, Better.LOWER, _times),
    Goal("aof_bytes", "AOF bytes", "new information", 1.3, 1.15, Better.LOWER, _times_exactly),
    Goal("memory_bytes", "Redis memory", "new information", 1.3, 1.15, Better.LOWER, _times_exactly),
    Goal("freeze_file_store", "freeze to TokenEntry", "file store", 4, 8, Better.HIGHER, _times),
    Goal("freeze_slicing", "freeze to TokenEntry", "slicing rate", 0.25, 0.45, Better.HIGHER, _percent),
    Goal("arrays_file_store", "freeze to arrays", "file store", 20, 60, Better.HIGHER, _times),
    Goal("experts_file_store", "routed experts", "file store", 3, 6, Better.HIGHER, _times),
    Goal("lineage", "find a continued call", "file store", 1, 2, Better.HIGHER, _times),
    # The setting bounds what is in flight; a tenth more is for the frames of 1,000 callers that wait.
    Goal("client_memory", "client memory, stalled", "its setting", 1.1, None, Better.LOWER, _times),
    Goal("event_loop", "event loop pause", "", 50, 10, Better.LOWER, _milliseconds),
)


def judge(goal: Goal, found: Figure | NotMeasured) -> Verdict:
    """Hold a figure against its goal; meeting it exactly is meeting it."""
    if isinstance(found, NotMeasured):
        return Verdict.NOT_MEASURED
    sign = 1 if goal.better is Better.HIGHER else -1
    if sign * found.value < sign * goal.at_least:
        return Verdict.SHORT
    if goal.aim is None or sign * found.value >= sign * goal.aim:
        return Verdict.AIM
    return Verdict.AT_LEAST


def all_rows(
    figures: Mapping[str, Figure | NotMeasured], *, otherwise: str
) -> list[tuple[Goal, Figure | NotMeasured, Verdict]]:
    """Every goal in order with what was found; ``otherwise`` is the reason where there is nothing."""
    rows = []
    for goal in GOALS:
        found = figures.get(goal.key, NotMeasured(otherwise))
        rows.append((goal, found, judge(goal, found)))
    return rows
