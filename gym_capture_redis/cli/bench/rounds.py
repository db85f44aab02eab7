"""Repetitions: whose turn it is, and what the figures of all rounds come to. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TypeVar

from gym_capture_redis.cli.bench.goals import Figure

T = TypeVar("T")

_WHOLE_FROM = 100
"""Three digits are enough."""


def rotated(contenders: Sequence[T], round_number: int) -> list[T]:
    """All of them, beginning with another one each round: nobody always follows the same neighbour."""
    start = round_number % len(contenders) if contenders else 0
    return [*contenders[start:], *contenders[:start]]


def ratio(ours: Sequence[float], theirs: Sequence[float], *, unit: str) -> Figure:
    """Ours ÷ theirs: the median of the ratios of each round, since both move from round to round."""
    rounds = tuple(mine / other for mine, other in zip(ours, theirs, strict=True))
    detail = f"{_written(statistics.median(ours))} against {_written(statistics.median(theirs))} {unit}"
    return Figure(statistics.median(rounds), detail, rounds)


def _written(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE_FROM else f"{value:.3g}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def growth_exponent(sizes: Sequence[float]) -> float:
    """How a size grows over its second half: 1 where it is linear in the turns, 2 where quadratic."""
    half = len(sizes) // 2
    return math.log(sizes[-1] / sizes[half - 1]) / math.log(len(sizes) / half)
