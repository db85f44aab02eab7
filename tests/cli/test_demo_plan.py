from __future__ import annotations

from collections import Counter

import pytest

from gym_capture_redis.cli.demo_plan import MIN_ROLLOUTS, Fault, Ledger, Outcome, Plan
from gym_capture_redis.cli.served_calls import load_rollouts

RECORDINGS = load_rollouts()


def draw(rollouts: int = 64, workers: int = 4, seed: int = 1) -> Plan:
    return Plan.draw(RECORDINGS, rollouts=rollouts, workers=workers, seed=seed)


def test_the_same_seed_draws_the_same_plan() -> None:
    assert draw(seed=5) == draw(seed=5)
    assert draw(seed=5) != draw(seed=6)


@pytest.mark.parametrize("rollouts", [MIN_ROLLOUTS, 5, 64])
def test_every_fault_strikes_an_attempt_of_its_own(rollouts: int) -> None:
    plan = draw(rollouts)
    faults = Counter(attempt.fault for attempt in plan.attempts)

    assert [faults[fault] for fault in (Fault.TOKENLESS, Fault.REPEATED, Fault.CONFLICT)] == [1, 1, 1]
    assert faults[Fault.HELD] == plan.held_count > 0


def test_attempts_have_names_of_their_own_and_cover_all_recordings() -> None:
    plan = draw()

    assert len({attempt.rollout_id for attempt in plan.attempts}) == 64
    assert {attempt.recording for attempt in plan.attempts} == set(range(8))
    assert plan.attempts[63].rollout_id == "anyterminal-4-attempt-07"
    assert plan.call_count == 187 * 8


@pytest.mark.parametrize("seed", range(20))
def test_a_fault_strikes_in_the_middle_of_an_attempt(seed: int) -> None:
    assert all(0 < attempt.fault_call < attempt.call_count - 1 for attempt in draw(seed=seed).attempts)


@pytest.mark.parametrize(
    ("outcome", "complete", "recorded"),
    [
        (Outcome.CAPTURED, True, True),
        (Outcome.ANNOUNCED, False, False),
        (Outcome.LOST, False, False),
        (Outcome.TOKENLESS, False, False),
        (Outcome.CONFLICT, False, True),
    ],
)
def test_the_ledger_alone_decides_what_must_be_complete(
    outcome: Outcome, complete: bool, recorded: bool
) -> None:
    plan = draw(4)
    ledger = Ledger(plan)
    ledger.record(plan.attempts[0], 3, outcome)
    book = next(iter(ledger))

    assert book.must_be_complete is complete
    assert (3 in book.recorded_calls) is recorded
