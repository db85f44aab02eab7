"""One run from beginning to end: servers, records, sections, and what is shown of them."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from gym_capture_redis.cli.bench import plots
from gym_capture_redis.cli.bench.context import Bench, Options
from gym_capture_redis.cli.bench.document import as_document
from gym_capture_redis.cli.bench.drive import keep_from_collector
from gym_capture_redis.cli.bench.goals import all_rows
from gym_capture_redis.cli.bench.machine import MEMORY_FILESYSTEMS, machine_facts
from gym_capture_redis.cli.bench.measures import (
    client_memory,
    event_loop,
    experts,
    growth,
    latency,
    lineage,
    server_cost,
    throughput,
    time_spent,
    workers,
)
from gym_capture_redis.cli.bench.report import print_facts, print_goals, print_section
from gym_capture_redis.cli.bench.section import Section
from gym_capture_redis.cli.bench.servers import servers_for
from gym_capture_redis.cli.bench.workload import Workload
from gym_capture_redis.cli.interrupts import cancelled_by_signals

SECTIONS: dict[str, Callable[[Bench], Awaitable[Section]]] = {
    module.NAME: module.measure
    for module in (
        throughput,
        time_spent,
        latency,
        workers,
        server_cost,
        experts,
        client_memory,
        event_loop,
        growth,
        lineage,
    )
}

STDOUT = Path("-")


@dataclass(frozen=True)
class Output:
    """Where results go beside the terminal."""

    json_file: Path | None
    plot_directory: Path | None


def run(console: Console, url: str | None, options: Options, output: Output) -> None:
    """Measure and show everything that was asked for.

    Raises:
        CaptureError: the server or a setting cannot be used.
        LostCallError, IncompleteError, CrewError: a contender did not do what it is for.

    """
    if output.plot_directory is not None:
        plots.load_matplotlib()  # rather now than after the measuring
    mark = f"bench-{secrets.token_hex(6)}"
    directory = Path(tempfile.mkdtemp(prefix="gymcap-bench-"))
    try:
        with servers_for(console, url, directory, mark) as servers:
            facts = machine_facts(servers.main, directory)
            print_facts(console, facts)
            if facts["filesystem"] in MEMORY_FILESYSTEMS:
                console.print("The files are in memory here, where an fsync costs nothing.", style="bold")
            console.print(f"Workload: {options.recipe}")
            workload = Workload(options.recipe)
            keep_from_collector()
            console.print(
                f"{workload.calls:,} calls, {workload.tokens:,} ids; "
                f"{workload.new_information / workload.calls:,.0f} B of new information a call\n"
            )
            bench = Bench(options, console, servers, workload, directory, mark)
            sections = asyncio.run(_until_terminated(bench))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _show(console, bench, facts, sections, output)


async def _until_terminated(bench: Bench) -> list[Section]:
    """Measure; Ctrl-C and SIGTERM end it in good order."""
    cancelled_by_signals(lambda: typer.echo("gym-capture-redis bench: stopping", err=True))
    sections = []
    for name in bench.options.sections:
        sections.append(await SECTIONS[name](bench))
        print_section(bench.console, sections[-1])
    return sections


def _show(
    console: Console, bench: Bench, facts: dict[str, str], sections: list[Section], output: Output
) -> None:
    options = bench.options
    figures = {key: figure for section in sections for key, figure in section.figures.items()}
    rows = all_rows(figures, otherwise="its section was not asked for")
    print_goals(console, [row for row in rows if row[0].key in figures])
    if len(figures) < len(rows):
        console.print(f"{len(rows) - len(figures)} goals are of sections that were not asked for.")
    if options.quick:
        console.print("A quick look: with so few repetitions no figure here is worth quoting.")
    if output.plot_directory is not None:
        for file in plots.draw(sections, output.plot_directory):
            console.print(f"Drawn: {file}")
    if output.json_file is not None:
        described: dict[str, Any] = {
            "workload": str(options.recipe),
            "calls": bench.workload.calls,
            "tokens": bench.workload.tokens,
            "new_information_bytes": bench.workload.new_information,
            "rounds": options.rounds,
            "workers": list(options.workers),
            "quick": options.quick,
        }
        document = as_document(machine=facts, run=described, rows=rows, sections=sections)
        _write(json.dumps(document, indent=1), output.json_file)
        if output.json_file != STDOUT:
            console.print(f"Written: {output.json_file}")


def _write(text: str, file: Path) -> None:
    if file == STDOUT:
        print(text)  # noqa: T201 - asked for
    else:
        file.write_text(text + "\n", "utf-8")
