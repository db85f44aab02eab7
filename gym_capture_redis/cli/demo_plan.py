"""What the demo will do to whom, and the trainer's own book about what was done.

Both are made without looking into Redis: they decide which attempts must come out complete.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gym_capture_redis.cli.served_calls import RecordedRollout
from gym_capture_redis.protocols import IncompleteCode

MIN_ROLLOUTS = 4
"""One attempt for each fault."""
MAX_HELD = 3
"""How many announced calls the killed worker takes with it."""
LATEST_FAULT_CALL = 6
"""Faults happen early, in the middle of the work of all; every recorded rollout has more calls."""


class Fault(StrEnum):
    """What is done to one call of an attempt; the text is what the report says about it."""

    NONE = "none"
    HELD = "its worker was killed"
    TOKENLESS = "a response without token ids"
    REPEATED = "a call put twice"
    CONFLICT = "a call put twice, with other content"


class Outcome(StrEnum):
    """What became of a call, from what its worker reported."""

    ANNOUNCED = "announced"
    CAPTURED = "captured"
    LOST = "lost"
    TOKENLESS = "no token ids"
    CONFLICT = "captured, then contradicted"


_REASONS_OF = {
    Outcome.ANNOUNCED: (IncompleteCode.LOST_CALL,),
    Outcome.LOST: (IncompleteCode.LOST_CALL,),
    Outcome.TOKENLESS: (IncompleteCode.MARKED,),
    Outcome.CONFLICT: (IncompleteCode.CONFLICT,),
}
_RECORDED = (Outcome.CAPTURED, Outcome.CONFLICT)


@dataclass(frozen=True)
class Attempt:
    """One replay of a recorded rollout under an id of its own; ``fault`` strikes call ``fault_call``."""

    number: int
    rollout_id: str
    recording: int
    call_count: int
    fault: Fault = Fault.NONE
    fault_call: int = 0

    def fault_of(self, call: int) -> Fault:
        """What is done to call number ``call``."""
        return self.fault if call == self.fault_call else Fault.NONE


@dataclass(frozen=True)
class Plan:
    """All attempts, and the worker that is killed while it holds ``held_count`` announced calls."""

    attempts: tuple[Attempt, ...]
    victim: int
    held_count: int

    @property
    def repeated(self) -> Attempt:
        """The attempt one of whose calls is put twice with the same content: it stays whole."""
        return next(attempt for attempt in self.attempts if attempt.fault is Fault.REPEATED)

    @property
    def call_count(self) -> int:
        """How many calls all attempts make."""
        return sum(attempt.call_count for attempt in self.attempts)

    @classmethod
    def draw(cls, recordings: Sequence[RecordedRollout], *, rollouts: int, workers: int, seed: int) -> Plan:
        """Spread ``rollouts`` attempts over the recordings and draw who is struck, the same for a seed."""
        rng = random.Random(seed)  # noqa: S311 - a draw to repeat, not a secret
        held_count = min(MAX_HELD, rollouts - MIN_ROLLOUTS + 1)
        faults = [Fault.TOKENLESS, Fault.REPEATED, Fault.CONFLICT, *[Fault.HELD] * held_count]
        struck = dict(zip(rng.sample(range(rollouts), len(faults)), faults, strict=True))
        attempts = []
        for number in range(rollouts):
            replay, recording = divmod(number, len(recordings))
            recorded = recordings[recording]
            attempts.append(
                Attempt(
                    number=number,
                    rollout_id=f"{recorded.rollout_id}-attempt-{replay:02d}",
                    recording=recording,
                    call_count=recorded.call_count,
                    fault=struck.get(number, Fault.NONE),
                    fault_call=rng.randrange(2, LATEST_FAULT_CALL),
                )
            )
        return cls(tuple(attempts), victim=rng.randrange(workers), held_count=held_count)


@dataclass
class AttemptBook:
    """What was reported of one attempt, by call number."""

    attempt: Attempt
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    @property
    def must_be_complete(self) -> bool:
        """Whether every call that was made was captured, once."""
        return not self.reasons

    @property
    def reasons(self) -> dict[int, tuple[IncompleteCode, ...]]:
        """Why the attempt must come out incomplete: call number to the codes that tell."""
        return {call: _REASONS_OF[end] for call, end in self.outcomes.items() if end in _REASONS_OF}

    @property
    def recorded_calls(self) -> set[int]:
        """The calls whose record must be in the snapshot, as it was served first."""
        return {call for call, end in self.outcomes.items() if end in _RECORDED}


class Ledger:
    """The books of all attempts."""

    def __init__(self, plan: Plan) -> None:
        self._books = {attempt.number: AttemptBook(attempt) for attempt in plan.attempts}

    def __iter__(self) -> Iterator[AttemptBook]:
        """Iterate over the books in the order of the plan."""
        return iter(self._books.values())

    def record(self, attempt: Attempt, call: int, outcome: Outcome) -> None:
        """Write down what became of a call."""
        self._books[attempt.number].outcomes[call] = outcome
