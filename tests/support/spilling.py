"""Workers that mark while their server is away, and workers that make what others have spilled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.spill import SpillDirectory

TESTS = Path(__file__).parents[1]
PATIENCE_S = 60.0
AWAY_S = 0.3
"""Deadline of a call whose server is away."""


def spilled(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.marks"))


def is_locked(directory: Path) -> bool:
    return any(directory.glob("*.lock"))


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if happened():
                return
            await asyncio.sleep(0.005)


async def until_none_is_spilled(directory: Path) -> None:
    """Until the marks are made, and whoever made them has let the lock go."""
    await until(lambda: not spilled(directory) and not is_locked(directory))


async def spill(url: str, directory: Path, *rollouts: str, call: str = "lost", **settings: Any) -> None:
    """Mark the rollouts as a worker does that meets no server and ends."""
    async with RedisTokenSink(url, spill_dir=directory, timeout_s=AWAY_S, **settings) as sink:
        await asyncio.gather(*(sink.mark_incomplete(rollout, call) for rollout in rollouts))


async def replay(url: str, directory: Path, **settings: Any) -> None:
    """Do what any worker does that names the directory, until nothing is left there."""
    async with RedisTokenSink(url, spill_dir=directory, timeout_s=PATIENCE_S, **settings) as sink:
        await sink.begin_call("another-rollout", "call")
        await until_none_is_spilled(directory)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def spill_and_die(url: str, directory: Path, *rollouts: str) -> None:
    """Be killed as soon as the marks are spilled."""

    async def main() -> None:
        sink = RedisTokenSink(url, spill_dir=directory, timeout_s=AWAY_S, namespace="run")
        await asyncio.gather(*(sink.mark_incomplete(rollout, "lost") for rollout in rollouts))
        die()

    asyncio.run(main())


def replay_and_die(url: str, directory: Path) -> None:
    """Be killed when the marks are made, and before they are taken out of their file."""
    SpillDirectory.settle = die  # type: ignore[method-assign,assignment]
    asyncio.run(replay(url, directory, namespace="run"))


def replay_in_time(url: str, directory: Path) -> None:
    """Wait for the start, then replay."""
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(replay(url, directory, namespace="run"))


def spill_from_a_forked_child(url: str, directory: Path) -> None:
    """Spill, fork, and spill again in parent and child at once, with the same sink."""
    sink = RedisTokenSink(url, spill_dir=directory, timeout_s=AWAY_S, namespace="run")

    async def mark(who: str) -> None:
        await asyncio.gather(*(sink.mark_incomplete(f"{who}.{number}", "lost") for number in range(20)))
        await sink.close()

    asyncio.run(mark("before"))
    child = os.fork()
    asyncio.run(mark("parent" if child else "child"))
    if not child:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("child exit", os.waitstatus_to_exitcode(status), flush=True)


def start(function: Any, url: str, directory: Path, *more: str) -> subprocess.Popen[str]:
    """Run one of these functions in a process of its own."""
    return subprocess.Popen(
        # Python 3.12 and newer warn of any fork with threads about; that one works is what a test shows.
        [
            *(sys.executable, "-W", "ignore:This process:DeprecationWarning", "-m", "support.spilling"),
            *(function.__name__, url, str(directory), *more),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    name, url, directory, *more = sys.argv[1:]
    globals()[name](url, Path(directory), *more)
