"""``scripts/soak``: faults at random for as long as wanted, and a table of what was counted."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from soak.acts import Play
from soak.director import Director
from soak.stages import STAGES
from support.ledger import Kind, Ledger
from support.servers import BINARIES

SHOWN_VIOLATIONS = 20
TIMEOUT_S = 4.0
"""Of every call: shorter than the longest pause of a server."""


class UrlKind(StrEnum):
    """What the servers are."""

    STANDALONE = "standalone"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


class ServerKind(StrEnum):
    """Which server it is."""

    VALKEY9 = "valkey9"
    REDIS7 = "redis7"


class Level(StrEnum):
    """Which durability is promised."""

    MEMORY = "memory"
    AOF = "aof"
    FSYNC = "fsync"


def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long to go on.")] = 5.0,
    seed: Annotated[int | None, typer.Option(help="Of all choices; drawn if not given.")] = None,
    url_kind: Annotated[UrlKind, typer.Option(help="What the servers are.")] = UrlKind.STANDALONE,
    server: Annotated[ServerKind, typer.Option(help="Which server it is.")] = ServerKind.VALKEY9,
    durability: Annotated[Level, typer.Option(help="The level promised.")] = Level.AOF,
) -> None:
    """Hurt servers, networks, workers and trainers at random, and check that no law was broken.

    Workers write to new rollouts all the time, and a trainer freezes and drops them. The exit code is 1 if a
    rollout that lost something looked whole, or anything else was not as it must be.
    """
    seed = random.randrange(10**6) if seed is None else seed
    binary = BINARIES[server]()
    if binary is None:
        raise typer.BadParameter(f"{server}: its server was not found on this machine")
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    options = f"--minutes {minutes:g} --seed {seed} --url-kind {url_kind} --server {server}"
    options += f" --durability {durability}"
    typer.echo(f"scripts/soak {options}")
    typer.echo(f"everything is written down in {directory}")
    # Plain strings: enumerations of this module are not known to the processes that are started.
    director, broken = asyncio.run(_play(binary, directory, seed, minutes, str(url_kind), str(durability)))
    _print_table(director, len(broken))
    if broken:
        for text in broken[:SHOWN_VIOLATIONS]:
            typer.echo(f"VIOLATION {text}", err=True)
        typer.echo(
            f"\nin {directory}: ledger (all steps), faults.jsonl (same clock), log (of all processes)\n"
            f"again: scripts/soak {options}",
            err=True,
        )
        raise typer.Exit(1)


async def _play(
    binary: Path, directory: Path, seed: int, minutes: float, url_kind: str, durability: str
) -> tuple[Director, list[str]]:
    chance = random.Random(seed)
    ledger = Ledger(directory / "ledger")
    async with STAGES[url_kind](binary, durability, chance) as stage:
        began_s = time.monotonic()
        settings = {"namespace": f"soak-{seed}", "timeout_s": TIMEOUT_S, "durability": durability}
        play = Play(stage.url, ledger.path, seed, began_s, began_s + 60 * minutes, settings)
        director = Director(stage, play, chance, typer.echo)
        broken = await director.run()
    ledger.close()
    return director, broken


def _print_table(director: Director, broken: int) -> None:
    rows = {
        **dict(sorted(director.counts.items())),
        "acknowledged puts": director.acknowledged[Kind.RECORD],
        "acknowledged marks": director.acknowledged[Kind.MARK],
        "calls that failed": director.acknowledged[Kind.FAILED],
        "violations": broken,
    }
    table = Table("what", "count")
    table.columns[1].justify = "right"
    for what, count in rows.items():
        table.add_row(what, f"{count:,}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(soak)
