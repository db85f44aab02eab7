"""The result as one JSON document, for whoever compares runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gym_capture_redis.cli.bench.goals import Figure, Goal, NotMeasured, Verdict
from gym_capture_redis.cli.bench.section import Section

FORMAT = 1
"""Raised when a reader of the document would have to change."""
DIGITS = 6


def as_document(
    *,
    machine: Mapping[str, str],
    run: Mapping[str, Any],
    rows: Sequence[tuple[Goal, Figure | NotMeasured, Verdict]],
    sections: Sequence[Section],
) -> dict[str, Any]:
    """Everything that was found: facts, goals with their verdicts, and the data of each section."""
    return {
        "format": FORMAT,
        "machine": dict(machine),
        "run": dict(run),
        "goals": [_row(goal, found, verdict) for goal, found, verdict in rows],
        "sections": {
            section.name: {"data": _rounded(section.data), "notes": section.notes} for section in sections
        },
    }


def _row(goal: Goal, found: Figure | NotMeasured, verdict: Verdict) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": goal.key,
        "what": goal.what,
        "compared_with": goal.compared_with,
        "at_least": goal.at_least,
        "aim": goal.aim,
        "better": goal.better.value,
        "verdict": verdict.value,
    }
    if isinstance(found, NotMeasured):
        return row | {"value": None, "reason": found.reason}
    value, rounds = _rounded(found.value), _rounded(found.rounds)
    return row | {"value": value, "detail": found.detail, "rounds": rounds}


def _rounded(value: Any) -> Any:
    """Floats with as many digits as mean something."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
