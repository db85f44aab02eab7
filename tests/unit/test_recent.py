"""What a sink keeps for a server that may forget it: the newest steps, within bounds."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gym_capture_redis import recent, scripts
from gym_capture_redis.recent import RecentSteps
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.subject import Subject

SETTLE_S = 5.0
PATIENCE_S = 60.0
SUBJECT = Subject("r", "c")
KEPT_STEPS = [Step.BEGIN, Step.PUT, Step.STAGE, Step.MARK, Step.REFUSE, Step.RECORD, Step.FAIL]
OTHER_STEPS = sorted(set(Step) - set(KEPT_STEPS), key=str)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def steps() -> RecentSteps:
    return RecentSteps(max_bytes=2**20, settle_s=SETTLE_S)


def call(step: Step = Step.PUT, nbytes: int = 0) -> Call:
    return Call(step, b"key", (bytes(nbytes),))


def reply(seq: int = 1, code: str = "OK", run_id: str = "server") -> Reply:
    return Reply(code, "incarnation", seq, 1, (), run_id)


def numbers(steps: RecentSteps, run_id: str = "server") -> list[int]:
    return [step.seq for step in steps.take(run_id, max_steps=1_000, max_bytes=2**30)]


@pytest.mark.parametrize("step", KEPT_STEPS)
def test_what_adds_to_a_rollout_is_kept_under_its_number(steps: RecentSteps, step: Step) -> None:
    assert steps.note(call(step), SUBJECT, reply(7), asked_at_s=time.monotonic())
    assert numbers(steps) == [7]


@pytest.mark.parametrize("step", OTHER_STEPS)
def test_other_steps_are_not_kept(steps: RecentSteps, step: Step) -> None:
    assert not steps.note(call(step), SUBJECT, reply(7), asked_at_s=time.monotonic())
    assert numbers(steps) == []


def test_what_puts_a_step_back_is_not_kept_beside_that_step(steps: RecentSteps) -> None:
    put_back = scripts.heal(call(), seq=7, incarnation="incarnation", new_incarnation="new")
    assert not steps.note(put_back, SUBJECT, reply(7), asked_at_s=time.monotonic())


def test_of_a_step_that_was_there_already_the_number_is_not_known(steps: RecentSteps) -> None:
    steps.note(call(), SUBJECT, reply(7, "SAME"), asked_at_s=time.monotonic())
    assert numbers(steps) == [0]


@pytest.mark.parametrize("code", ["FROZEN", "RETIRED", "CONFLICT", "MISSING", "OTHER_CODE"])
def test_what_was_refused_is_not_kept(steps: RecentSteps, code: str) -> None:
    assert not steps.note(call(), SUBJECT, reply(7, code), asked_at_s=time.monotonic())


def test_a_step_is_let_go_when_its_server_answers_later_than_settle_s(
    steps: RecentSteps, clock: Clock
) -> None:
    steps.note(call(), SUBJECT, reply(1), asked_at_s=time.monotonic())
    clock.now_s += SETTLE_S
    steps.note(call(Step.PEEK), SUBJECT, reply(), asked_at_s=time.monotonic())
    assert steps.nbytes > 0
    clock.now_s += 0.001
    steps.note(call(Step.PEEK), SUBJECT, reply(), asked_at_s=time.monotonic())
    assert steps.nbytes == 0


def test_a_reply_that_was_read_late_says_only_that_its_server_was_there_when_it_was_asked(
    steps: RecentSteps, clock: Clock
) -> None:
    asked_at_s = clock.now_s
    steps.note(call(), SUBJECT, reply(1), asked_at_s=asked_at_s)
    clock.now_s += 100 * SETTLE_S  # the process did something else
    assert steps.note(call(Step.PEEK), SUBJECT, reply(), asked_at_s=asked_at_s)
    assert steps.alive_at_s("server") == asked_at_s
    assert numbers(steps) == [1]


def test_while_its_server_is_away_nothing_is_let_go(steps: RecentSteps, clock: Clock) -> None:
    steps.note(call(), SUBJECT, reply(1), asked_at_s=time.monotonic())
    clock.now_s += 100 * SETTLE_S
    steps.note(call(), SUBJECT, reply(1, run_id="another server"), asked_at_s=time.monotonic())
    assert steps.others("another server") == ["server"]
    assert steps.alive_at_s("server") == clock.now_s - 100 * SETTLE_S
    assert numbers(steps) == [1]


def test_memory_is_bounded_and_the_oldest_go_first(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "STEP_BYTES", 10)
    steps = RecentSteps(max_bytes=350, settle_s=SETTLE_S)
    for number, server in enumerate(["one", "other", "one", "other"]):
        clock.now_s += 0.1
        steps.note(call(nbytes=90), SUBJECT, reply(number, run_id=server), asked_at_s=time.monotonic())
        assert steps.nbytes <= 350
    assert (numbers(steps, "one"), numbers(steps, "other")) == ([2], [1, 3])
    assert steps.nbytes == 0
    steps.note(call(nbytes=1_000), SUBJECT, reply(), asked_at_s=time.monotonic())
    assert steps.nbytes == 0


def test_a_server_is_watched_for_a_day_after_its_newest_step_kept_or_not(clock: Clock) -> None:
    steps = RecentSteps(max_bytes=0, settle_s=SETTLE_S)
    assert steps.note(call(), SUBJECT, reply(1), asked_at_s=clock.now_s)
    assert numbers(steps) == []
    assert [(run_id, step.subject) for run_id, step in steps.newest()] == [("server", SUBJECT)]
    assert steps.others("another server") == ["server"]
    steps.settle("server", lambda key: key != b"key", until_s=clock.now_s)
    steps.settle("server", lambda _: True, until_s=clock.now_s - 0.001)
    assert steps.others("another server") == ["server"]
    clock.now_s += recent.WATCHED_S
    assert steps.note(call(Step.PEEK), SUBJECT, reply(), asked_at_s=clock.now_s)
    clock.now_s += 0.001
    assert not steps.note(call(Step.PEEK), SUBJECT, reply(), asked_at_s=clock.now_s)
    assert steps.newest() == []

    steps.note(call(), SUBJECT, reply(1), asked_at_s=clock.now_s)
    steps.settle("server", lambda key: key == b"key", until_s=clock.now_s)
    assert steps.others("another server") == []


def test_a_server_that_was_verified_is_watched_though_it_acknowledged_nothing(
    steps: RecentSteps, clock: Clock
) -> None:
    steps.watch(b"key", SUBJECT, "new server")
    assert [run_id for run_id, _ in steps.newest()] == steps.others("server") == ["new server"]
    clock.now_s += recent.WATCHED_S + 0.001
    assert not steps.note(call(Step.PEEK), SUBJECT, reply(run_id="new server"), asked_at_s=clock.now_s)


def test_steps_are_taken_in_batches_and_given_back(steps: RecentSteps) -> None:
    for number in range(1, 6):
        steps.note(call(nbytes=100), SUBJECT, reply(number), asked_at_s=time.monotonic())
    kept = steps.nbytes
    taken = steps.take("server", max_steps=2, max_bytes=2**20)
    assert [step.seq for step in taken] == [1, 2]
    assert len(steps.take("server", max_steps=9, max_bytes=1)) == 1
    assert steps.count("server") == 2
    steps.give_back("server", taken)
    assert numbers(steps) == [4, 5, 1, 2]
    assert steps.take("unknown", max_steps=9, max_bytes=9) == []
    assert kept == 5 * (100 + recent.STEP_BYTES)


def test_a_step_that_was_put_back_is_kept_for_the_server_that_has_it_now(
    steps: RecentSteps, clock: Clock
) -> None:
    steps.note(call(), SUBJECT, reply(1), asked_at_s=time.monotonic())
    (step,) = steps.take("server", max_steps=1, max_bytes=1)
    clock.now_s += 100 * SETTLE_S
    steps.keep(step, "new server")
    steps.settle("server", lambda _: True, until_s=clock.now_s)
    assert [(run_id, newest.at_s) for run_id, newest in steps.newest()] == [("new server", clock.now_s)]


def test_after_a_fork_a_lock_held_by_a_thread_of_the_parent_holds_up_nobody(
    steps: RecentSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.note(call(), SUBJECT, reply(1), asked_at_s=time.monotonic())
    with ThreadPoolExecutor(1) as thread, steps._contents().lock:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        in_child = thread.submit(steps.others, "another server")
        assert in_child.result(PATIENCE_S) == []
