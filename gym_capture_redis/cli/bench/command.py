"""The ``bench`` subcommand: its options, and what its exit codes mean."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError
from rich.console import Console

from gym_capture_redis.cli import INTERRUPTED
from gym_capture_redis.cli.bench.context import Options
from gym_capture_redis.cli.bench.drive import LostCallError
from gym_capture_redis.cli.bench.peers.ours import IncompleteError
from gym_capture_redis.cli.bench.run import SECTIONS, STDOUT, Output, run
from gym_capture_redis.cli.bench.server_benchmark import ServerBenchmarkError
from gym_capture_redis.cli.bench.shape import Shape, ShapeError, parse_experts
from gym_capture_redis.cli.bench.worker_crew import CrewError
from gym_capture_redis.cli.bench.workload import Recipe, Recorded
from gym_capture_redis.cli.report import report_console
from gym_capture_redis.errors import CaptureError

FAILED = 1
UNUSABLE = 2

ROUNDS, QUICK_ROUNDS = 5, 2
ROLLOUTS, QUICK_ROLLOUTS = 64, 16
WORKERS, QUICK_WORKERS = "1,2,4,8", "1,2"
MAX_WORKERS = 64
SHAPE = "Shape of the calls (instead of recorded ones)"
OUTPUT = "Output"


def bench(
    url: Annotated[
        str | None,
        typer.Option(
            help="Server to measure, as in redis://host:6379/0. Without it, private ones are started in a "
            "temporary directory and removed at the end.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Repetitions, whose medians count.  [default: {ROUNDS}]", show_default=False
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(help=f"Numbers of worker processes.  [default: {WORKERS}]", show_default=False),
    ] = None,
    rollouts: Annotated[
        int | None,
        typer.Option(min=1, help=f"Rollouts, up to 64 in flight.  [default: {ROLLOUTS}]", show_default=False),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help=f"Sections to measure: {', '.join(SECTIONS)}.", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A fast look: fewer rounds, rollouts and workers.")
    ] = False,
    calls: Annotated[
        int | None, typer.Option(min=1, help="Calls of a rollout.", show_default=False, rich_help_panel=SHAPE)
    ] = None,
    first_prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Ids of the first prompt.", show_default=False, rich_help_panel=SHAPE),
    ] = None,
    growth: Annotated[
        int | None,
        typer.Option(min=0, help="New ids of each later prompt.", show_default=False, rich_help_panel=SHAPE),
    ] = None,
    generated: Annotated[
        int | None,
        typer.Option(min=1, help="Generated ids of a call.", show_default=False, rich_help_panel=SHAPE),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            help="Routed experts of each id, LAYERSxTOPK, as in 48x8.",
            show_default=False,
            rich_help_panel=SHAPE,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write everything that was found, of every round, into this file ('-': stdout).",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw into this directory: calls/s against workers, latencies, bytes against turns, where "
            "the time goes. Needs the extra 'plot'.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Measure puts and freezes beside Gym's file store, bare redis-py and other peers, in one run.

    Recorded model calls (or calls of a shape that you describe) go through this package and through every
    peer that is installed here: in turns, in each round, so that ratios hold where absolute figures do not.
    Each contender is named with the durability it gives. At the end every goal of this project is listed
    with the figure measured here; what falls short is listed too.

    Peers: Gym's file store (nemo-gym), bare redis-py, redis-benchmark or valkey-benchmark, Ray Queue (ray),
    TransferQueue (ray, torch, TransferQueue). Everything written to the server is deleted at the end.

    Exits with 0 whatever the figures are, with 1 if a contender lost a call or failed, with 2 if the server
    or an option cannot be used.

    Examples: `bench --quick`, `bench --url redis://10.0.0.5:6379/0 --only throughput,latency`,
    `bench --calls 40 --first-prompt 2000 --growth 600 --generated 200 --plot pictures`
    """
    console = Console(stderr=True, highlight=False) if json_file == STDOUT else report_console()
    try:
        shape = {"calls": calls, "first_prompt": first_prompt, "growth": growth, "generated": generated}
        recipe = _recipe(rollouts or (QUICK_ROLLOUTS if quick else ROLLOUTS), shape, experts)
        options = Options(
            recipe=recipe,
            rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
            workers=_workers(workers or (QUICK_WORKERS if quick else WORKERS)),
            sections=_sections(only),
            quick=quick,
        )
        _make_sure_of(json_file, plot)
        run(console, url, options, Output(json_file, plot))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _fail("stopped; what was written is deleted", INTERRUPTED)
    except (CaptureError, ShapeError) as error:
        _fail(str(error), UNUSABLE)
    except (LostCallError, IncompleteError, CrewError, ServerBenchmarkError, RedisError) as error:
        _fail(f"{type(error).__name__}: {error}", FAILED)


def _make_sure_of(json_file: Path | None, plot: Path | None) -> None:
    """See that results can be written before minutes are spent on them; nothing of it is left."""
    file = None if json_file == STDOUT else json_file
    for path, try_writing in ((file, _try_file), (plot, _try_directory)):
        try:
            if path is not None:
                try_writing(path.absolute())
        except OSError as error:
            raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from None


def _try_file(file: Path) -> None:
    if file.is_fifo() or file.is_char_device():
        return  # whoever reads it would take this for all of it
    file = file.resolve()  # what is removed is no link
    is_new = not file.exists()
    file.open("ab").close()
    if is_new:
        file.unlink()


def _try_directory(directory: Path) -> None:
    there = next(place for place in (directory, *directory.parents) if place.exists())
    TemporaryFile(dir=there).close()


def _fail(message: str, code: int) -> None:
    typer.echo(f"gym-capture-redis bench: {message}", err=True)
    raise typer.Exit(code)


def _recipe(rollouts: int, shape: dict[str, int | None], experts: str | None) -> Recipe:
    described: dict[str, Any] = {name: value for name, value in shape.items() if value is not None}
    if experts is not None:
        described["experts"] = parse_experts(experts)
    return Shape(rollouts=rollouts, **described) if described else Recorded(rollouts)


def _workers(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and 1 <= int(number) <= MAX_WORKERS for number in numbers):
        raise typer.BadParameter(f"numbers from 1 to {MAX_WORKERS}, as in {WORKERS}", param_hint="--workers")
    return tuple(sorted(set(map(int, numbers))))


def _sections(text: str | None) -> tuple[str, ...]:
    """The sections that are named, in the order of a whole run."""
    named = {name.strip() for name in text.split(",")} if text is not None else set(SECTIONS)
    unknown = sorted(named - set(SECTIONS))
    if unknown:
        raise typer.BadParameter(
            f"{unknown[0]!r} is no section; there are {', '.join(SECTIONS)}", param_hint="--only"
        )
    return tuple(name for name in SECTIONS if name in named)
