"""The ``gym-capture-redis`` command: one module per subcommand, put together in ``app.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable

INTERRUPTED = 130
INSTALL_HINT = "pip install 'gym-capture-redis[cli]'"


def main() -> None:
    """Run the command line; without the packages of the ``cli`` extra, say how to get them (exit code 2).

    Ctrl-C ends it quietly while what a command needs is still being imported (exit code 130).
    """
    try:
        _app()(prog_name="gym-capture-redis")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _app() -> Callable[..., None]:
    try:
        import rich
        import typer
    except ModuleNotFoundError as error:
        sys.stderr.write(f"gym-capture-redis: the command line needs {error.name}: {INSTALL_HINT}\n")
        raise SystemExit(2) from None
    del rich, typer
    from gym_capture_redis.cli.app import app

    return app
