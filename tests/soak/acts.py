"""What the processes of a soak do: workers that write, and a trainer that freezes and drops.

Nobody tells anybody anything. Time is cut into rounds, and each round has rollouts of its own, which all
workers write to; the trainer consumes those of the rounds that are over. So anyone may be killed at any time,
and whoever takes the place goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.ledger import Kind, Ledger, RecordedSink, RecordedSource
from support.writers import REFUSED_ONE_IN, capture, entry_of

from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

ROUND_S = 3.0
GRACE_S = 1.0
"""From the end of a round until its rollouts are frozen: who is later than that finds them frozen."""

ROLLOUTS_A_ROUND = 8
LONGEST_PAUSE_S = 0.3
POLL_S = 0.1
LATE_MARK_ONE_IN = 200


@dataclass(frozen=True)
class Play:
    """What all processes know: where, what is written down, and when it began and is over."""

    url: str
    ledger: Path
    seed: int
    began_s: float
    ends_s: float
    settings: dict[str, Any]

    def write_log(self) -> None:
        """Let what this process logs go to a file beside the ledger."""
        logging.basicConfig(
            filename=self.ledger.with_name("log"),
            format="%(asctime)s %(processName)s %(levelname)s %(message)s",
            force=True,
        )

    def beginning_now(self) -> Play:
        """The same, as long, from now on."""
        now_s = time.monotonic()
        return replace(self, began_s=now_s, ends_s=now_s + self.ends_s - self.began_s)

    @property
    def round(self) -> int:
        """The one that goes on now."""
        return int((min(time.monotonic(), self.ends_s) - self.began_s) / ROUND_S)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.ends_s

    def rollouts(self) -> Iterator[tuple[float, str]]:
        """All of them in their order, and when each is to be frozen."""
        for number in range(int((self.ends_s - self.began_s) / ROUND_S) + 1):
            frozen_s = self.began_s + (number + 1) * ROUND_S + GRACE_S
            yield from ((frozen_s, f"{number}.{place}") for place in range(ROLLOUTS_A_ROUND))


@dataclass(frozen=True)
class Worker:
    """One call after the other in each rollout of the round, some of them refused by the engine."""

    play: Play

    async def run(self, name: str) -> None:
        self.play.write_log()
        async with RedisTokenSink(self.play.url, **self.play.settings) as sink, asyncio.TaskGroup() as group:
            recorded = RecordedSink(sink, Ledger(self.play.ledger))
            for place in range(ROLLOUTS_A_ROUND):
                group.create_task(self._write(recorded, f"{name}.{place}", place))

    async def _write(self, sink: RecordedSink, name: str, place: int) -> None:
        chance = random.Random(f"{self.play.seed} {name}")
        for number in itertools.count():
            if self.play.is_over:
                return
            rollout = f"{self.play.round}.{place}"
            entry = entry_of(rollout, f"{name}.{number}", turn=number)
            await capture(sink, entry, refused=not chance.randrange(REFUSED_ONE_IN))
            if not chance.randrange(LATE_MARK_ONE_IN):
                await sink.mark(f"{max(0, self.play.round - 1)}.{place}", f"{name}.{number}.late")
            await asyncio.sleep(chance.uniform(0, LONGEST_PAUSE_S))


@dataclass(frozen=True)
class Trainer:
    """Consumes the rollouts of rounds that are over, in their order, but those that were consumed before."""

    play: Play

    async def run(self, name: str) -> None:
        self.play.write_log()
        ledger = Ledger(self.play.ledger)
        chance = random.Random(f"{self.play.seed} {name}")
        consumed = {
            line.rollout for line in ledger.lines() if line.kind is Kind.DROP and line.facts["dropped"]
        }
        async with RedisTokenSource(self.play.url, **self.play.settings) as source:
            recorded = RecordedSource(source, ledger)
            for frozen_s, rollout in self.play.rollouts():
                if rollout not in consumed:
                    await asyncio.sleep(max(0.0, frozen_s - time.monotonic()))
                    await self._consume(recorded, rollout, chance)

    async def _consume(self, source: RecordedSource, rollout: str, chance: random.Random) -> None:
        while (snapshot := await source.freeze(rollout)) is not None:
            await asyncio.sleep(chance.uniform(0, POLL_S))
            if await source.drop(snapshot):
                return
