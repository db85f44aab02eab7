"""What the benchmark prints: the tables of each section, and at the end every goal with its verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from gym_capture_redis.cli.bench.goals import Better, Figure, Goal, NotMeasured, Verdict
from gym_capture_redis.cli.bench.section import Grid, Section

_STYLES = {
    Verdict.AIM: "green",
    Verdict.AT_LEAST: "yellow",
    Verdict.SHORT: "bold red",
    Verdict.NOT_MEASURED: "dim",
}

Rows = Sequence[tuple[Goal, Figure | NotMeasured, Verdict]]


def print_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Print what was measured on what."""
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, fact in facts.items():
        table.add_row(name, escape(fact))
    console.print(table)
    console.print()


def print_section(console: Console, section: Section) -> None:
    """Print the tables and remarks of one section."""
    for grid in section.grids:
        console.print(grid.title, style="bold")
        console.print(_table(grid))
    for note in section.notes:
        console.print(_indented(note, style="dim"))
    console.print()


def print_goals(console: Console, rows: Rows) -> None:
    """Print each goal with its figure and verdict, then in words what falls short of an aim."""
    if not rows:
        return
    table = Table()
    for column in ("what", "against"):
        table.add_column(column)
    for column in ("measured", "at least", "aim"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for goal, found, verdict in rows:
        measured = "-" if isinstance(found, NotMeasured) else goal.write(found.value)
        table.add_row(
            goal.what,
            goal.compared_with,
            measured,
            _bound(goal, goal.at_least),
            _bound(goal, goal.aim),
            f"[{_STYLES[verdict]}]{verdict.value}[/]",
        )
    console.print("Goals", style="bold")
    console.print(table)
    for line in _below_aim(rows):
        console.print(_indented(line))
    console.print(_summary(verdict for _, _, verdict in rows))


def _bound(goal: Goal, bound: float | None) -> str:
    if bound is None:
        return "-"
    return f"{'>=' if goal.better is Better.HIGHER else '<='} {goal.write(bound)}"


def _below_aim(rows: Rows) -> Iterable[str]:
    missing: dict[str, list[str]] = {}
    for goal, found, verdict in rows:
        name = f"{goal.what} / {goal.compared_with}" if goal.compared_with else goal.what
        if isinstance(found, NotMeasured):
            missing.setdefault(found.reason, []).append(name)
        elif verdict is not Verdict.AIM:
            said = "SHORT" if verdict is Verdict.SHORT else "below the aim"
            yield f"{name}: {said}: {found.detail}"
    for reason, names in missing.items():
        yield f"not measured, {reason}: {', '.join(names)}"


def _indented(text: str, style: str = "") -> Padding:
    return Padding(escape(text), (0, 0, 0, 2), style=style, expand=False)


def _summary(verdicts: Iterable[Verdict]) -> str:
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict) + "."


def _table(grid: Grid) -> Table:
    table = Table(show_header=any(grid.columns))
    words = {index for row in grid.rows for index, cell in enumerate(row) if not any(map(str.isdigit, cell))}
    for index, column in enumerate(grid.columns):
        table.add_column(column, justify="left" if index == 0 or index in words else "right")
    for row in grid.rows:
        table.add_row(*map(escape, row))
    return table
