"""The demo's own judgement: it must see what is wrong, or its last line means nothing."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import pytest

from gym_capture_redis import IncompleteReason, TokenCaptureSnapshot, TokenEntry
from gym_capture_redis.cli.demo_plan import Attempt, AttemptBook, Fault, Outcome
from gym_capture_redis.cli.demo_verify import compare_entry, expected_entry, judge_snapshot
from gym_capture_redis.cli.demo_worker import Job
from gym_capture_redis.cli.served_calls import RecordedRollout, load_rollouts

NOW = time.time()
WINDOW = (NOW - 10, NOW + 10)
RECORDING = load_rollouts()[4]
CALLS = RECORDING.call_count
LOST = IncompleteReason("lost-call", "call-2", "announced, but never recorded or refused")


def attempt(fault: Fault = Fault.NONE) -> Attempt:
    return Attempt(0, "anyterminal-0-attempt-00", 4, CALLS, fault, 2)


def book(**changed: Outcome) -> AttemptBook:
    outcomes = {call: changed.get(f"call_{call}", Outcome.CAPTURED) for call in range(CALLS)}
    return AttemptBook(attempt(), outcomes)


def entry(call: int = 0, **changed: Any) -> TokenEntry:
    fields = expected_entry(Job(attempt(), call), RECORDING.call(call))
    return TokenEntry(**fields, created_at=NOW).model_copy(update=changed)


def snapshot(*without: int, **changed: Any) -> TokenCaptureSnapshot:
    whole = TokenCaptureSnapshot(
        rollout_id=attempt().rollout_id,
        entries=tuple(entry(call) for call in range(CALLS) if call not in without),
        incomplete=False,
        snapshot_id="s",
        version=CALLS + 1,
    )
    return dataclasses.replace(whole, **changed)


def judge(ledger: AttemptBook, found: TokenCaptureSnapshot) -> list[str]:
    recording: RecordedRollout = RECORDING
    return judge_snapshot(ledger, found, recording, window=WINDOW)


def differences(found: TokenEntry) -> list[str]:
    return compare_entry(found, expected_entry(Job(attempt(), 0), RECORDING.call(0)), window=WINDOW)


def test_a_whole_attempt_that_came_out_whole_is_right() -> None:
    assert judge(book(), snapshot()) == []


def test_a_damaged_attempt_that_came_out_incomplete_is_right() -> None:
    found = snapshot(2, incomplete=True, reasons=(LOST,), version=CALLS)

    assert judge(book(call_2=Outcome.LOST), found) == []


def test_a_damaged_attempt_that_looks_complete_is_wrong() -> None:
    problems = judge(book(call_2=Outcome.LOST), snapshot(2, version=CALLS))

    assert problems == ["is damaged, but looks complete", "gives no reason for call-2"]


def test_a_whole_attempt_that_looks_incomplete_is_wrong() -> None:
    problems = judge(book(), snapshot(incomplete=True, reasons=(LOST,)))

    assert problems[0] == "is whole, but looks incomplete"
    assert "for which nothing was done" in problems[1]


def test_a_reason_about_another_call_is_wrong() -> None:
    other = dataclasses.replace(LOST, model_call_id="call-3")

    problems = judge(book(call_2=Outcome.LOST), snapshot(2, incomplete=True, reasons=(other,)))

    assert len(problems) == 2


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (snapshot(3), "lacks call-3"),
        (snapshot(entries=(*snapshot().entries, entry(0))), "holds a call twice"),
        (
            snapshot(entries=(*snapshot().entries, entry(0, model_call_id="call-99"))),
            "holds call-99, which was never captured",
        ),
        (snapshot(version=CALLS + 2), f"is at version {CALLS + 2} instead of {CALLS + 1}"),
        (snapshot(rollout_id="other"), "came as other"),
    ],
)
def test_a_snapshot_that_is_not_what_was_captured_is_wrong(found: TokenCaptureSnapshot, problem: str) -> None:
    assert problem in judge(book(), found)


def test_an_attempt_that_was_not_served_to_its_end_is_wrong() -> None:
    unfinished = book()
    del unfinished.outcomes[CALLS - 1]

    assert f"made {CALLS - 1} of its {CALLS} calls" in judge(unfinished, snapshot(CALLS - 1, version=CALLS))


def test_the_record_of_a_call_that_was_contradicted_is_still_the_first() -> None:
    reason = IncompleteReason("conflict", "call-2", "")
    ledger = book(call_2=Outcome.CONFLICT)

    assert judge(ledger, snapshot(incomplete=True, reasons=(reason,))) == []
    assert "lacks call-2" in judge(ledger, snapshot(2, incomplete=True, reasons=(reason,)))


def test_an_equal_entry_has_no_differences() -> None:
    assert differences(entry()) == []


@pytest.mark.parametrize("name", [name for name in TokenEntry.model_fields if name != "created_at"])
def test_every_field_is_compared(name: str) -> None:
    assert [line.split()[0] for line in differences(entry().model_copy(update={name: "other"}))] == [name]


@pytest.mark.parametrize(
    "created_at", [NOW - 11, NOW + 11, math.nan, None], ids=["before", "after", "nan", "none"]
)
def test_the_time_must_lie_within_the_run(created_at: float | None) -> None:
    assert [line.split()[0] for line in differences(entry(created_at=created_at))] == ["created_at"]


def test_a_single_bit_of_a_log_probability_is_seen() -> None:
    log_probs = RECORDING.call(0).generation_log_probs
    changed = [*log_probs[:-1], math.nextafter(log_probs[-1], -math.inf)]

    assert differences(entry(generation_log_probs=changed)) == [
        f"generation_log_probs differs at 1 positions, first at {len(log_probs) - 1}"
    ]


def test_a_single_id_is_seen() -> None:
    prompt = RECORDING.call(0).prompt_token_ids
    changed = [prompt[0] + 1, *prompt[1:]]

    assert differences(entry(prompt_token_ids=changed)) == [
        "prompt_token_ids differs at 1 positions, first at 0"
    ]


def test_an_id_that_became_a_float_is_seen() -> None:
    prompt = RECORDING.call(0).prompt_token_ids

    assert len(differences(entry(prompt_token_ids=[float(prompt[0]), *prompt[1:]]))) == 1


def test_a_field_that_nobody_wrote_is_seen() -> None:
    assert [line.split()[0] for line in differences(entry().model_copy(update={"surprise": 1}))] == [
        "surprise"
    ]
