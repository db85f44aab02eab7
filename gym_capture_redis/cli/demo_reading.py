"""The second half of the demo: the trainer freezes, checks and retires every attempt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gym_capture_redis.cli.demo_plan import AttemptBook, Ledger
from gym_capture_redis.cli.demo_verify import judge_snapshot
from gym_capture_redis.cli.served_calls import RecordedRollout
from gym_capture_redis.protocols import IncompleteReason, TokenCaptureSnapshot
from gym_capture_redis.source import RedisTokenSource


@dataclass(frozen=True)
class DamagedAttempt:
    """An attempt that came out incomplete: what was done to it, and why the transport says it is."""

    rollout_id: str
    fault: str
    reasons: tuple[IncompleteReason, ...]


@dataclass
class ReadingTotals:
    """What the trainer found. ``json_bytes`` is the size of the same entries as Gym's JSON lines."""

    complete: int = 0
    incomplete: list[DamagedAttempt] = field(default_factory=list)
    dropped: int = 0
    retired: int = 0
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stored_bytes: int = 0
    json_bytes: int = 0
    problems: list[str] = field(default_factory=list)


class Reading:
    """Reads the attempts of a ledger, one after the other, as a trainer does."""

    def __init__(
        self,
        source: RedisTokenSource,
        recordings: Sequence[RecordedRollout],
        *,
        started_at: float,
        keep: bool,
    ) -> None:
        self._source = source
        self._recordings = recordings
        self._started_at = started_at
        self._keep = keep
        self._json_sizes: dict[tuple[int, str], int] = {}
        self.totals = ReadingTotals()

    async def run(self, ledger: Ledger, *, on_attempt: Callable[[], None] = lambda: None) -> ReadingTotals:
        """Freeze, check and, unless they are to be kept, retire all attempts."""
        for book in ledger:
            begun = time.perf_counter()
            snapshot = await self._source.freeze(book.attempt.rollout_id)
            self.totals.seconds += time.perf_counter() - begun
            self._count(book, snapshot)
            problems = judge_snapshot(
                book,
                snapshot,
                self._recordings[book.attempt.recording],
                window=(self._started_at, time.time()),
            )
            if not self._keep:
                problems += await self._end(snapshot)
            self.totals.problems += [f"{book.attempt.rollout_id} {problem}" for problem in problems]
            on_attempt()
        return self.totals

    async def _end(self, snapshot: TokenCaptureSnapshot) -> list[str]:
        """Drop what was consumed, and retire what is not to be trained on."""
        rollout_id = snapshot.rollout_id
        if snapshot.incomplete:
            removed = (await self._source.retire([rollout_id]))["removed"]
            self.totals.retired += len(removed)
            return [] if removed else ["could not be retired"]
        dropped = await self._source.drop(
            rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version
        )
        self.totals.dropped += dropped
        return [] if dropped else ["could not be dropped"]

    def _count(self, book: AttemptBook, snapshot: TokenCaptureSnapshot) -> None:
        totals, attempt = self.totals, book.attempt
        if snapshot.incomplete:
            totals.incomplete.append(DamagedAttempt(attempt.rollout_id, attempt.fault, snapshot.reasons))
        else:
            totals.complete += 1
        totals.stored_bytes += snapshot.stored_bytes
        for entry in snapshot.entries:
            totals.calls += 1
            totals.tokens += len(entry.prompt_token_ids) + len(entry.generation_token_ids)
            # The same call has the same size in every attempt, but for a digit of its time.
            size_of = (attempt.recording, entry.model_call_id)
            if size_of not in self._json_sizes:
                line = json.dumps(entry.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":"))
                self._json_sizes[size_of] = len(line.encode()) + 1
            totals.json_bytes += self._json_sizes[size_of]
