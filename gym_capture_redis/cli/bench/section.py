"""What a section of the benchmark found, in the one form that report, JSON and plots take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_capture_redis.cli.bench.goals import Figure, NotMeasured


@dataclass(frozen=True)
class Grid:
    """A table: the first column names what its row is about; cells are written out already."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass
class Section:
    """Tables to print, figures by the key of their goal, plain data for JSON and plots, remarks."""

    name: str
    grids: list[Grid] = field(default_factory=list)
    figures: dict[str, Figure | NotMeasured] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
