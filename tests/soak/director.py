"""Runs a soak: starts everyone, hurts somebody again and again, and counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable

from soak.acts import Play, Trainer, Worker
from soak.stages import Fault, Stage
from support.ledger import Kind, LedgerTail
from support.verdict import violations
from support.writers import Job, WriterProcess

WORKERS = 3
SHORTEST_GAP_S, LONGEST_GAP_S = 0.5, 4.0
MEMORY_S = 12.0
"""How long a worker must live on after what the server may have lost: the newest calls are not noticed where
the only worker that knew of them is gone too (guarantees)."""

REPORT_EVERY_S = 10.0
PATIENCE_S = 120.0
"""In the end, for anything more to happen: the trainer may have much left to consume."""


class Director:
    """One soak on one stage; ``say`` is told how it goes."""

    def __init__(self, stage: Stage, play: Play, chance: random.Random, say: Callable[[str], None]) -> None:
        self._stage = stage
        self._play = play
        self._chance = chance
        self._say = say
        self._tail = LedgerTail(play.ledger)
        self._faults_file = play.ledger.with_name("faults.jsonl")
        self._running = contextlib.ExitStack()
        self._names = iter(range(10**9))
        self._workers: list[WriterProcess] = []
        self._trainer = self._new_process("t")
        self._lost_s = self._worker_killed_s = float("-inf")
        self.counts: Counter[str] = Counter()
        self.acknowledged: Counter[Kind] = Counter()

    async def run(self) -> list[str]:
        """Play to the end; returns every law that was broken."""
        with self._running:
            await self._begin()
            reporting = asyncio.create_task(self._report())
            try:
                while not self._play.is_over:
                    await self._hurt()
                    await asyncio.sleep(self._chance.uniform(SHORTEST_GAP_S, LONGEST_GAP_S))
                await self._end()
            finally:
                reporting.cancel()
        self._count()
        lines = LedgerTail(self._play.ledger).new_lines()
        consumed = {
            line.rollout: line for line in lines if line.kind is Kind.SNAPSHOT
        }  # the last reading of each
        for snapshot in consumed.values():
            self.counts["rollouts incomplete" if snapshot.facts["incomplete"] else "rollouts complete"] += 1
        return violations(lines, server_kept_all=self._stage.keeps_all)

    async def _begin(self) -> None:
        workers = [self._new_process("w") for _ in range(WORKERS)]
        await asyncio.gather(
            *(asyncio.to_thread(process.wait_until_ready) for process in (*workers, self._trainer))
        )
        self._play = self._play.beginning_now()
        self._workers = [self._started(worker, Worker(self._play)) for worker in workers]
        self._started(self._trainer, Trainer(self._play))

    async def _hurt(self) -> None:
        fault = self._chance.choice([*self._stage.faults, *self._deaths()])
        if fault.may_lose and time.monotonic() - self._worker_killed_s < MEMORY_S:
            return
        began_ns = time.monotonic_ns()
        await fault.run()
        self.counts[fault.counts_as] += 1
        if fault.may_lose:
            self._lost_s = time.monotonic()
        line = {"fault": fault.name, "began_ns": began_ns, "ended_ns": time.monotonic_ns()}
        with self._faults_file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _deaths(self) -> list[Fault]:
        async def kill_worker() -> None:
            worker = self._workers.pop(self._chance.randrange(len(self._workers)))
            await asyncio.to_thread(worker.kill)
            self._worker_killed_s = time.monotonic()
            self._workers.append(self._started(self._new_process("w"), Worker(self._play)))

        async def kill_trainer() -> None:
            await asyncio.to_thread(self._trainer.kill)
            self._trainer = self._started(self._new_process("t"), Trainer(self._play))

        deaths = [Fault("kill -9 of the trainer", "kills", kill_trainer)]
        if time.monotonic() - self._lost_s > MEMORY_S:
            deaths.append(Fault("kill -9 of a worker", "kills", kill_worker))
        return deaths

    def _new_process(self, kind: str) -> WriterProcess:
        return self._running.enter_context(WriterProcess(f"{kind}{next(self._names)}"))

    @staticmethod
    def _started(process: WriterProcess, job: Job) -> WriterProcess:
        process.start(job)
        return process

    async def _end(self) -> None:
        everyone = [*self._workers, self._trainer]
        waiting = asyncio.gather(*(asyncio.to_thread(process.wait) for process in everyone))
        while True:
            before = self.acknowledged.total()
            done, _ = await asyncio.wait([waiting], timeout=PATIENCE_S)
            if done:
                await waiting
                return
            self._count()
            if self.acknowledged.total() == before:
                raise TimeoutError(f"nobody has done anything for {PATIENCE_S:g} s, and somebody is not done")

    def _count(self) -> None:
        self.acknowledged.update(line.kind for line in self._tail.new_lines())

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._count()
            left_s = max(0.0, self._play.ends_s - time.monotonic())
            told = {
                "puts": self.acknowledged[Kind.RECORD],
                "drops": self.acknowledged[Kind.DROP],
                **self.counts,
            }
            self._say(
                f"{left_s:5.0f} s left: " + ", ".join(f"{what} {count}" for what, count in told.items())
            )
