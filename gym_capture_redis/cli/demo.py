"""``gym-capture-redis demo``: real calls through real processes, faults included, and every field checked."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from gym_capture_redis import gym_compat
from gym_capture_redis.cli import INTERRUPTED
from gym_capture_redis.cli.demo_plan import MIN_ROLLOUTS, Plan
from gym_capture_redis.cli.demo_pool import DemoError, WorkerPool
from gym_capture_redis.cli.demo_reading import Reading
from gym_capture_redis.cli.demo_serving import Serving
from gym_capture_redis.cli.demo_worker import Target
from gym_capture_redis.cli.interrupts import cancelled_by_signals
from gym_capture_redis.cli.report import print_report, progress_bar, report_console
from gym_capture_redis.cli.served_calls import RecordedRollout, load_rollouts
from gym_capture_redis.cli.trial import trial_of
from gym_capture_redis.embedded import AppendFsync, EmbeddedServer
from gym_capture_redis.errors import CaptureError, ConfigurationError
from gym_capture_redis.server_url import ServerUrl
from gym_capture_redis.source import RedisTokenSource

DIFFERENT = 1
UNUSABLE = 2

CLEANING_S = 15.0
DELETE_BATCH = 256


class Durability(StrEnum):
    """The levels of the setting ``durability``."""

    MEMORY = "memory"
    AOF = "aof"
    FSYNC = "fsync"


@dataclass(frozen=True)
class DemoOptions:
    """What was asked for on the command line."""

    workers: int
    rollouts: int
    seed: int
    keep: bool


def demo(
    url: Annotated[
        str | None,
        typer.Option(
            help="Redis to use, as in redis://host:6379/0. Without it, a private server is started in a "
            "temporary directory and removed at the end.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=2, max=64, help="Processes that capture; one is killed.")] = 4,
    rollouts: Annotated[
        int, typer.Option(min=MIN_ROLLOUTS, max=10_000, help="Attempts at the 8 recorded rollouts.")
    ] = 64,
    namespace: Annotated[
        str | None, typer.Option(help="Namespace of the keys; a new one if not given.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draw the same faults again; drawn if not given.", show_default=False)
    ] = None,
    durability: Annotated[
        Durability, typer.Option(help="What an acknowledged record survives.")
    ] = Durability.AOF,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the frozen rollouts in Redis, to look at them.")
    ] = False,
) -> None:
    """Capture real agent calls from several processes, break some of them, and check every field.

    Worker processes replay recorded model calls and capture their token ids, the calls of one rollout spread
    over all workers. One worker is killed in the middle of its work, one response comes without token ids,
    one call is put twice and one twice with other content. Then the trainer freezes every attempt, compares
    each entry with what was served, and drops what is complete.

    Exits with 1 if any field differs, a damaged attempt looks complete or a whole one does not; with 2 if
    the server or an option cannot be used, or the namespace holds rollouts of an earlier run.
    """
    console = report_console()
    options = DemoOptions(workers, rollouts, random.randrange(10**6) if seed is None else seed, keep)  # noqa: S311
    try:
        with _server_for(url, durability, keep=keep) as address:
            target = Target(address, namespace or f"demo-{secrets.token_hex(4)}", durability.value)
            asyncio.run(_until_terminated(console, target, options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _fail("stopped; the workers are ended", INTERRUPTED)
    except DemoError as error:
        _fail(str(error), DIFFERENT)
    except CaptureError as error:
        _fail(str(error), UNUSABLE)


def _fail(message: str, code: int) -> None:
    _say(message)
    raise typer.Exit(code)


def _say(message: str) -> None:
    typer.echo(f"gym-capture-redis demo: {message}", err=True)


@contextlib.contextmanager
def _server_for(url: str | None, durability: Durability, *, keep: bool) -> Iterator[str]:
    """The URL that was given, else that of a private server which ends with the demo."""
    appendfsync: AppendFsync = "always" if durability is Durability.FSYNC else "everysec"
    if url is not None:
        address = ServerUrl.parse(url)
        if address.scheme == "fakeredis":
            raise ConfigurationError(
                "fakeredis lives in one process; the demo needs a server that several share"
            )
        with contextlib.ExitStack() as stack:
            if address.scheme == "embedded":  # it ends with its last user: here after trial and workers
                stack.enter_context(EmbeddedServer(address.path or None, appendfsync=appendfsync))
            yield url
        return
    directory = tempfile.mkdtemp(prefix="gymcap-demo-")
    try:
        with EmbeddedServer(directory, appendfsync=appendfsync):
            yield f"embedded://{directory}"
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


async def _until_terminated(console: Console, target: Target, options: DemoOptions) -> None:
    """Run the demo; Ctrl-C and SIGTERM end it in good order."""
    cancelled_by_signals(lambda: _say("stopping"))
    await _run(console, target, options)


async def _run(console: Console, target: Target, options: DemoOptions) -> None:
    recordings = load_rollouts()
    plan = Plan.draw(recordings, rollouts=options.rollouts, workers=options.workers, seed=options.seed)
    await _try_out(console, target, plan)
    _introduce(console, target, options)
    async with RedisTokenSource(
        target.url, namespace=target.namespace, durability=target.durability
    ) as source:
        try:
            right = await _serve_and_read(console, target, options, plan, recordings, source)
        finally:
            if not options.keep:
                await _delete_all(source, plan)
    if options.keep:
        console.print(
            f"Kept: RedisTokenSource({str(ServerUrl.parse(target.url))!r}, namespace={target.namespace!r})"
        )
    if not right:
        raise typer.Exit(DIFFERENT)


async def _serve_and_read(
    console: Console,
    target: Target,
    options: DemoOptions,
    plan: Plan,
    recordings: tuple[RecordedRollout, ...],
    source: RedisTokenSource,
) -> bool:
    """Both halves of the demo and the report; whether all is as it must be."""
    started_at = time.time()
    async with WorkerPool(options.workers, target) as pool:
        with progress_bar(console, "Serving calls", plan.call_count) as advance:
            serving = Serving(plan, pool, recordings, on_call=advance)
            await serving.run()
    console.print(
        f"Worker {plan.victim} was killed with {serving.totals.killed_with} announced calls in flight; "
        "the others took over."
    )
    console.print(
        f"A call of {plan.repeated.rollout_id} was put twice, the same both times: it must count once."
    )
    reading = Reading(source, recordings, started_at=started_at, keep=options.keep)
    with progress_bar(console, "Freezing and checking attempts", len(plan.attempts)) as advance:
        totals = await reading.run(serving.ledger, on_attempt=advance)
    print_report(console, serving.totals, totals, log=serving.log, kept=options.keep)
    return not totals.problems


async def _try_out(console: Console, target: Target, plan: Plan) -> None:
    """Fail early, and in one line, where the server or the namespace cannot be used. Touches no data."""
    async with trial_of(
        console, target.url, namespace=target.namespace, durability=target.durability
    ) as trial:
        await trial.write()
        if held := await trial.held_of(attempt.rollout_id for attempt in plan.attempts):
            raise ConfigurationError(
                f"namespace {target.namespace!r} holds rollouts of these names already, {held[0]} for one, "
                "of an earlier run that was kept or killed; choose another --namespace, or leave it out"
            )


def _introduce(console: Console, target: Target, options: DemoOptions) -> None:
    flow = "NeMo Gym's" if gym_compat.gym_package() else "this package's own (NeMo Gym is not installed)"
    console.print(f"Server {ServerUrl.parse(target.url)}, namespace {target.namespace}, {target.durability}")
    console.print(f"{options.workers} workers, {options.rollouts} attempts, --seed {options.seed}")
    console.print(f"Capture flow: {flow}")


async def _delete_all(source: RedisTokenSource, plan: Plan) -> None:
    """Remove what the demo wrote, tombstones included; a server that is gone keeps nobody waiting."""
    ids = [attempt.rollout_id for attempt in plan.attempts]
    try:
        async with asyncio.timeout(CLEANING_S):
            for start in range(0, len(ids), DELETE_BATCH):
                await source.delete(ids[start : start + DELETE_BATCH])
    except (CaptureError, TimeoutError):
        pass  # what is left expires, and what ended the demo is told by whoever raised it
