"""All subcommands in one typer app. Import it only where the ``cli`` extra is installed."""

from __future__ import annotations

from typing import Annotated

import typer

import gym_capture_redis
from gym_capture_redis.cli.bench.command import bench
from gym_capture_redis.cli.demo import demo

app = typer.Typer(
    name="gym-capture-redis",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    # A traceback with the values of variables would show passwords.
    pretty_exceptions_enable=False,
    help="""Training tokens of reinforcement learning rollouts, through Redis.

    Workers of an inference service write the token ids of every model call with **RedisTokenSink**; the
    trainer reads each rollout as one frozen snapshot with **RedisTokenSource**. A rollout that lost a call
    never looks complete.

    To see it work on this machine, without a Redis: **gym-capture-redis demo**
    """,
)
app.command()(demo)
app.command()(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gym-capture-redis {gym_capture_redis.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself; its help is the app's."""
