"""What a sink does when it meets another server: all in batches, and nothing is dropped on failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from gym_capture_redis import healing, scripts
from gym_capture_redis.attempts import AttemptMemory
from gym_capture_redis.healing import Healer
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.settings import SinkSettings
from gym_capture_redis.subject import Subject

OLD, NEW = "old server", "new server"
ATTEMPT, LATER_ATTEMPT = "1" * 32, "2" * 32


class Worker:
    """A sink's memory, and a server that answers what a test says."""

    def __init__(self, **settings: Any) -> None:
        self.attempts = AttemptMemory()
        self.healer = Healer(SinkSettings.build("redis://server", "run", settings), self.attempts)
        self.sent: list[list[Call]] = []
        self.answer: Callable[[Call], Reply | Exception] = lambda call: ok("SAME", seq_of(call))

    def did(self, seq: int, rollout: str = "r", step: Step = Step.BEGIN, nbytes: int = 0) -> None:
        key = rollout_key("run", rollout)
        call = Call(step, key, (ATTEMPT, f"call {seq}", bytes(nbytes)))
        reply = Reply("OK", ATTEMPT, seq, 1, (), OLD)
        self.healer.recent.note(call, Subject(rollout, f"call {seq}"), reply, asked_at_s=time.monotonic())
        self.attempts.note(rollout, reply)

    async def send(self, calls: Sequence[tuple[Call, Subject]]) -> list[Reply | Exception]:
        self.sent.append([call for call, _ in calls])
        return [self.answer(call) for call, _ in calls]

    async def heal(self, owns: Callable[[bytes], bool] = lambda _: True) -> None:
        await self.healer.heal(self.send, NEW, owns=owns)

    @property
    def steps(self) -> list[list[tuple[Step, int]]]:
        return [[(call.step, seq_of(call)) for call in batch] for batch in self.sent]

    def kept(self, run_id: str) -> list[int]:
        steps = self.healer.recent.take(run_id, max_steps=1_000, max_bytes=2**30)
        self.healer.recent.give_back(run_id, steps)
        return [step.seq for step in steps]


def seq_of(call: Call) -> int:
    if call.step is Step.PEEK:
        return 1
    return int(call.args[0] if call.healing else call.args[2])


def ok(code: str, seq: int = 1, incarnation: str = ATTEMPT) -> Reply:
    return Reply(code, incarnation, seq, 1, (), NEW)


@pytest.fixture
def worker() -> Worker:
    return Worker()


async def test_where_nothing_is_kept_nothing_is_sent(worker: Worker) -> None:
    await worker.heal()
    assert worker.sent == []


async def test_steps_are_sent_again_and_then_each_rollout_is_verified_once(worker: Worker) -> None:
    worker.did(1)
    worker.did(2)
    worker.did(1, "other")
    await worker.heal()
    assert worker.steps == [
        [(Step.BEGIN, 1), (Step.BEGIN, 2), (Step.BEGIN, 1)],
        [(Step.VERIFY, 2), (Step.VERIFY, 1)],
    ]
    assert (worker.kept(OLD), worker.kept(NEW)) == ([], [1, 2, 1])
    await worker.heal()
    assert len(worker.sent) == 2


async def test_batches_are_bounded_by_number_and_by_bytes(worker: Worker) -> None:
    for seq in range(1, 101):
        worker.did(seq)
    for seq in range(101, 105):
        worker.did(seq, nbytes=2**19)
    await worker.heal()
    sizes = [len(batch) for batch in worker.sent]
    assert sizes == [64, 38, 2, 1]
    assert sum(sizes[:-1]) == 104


async def test_what_a_put_needs_is_sent_before_it(worker: Worker) -> None:
    for seq, step in enumerate([Step.MARK, Step.PUT, Step.REFUSE, Step.STAGE, Step.BEGIN], start=1):
        worker.did(seq, step=step)
    await worker.heal()
    assert [step for step, _ in worker.steps[0]] == [
        Step.BEGIN,
        Step.STAGE,
        Step.PUT,
        Step.REFUSE,
        Step.MARK,
    ]


async def test_only_keys_of_this_node_are_sent(worker: Worker) -> None:
    worker.did(1)
    worker.did(2, "other")
    await worker.heal(owns=lambda key: b"other" in key)
    assert worker.steps == [[(Step.BEGIN, 2)], [(Step.VERIFY, 2)]]
    assert (worker.kept(OLD), worker.kept(NEW)) == ([1], [2])


