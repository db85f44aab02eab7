"""A reference model of the contract: what every step answers and leaves behind, without any I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Literal


class Outcome(Enum):
    """How a step ends: well, or with an error of one of three kinds."""

    OK = "ok"
    FROZEN = "frozen"
    RETIRED = "retired"
    CONFLICT = "conflict"


@dataclass(frozen=True)
class Record:
    """Content of one model call; two records are identical when both fields are equal."""

    content: str
    parent_call_id: str | None = None


@dataclass(frozen=True)
class ModelSnapshot:
    """What a snapshot must show. ``snapshot_id`` is the model's own; only its sameness means anything."""

    snapshot_id: int
    version: int
    incomplete: bool
    records: dict[str, Record]
    refusals: dict[str, str]
    open_calls: frozenset[str]


@dataclass(frozen=True)
class Ended:
    """Answer to ``retire`` and ``delete``."""

    removed: list[str]
    absent: list[str]


@dataclass(eq=False)
class Attempt:
    """One life of a rollout id, from its first step to its deletion."""

    status: Literal["open", "frozen", "retired"] = "open"
    version: int = 0
    snapshot_id: int | None = None
    marked: bool = False
    records: dict[str, Record] = field(default_factory=dict)
    intents: set[str] = field(default_factory=set)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def holds_something(self) -> bool:
        """Whether ending it removes anything."""
        return bool(self.records or self.intents or self.marked)

    @property
    def incomplete(self) -> bool:
        """Whether a call is known to be missing."""
        parents = {record.parent_call_id for record in self.records.values()} - {None}
        return self.marked or bool(self.intents) or not parents <= self.records.keys()

    @property
    def refused_outcome(self) -> Outcome | None:
        """How a step ends that needs an open rollout, if this is none."""
        return None if self.status == "open" else Outcome(self.status)

    def mark(self) -> None:
        """Note that a call was lost or contradicted."""
        self.marked = True
        self.version += 1

    def freeze(self, snapshot_id: int) -> None:
        """Fence it under ``snapshot_id``, unless it is already."""
        if self.status == "open":
            self.status = "frozen"
            self.snapshot_id = snapshot_id
            self.version += 1

    def retire(self) -> None:
        """Leave only the tombstone, which remembers the snapshot."""
        self.status = "retired"
        self.marked = False
        for held in (self.records, self.intents, self.refusals):
            held.clear()


@dataclass(eq=False)
class Writer:
    """What one sink remembers: to which attempt it announced each call, and on which one it wrote last."""

    announced: dict[tuple[str, str], Attempt] = field(default_factory=dict)
    works_on: dict[str, Attempt] = field(default_factory=dict)


class ModelTransport:
    """All rollouts of one namespace."""

    def __init__(self) -> None:
        self.attempts: dict[str, Attempt] = {}
        self._snapshot_ids = count(1)

    def put(self, writer: Writer, rollout_id: str, call: str, record: Record) -> Outcome:
        """``TokenSink.put``."""
        attempt = self._addressed(writer, rollout_id, call)
        if attempt is None or attempt.status == "retired":
            return Outcome.RETIRED
        if attempt.records.get(call) == record:
            writer.works_on[rollout_id] = attempt
            return Outcome.OK
        if attempt.status == "frozen":
            return Outcome.FROZEN
        if call in attempt.records or call in attempt.refusals:
            attempt.mark()
            return Outcome.CONFLICT
        writer.works_on[rollout_id] = attempt
        attempt.records[call] = record
        attempt.intents.discard(call)
        attempt.version += 1
        return Outcome.OK

    def begin_call(self, writer: Writer, rollout_id: str, call: str) -> Outcome:
        """``TokenSink.begin_call``."""
        attempt = self._present(rollout_id)
        if attempt.refused_outcome:
            return attempt.refused_outcome
        if call not in attempt.records and call not in attempt.refusals:
            attempt.intents.add(call)
        writer.announced[rollout_id, call] = writer.works_on[rollout_id] = attempt
        return Outcome.OK

    def mark_incomplete(self, writer: Writer, rollout_id: str, call: str) -> Outcome:
        """``TokenSink.mark_incomplete``."""
        attempt = self._addressed(writer, rollout_id, call)
        announced = writer.announced.get((rollout_id, call))
        if attempt is None and writer.works_on[rollout_id] is not announced:
            attempt = self._present(rollout_id)  # which of the two it belongs to cannot be told
        if attempt is None or attempt.status == "retired":
            return Outcome.RETIRED
        writer.works_on[rollout_id] = attempt
        attempt.mark()
        return Outcome.OK

    def refuse(self, writer: Writer, rollout_id: str, call: str, code: str) -> Outcome:
        """``TokenSink.record_engine_refusal``."""
        attempt = self._addressed(writer, rollout_id, call)
        if attempt is None or attempt.status == "retired":
            return Outcome.RETIRED
        if attempt.refusals.get(call) == code:
            writer.works_on[rollout_id] = attempt
            return Outcome.OK
        if attempt.status == "frozen":
            return Outcome.FROZEN
        if call in attempt.refusals:
            return Outcome.CONFLICT
        if call in attempt.records:
            attempt.mark()
            return Outcome.CONFLICT
        writer.works_on[rollout_id] = attempt
        attempt.refusals[call] = code
        attempt.intents.discard(call)
        attempt.version += 1
        return Outcome.OK

    def freeze(self, rollout_id: str) -> ModelSnapshot | None:
        """``TokenSource.freeze``; None stands for the retired error."""
        attempt = self._present(rollout_id)
        if attempt.status == "retired":
            return None
        attempt.freeze(next(self._snapshot_ids))
        assert attempt.snapshot_id is not None
        return ModelSnapshot(
            attempt.snapshot_id,
            attempt.version,
            attempt.incomplete,
            dict(attempt.records),
            dict(attempt.refusals),
            frozenset(attempt.intents),
        )

    def drop(self, rollout_id: str, *, snapshot_id: int, version: int) -> bool:
        """``TokenSource.drop``."""
        attempt = self.attempts.get(rollout_id)
        if attempt is None or (attempt.snapshot_id, attempt.version) != (snapshot_id, version):
            return False
        attempt.retire()
        return True

    def retire(self, rollout_ids: Iterable[str]) -> Ended:
        """``TokenSource.retire``."""
        ended = self._sorted_out(rollout_ids)
        for rollout_id in ended.removed + ended.absent:
            self._present(rollout_id).retire()
        return ended

    def delete(self, rollout_ids: Iterable[str]) -> Ended:
        """``TokenSource.delete``."""
        ended = self._sorted_out(rollout_ids)
        for rollout_id in ended.removed + ended.absent:
            self.attempts.pop(rollout_id, None)
        return ended

    def _present(self, rollout_id: str) -> Attempt:
        """Return the attempt there is, or begin one."""
        return self.attempts.setdefault(rollout_id, Attempt())

    def _addressed(self, writer: Writer, rollout_id: str, call: str) -> Attempt | None:
        """Return the attempt that a writer's step belongs to; None if it is over and gone."""
        announced = writer.announced.get((rollout_id, call))
        if announced is None:
            return self._present(rollout_id)
        return announced if announced is self.attempts.get(rollout_id) else None

    def _sorted_out(self, rollout_ids: Iterable[str]) -> Ended:
        ids = list(dict.fromkeys(rollout_ids))
        removed = [each for each in ids if each in self.attempts and self.attempts[each].holds_something]
        return Ended(removed, [each for each in ids if each not in removed])
