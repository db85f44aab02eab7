"""What the demo prints: progress, tables and the last line, on a terminal or into a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gym_capture_redis.cli.demo_reading import ReadingTotals
from gym_capture_redis.cli.demo_serving import ServingTotals

MAX_PROBLEMS_SHOWN = 20
MIN_FILE_WIDTH = 110
"""Columns of a report that goes to no terminal: its longest rows fit."""


def report_console() -> Console:
    """A console for stdout; wide enough for the tables where there is no terminal to measure."""
    console = Console(highlight=False)
    if not console.is_terminal and console.width < MIN_FILE_WIDTH:
        console.width = MIN_FILE_WIDTH
    return console


@contextlib.contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar with ``total`` steps on a terminal, one line elsewhere. Yields what advances it."""
    if not console.is_terminal:
        console.print(f"{what}: {total:,}")
        yield lambda: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def print_report(
    console: Console, serving: ServingTotals, reading: ReadingTotals, *, log: list[str], kept: bool
) -> None:
    """Print the tables, and at the end in plain words whether all is as it must be."""
    console.print()
    console.print(_incomplete_table(reading))
    console.print()
    console.print(_result_table(serving, reading, kept=kept))
    console.print()
    if reading.problems:
        _print_problems(console, reading.problems, log)
    else:
        _print_all_well(console, reading, log)


def _incomplete_table(reading: ReadingTotals) -> Table:
    table = Table(title="Incomplete attempts", title_justify="left")
    table.add_column("attempt", no_wrap=True)
    table.add_column("what was done to it")
    table.add_column("call", no_wrap=True)
    table.add_column("reason found at freeze")
    for attempt in reading.incomplete:
        calls = "\n".join(reason.model_call_id for reason in attempt.reasons)
        reasons = "\n".join(f"{reason.code}: {reason.detail}" for reason in attempt.reasons)
        table.add_row(attempt.rollout_id, escape(attempt.fault), escape(calls), escape(reasons))
    return table


def _result_table(serving: ServingTotals, reading: ReadingTotals, *, kept: bool) -> Table:
    table = Table(title="Result", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    retired = f"{reading.dropped} dropped after use, {reading.retired} retired as incomplete"
    ratio = reading.json_bytes / max(reading.stored_bytes, 1)
    rows = {
        "complete": f"{reading.complete} attempts",
        "incomplete": f"{len(reading.incomplete)} attempts",
        "retired": "none, they are kept" if kept else f"{reading.dropped + reading.retired}: {retired}",
        "captured": _rate(serving),
        "read back": _rate(reading),
        "stored": f"{_mib(reading.stored_bytes)} in Redis",
        "as Gym's JSON": f"{_mib(reading.json_bytes)} for the same entries, {ratio:.1f} times as much",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _rate(part: ServingTotals | ReadingTotals) -> str:
    seconds = max(part.seconds, 1e-9)
    return (
        f"{part.calls:,} calls, {part.tokens:,} tokens in {part.seconds:.1f} s: "
        f"{part.calls / seconds:,.0f} calls/s, {part.tokens / seconds:,.0f} tokens/s"
    )


def _print_all_well(console: Console, reading: ReadingTotals, log: list[str]) -> None:
    if log:
        console.print(f"The workers logged {len(log)} warnings about the calls that were made to fail.")
    console.print(
        f"[green]All is as it must be:[/] {reading.calls:,} entries equal what was served in every field, "
        f"every whole attempt is complete ({reading.complete}), and no damaged one looks so "
        f"({len(reading.incomplete)})."
    )


def _print_problems(console: Console, problems: list[str], log: list[str]) -> None:
    hidden = len(problems) - MAX_PROBLEMS_SHOWN
    for line in [*problems[:MAX_PROBLEMS_SHOWN], *([f"… and {hidden} more"] if hidden > 0 else [])]:
        console.print(f"  {escape(line)}")
    for line in log[-MAX_PROBLEMS_SHOWN:]:
        console.print(f"  worker log: {escape(line)}")
    console.print(f"[red]Not as it must be:[/] {len(problems)} differences, named above.")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