async def test_a_slot_that_comes_here_meanwhile_loses_no_step(worker: Worker) -> None:
    here = [b"other"]
    worker.did(1)
    worker.did(2, "other")

    def answer(call: Call) -> Reply:
        here.append(b"/r}")
        return ok("SAME", seq_of(call))

    worker.answer = answer
    await worker.heal(owns=lambda key: any(name in key for name in here))
    assert (worker.kept(OLD), worker.kept(NEW)) == ([1], [2])


@pytest.mark.parametrize("error", [RedisConnectionError("gone"), ResponseError("BUSY"), OSError()])
async def test_after_a_failure_everything_is_still_kept(worker: Worker, error: Exception) -> None:
    worker.did(1)
    worker.did(2)
    worker.answer = lambda call: error if seq_of(call) == 2 else ok("OK")
    with pytest.raises(type(error)):
        await worker.heal()
    assert sorted(worker.kept(OLD)) == [1, 2]
    worker.answer = lambda call: ok("SAME", seq_of(call))
    await worker.heal()
    assert (worker.kept(OLD), sorted(worker.kept(NEW))) == ([], [1, 2])


async def test_a_rollout_that_cannot_be_read_is_reported_and_holds_up_no_other(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.did(1, "broken")
    worker.did(2)
    broken = rollout_key("run", "broken")
    worker.answer = lambda call: (
        ResponseError("CORRUPT the state") if call.key == broken else ok("SAME", seq_of(call))
    )
    await worker.heal()
    assert (worker.kept(OLD), worker.kept(NEW)) == ([], [2])
    assert "could not be put back" in caplog.text


@pytest.mark.parametrize(
    ("code", "kept_by_old", "kept_by_new"),
    [
        ("OK", [], [7]),
        ("SAME", [], [7]),
        ("MISSING", [7], []),
        ("LOST", [], [9]),
        ("CONFLICT", [], [9]),  # the mark of it
        ("RETIRED", [], []),
    ],
)
async def test_what_is_kept_on(
    worker: Worker, code: str, kept_by_old: list[int], kept_by_new: list[int]
) -> None:
    worker.did(7)
    worker.answer = lambda call: ok(code if call.healing else "OK", 9)
    await worker.heal()
    assert (worker.kept(OLD), worker.kept(NEW)) == (kept_by_old, kept_by_new)


async def test_a_rollout_that_lost_much_is_reported_once(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    for seq in range(1, 4):
        worker.did(seq)
    worker.answer = lambda _: ok("LOST", 1, LATER_ATTEMPT)
    await worker.heal()
    assert len(caplog.records) == 1
    assert "Rollout r" in caplog.text
    assert worker.kept(NEW) == [1]


async def test_an_attempt_that_gave_way_to_a_later_one_on_the_old_server_is_over(worker: Worker) -> None:
    worker.did(1)
    worker.attempts.note("r", Reply("OK", LATER_ATTEMPT, 1, 1, (), OLD))
    await worker.heal()
    assert [[call.step for call in batch] for batch in worker.sent] == [[Step.VERIFY]]
    assert worker.sent[0][0].args[1] == LATER_ATTEMPT


@pytest.mark.parametrize(("durability", "verified"), [("aof", False), ("fsync", False), ("memory", True)])
async def test_rollouts_that_were_safe_long_ago_are_verified_only_where_nothing_is_safe(
    durability: str, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1_000.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    worker = Worker(durability=durability)
    worker.did(1)
    now_s[0] += 6.0
    worker.did(1, "newer")
    await worker.heal()
    assert [rollout_key("run", "r") in [call.key for call in worker.sent[-1]]] == [verified]
    assert rollout_key("run", "newer") in [call.key for call in worker.sent[-1]]


@pytest.mark.parametrize("durability", ["aof", "fsync"])
@pytest.mark.parametrize(
    ("known", "asks_for_all"),
    [
        ({}, True),
        ({"r0": 1}, True),
        ({"r29": 1}, False),
        ({"r29": 7}, False),
        ({"r29": 0}, True),
        ({"r29": 1, "r28": 0}, True),
        ({"r29": 1, "r0": 0}, False),
    ],
)
async def test_a_server_that_lacks_what_was_safe_is_asked_for_all_of_it(
    durability: str, known: dict[str, int], asks_for_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the newest: if its files are gone, or of another day, they are missing, or short of steps."""
    now_s = [1_000.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    worker = Worker(durability=durability)
    rollouts = [f"r{number}" for number in range(30)]
    for rollout in rollouts:
        worker.did(1, rollout)
    now_s[0] += 1_000.0
    peek = scripts.peek(rollout_key("run", "r0"))
    worker.healer.recent.note(peek, Subject("r0"), Reply("OK", ATTEMPT, 1, 1, (), OLD), asked_at_s=now_s[0])

    def answer(call: Call) -> Reply:
        for rollout, seq in known.items():
            if call.key == rollout_key("run", rollout):
                return ok("OK", seq, ATTEMPT)
        return ok("LOST" if call.step is Step.VERIFY else "OK", 1, "")

    worker.answer = answer
    await worker.heal()
    asked = [call.key for batch in worker.sent for call in batch if call.step is Step.PEEK]
    assert asked == [rollout_key("run", rollout) for rollout in rollouts[:-17:-1]]
    verified = [call.key for batch in worker.sent for call in batch if call.step is Step.VERIFY]
    assert verified == ([rollout_key("run", rollout) for rollout in rollouts] if asks_for_all else [])
    assert [run_id for run_id, _ in worker.healer.recent.newest()] == [NEW]


@pytest.mark.parametrize("durability", ["memory", "aof"])
async def test_what_nothing_was_heard_of_for_a_day_is_not_missed(
    durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(durability=durability)
    worker.did(1, "dropped since")
    monkeypatch.setattr(healing, "WATCHED_S", 0.0)
    worker.healer.recent.take(OLD, max_steps=1, max_bytes=1)
    await worker.heal()
    assert worker.sent == []


async def test_a_rollout_that_is_over_is_not_asked_for_again(worker: Worker) -> None:
    worker.did(1)
    worker.answer = lambda _: ok("RETIRED", incarnation=LATER_ATTEMPT)
    await worker.heal()
    assert worker.steps[-1] == [(Step.VERIFY, 1)]
    worker.sent.clear()
    await worker.healer.heal(worker.send, "a third server", owns=lambda _: True)
    assert worker.sent == []


@pytest.mark.parametrize(("lost", "named", "more"), [(20, 20, None), (23, 20, 3)])
async def test_of_very_many_rollouts_that_lost_something_the_log_names_some_and_counts_the_rest(
    worker: Worker, caplog: pytest.LogCaptureFixture, lost: int, named: int, more: int | None
) -> None:
    for number in range(lost):
        worker.attempts.note(f"r{number}", Reply("OK", ATTEMPT, 1, 1, (), OLD))
    worker.healer.recent.watch(rollout_key("run", "r0"), Subject("r0"), OLD)
    worker.answer = lambda _: ok("LOST", 1, LATER_ATTEMPT)
    await worker.heal()
    messages = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith("Rollout r") for message in messages) == named
    assert [message.partition("without ")[2] for message in messages if "more" in message] == (
        [f"steps of {more} more rollouts, which are incomplete too."] if more else []
    )


async def test_verifying_goes_in_batches(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "_VERIFIED_AT_ONCE", 2)
    for number in range(5):
        worker.did(1, f"r{number}")
    worker.healer.recent.take(OLD, max_steps=9, max_bytes=2**20)
    await worker.heal()
    assert [len(batch) for batch in worker.sent] == [2, 2, 1]


async def test_looking_through_very_many_rollouts_leaves_others_their_turns(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where none of them has to be verified, and nothing is sent."""
    monkeypatch.setattr(healing, "_VERIFIED_AT_ONCE", 2)
    for number in range(10):
        worker.did(1, f"r{number}")
    worker.healer.recent.take(OLD, max_steps=99, max_bytes=2**20)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    await worker.heal(owns=lambda _: False)
    other.cancel()
    assert not worker.sent
    assert turns >= 5


async def test_a_put_that_waits_too_long_for_others_becomes_a_mark(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [1_000.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    worker.did(7, step=Step.PUT)
    worker.answer = lambda call: ok("MISSING" if call.healing and call.step is Step.PUT else "OK", 9)
    for _ in range(2):
        await worker.heal()
        assert worker.kept(OLD) == [7]
        assert caplog.records == []
        now_s[0] += 2.6
    await worker.heal()
    assert "Rollout r" in caplog.text
    await worker.heal()
    last = worker.sent[-1][-1]
    assert (last.step, last.args[-3:-1]) == (Step.MARK, ("call 7", "lost"))
    assert (worker.kept(OLD), worker.kept(NEW)) == ([], [9])


def test_a_step_that_is_put_back_is_a_script_of_its_own() -> None:
    put = Call(Step.PUT, b"key", (b"a", b"b"))
    healed = scripts.heal(put, seq=3, incarnation=ATTEMPT, new_incarnation=LATER_ATTEMPT)
    assert healed.args == (3, ATTEMPT, LATER_ATTEMPT, b"a", b"b")
    dialect = scripts.Dialect()
    assert scripts.command([healed], dialect, by_source=False)[1] != put.step.sha1(dialect)
    assert put.step.source(dialect, healing=True).startswith(b"#!lua flags=allow-oom\n")
