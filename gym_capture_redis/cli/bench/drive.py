"""How a contender is driven: rollouts at the same time, the calls of each one after another, as agents do."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from gym_capture_redis.cli.bench.peers.peer import Peer
from gym_capture_redis.cli.bench.workload import Rollout

IN_FLIGHT = 64
"""Rollouts that are worked on at the same time."""


class LostCallError(Exception):
    """A contender did not give back what it took: its speed is of no interest."""


async def put_all(
    peer: Peer, rollouts: Sequence[Rollout], *, observed_by: AbstractContextManager[None] | None = None
) -> float:
    """Put all calls; the seconds it took. ``observed_by`` is entered around exactly that."""

    async def one(rollout: Rollout) -> None:
        for entry in rollout:
            await peer.put(entry)

    return await timed(one, rollouts, observed_by)


async def read_all(
    peer: Peer,
    rollouts: Sequence[Rollout],
    read: Callable[[Rollout], Awaitable[int]] | None = None,
    *,
    observed_by: AbstractContextManager[None] | None = None,
) -> float:
    """Read all rollouts, with ``peer.read`` or another way of reading; the seconds it took.

    Raises:
        LostCallError: a rollout came back without all of its calls.

    """
    read = read or peer.read

    async def one(rollout: Rollout) -> None:
        found = await read(rollout)
        if found != len(rollout):
            raise LostCallError(
                f"{peer.name} gave back {found} of {len(rollout)} calls of {rollout[0].rollout_id}"
            )

    return await timed(one, rollouts, observed_by)


def keep_from_collector() -> None:
    """Exempt what is held now, the records that are put above all, from garbage collection.

    A worker does not hold so many of them at once. What comes later is collected as ever.
    """
    gc.collect()
    gc.freeze()


async def timed(
    work: Callable[[Rollout], Awaitable[None]],
    rollouts: Iterable[Rollout],
    observed_by: AbstractContextManager[None] | None = None,
) -> float:
    """Do ``work`` for all rollouts, up to ``IN_FLIGHT`` at the same time; the seconds it took."""
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def gated(rollout: Rollout) -> None:
        async with gate:
            await work(rollout)

    gc.collect()  # nobody pays for the garbage of the one before
    with observed_by or nullcontext():
        begin = time.perf_counter()
        await asyncio.gather(*map(gated, rollouts))
        return time.perf_counter() - begin
