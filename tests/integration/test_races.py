"""Writers, readers and trainers at once: an acknowledged record is in the snapshot, and nothing is mixed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis
from support.sample_entries import sample_entry
from support.sequences import random_ids
from support.servers import RealServer

from gym_capture_redis import batches, codec, scripts
from gym_capture_redis.errors import TokenCaptureFrozenError, TokenCaptureRetiredError
from gym_capture_redis.executor import Executor
from gym_capture_redis.keys import new_name, rollout_key
from gym_capture_redis.protocols import TokenCaptureSnapshot
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource
from gym_capture_redis.subject import Subject

PUTTERS = 64
PROMPT = random_ids(1_500)
"""Every call begins with more of it: they share token blocks."""

ROUNDS = 25
RECORDS = 6


class Party:
    """Several workers and trainers of one run, each with clients of its own."""

    def __init__(self, server: RealServer, namespace: str) -> None:
        self._server, self._namespace = server, namespace
        self._made: list[Any] = []

    def sink(self) -> RedisTokenSink:
        self._made.append(made := RedisTokenSink(self._server.url, namespace=self._namespace))
        return made

    def source(self, chunk_bytes: int = 4 * 2**20) -> RedisTokenSource:
        made = RedisTokenSource(self._server.url, namespace=self._namespace, chunk_bytes=chunk_bytes)
        self._made.append(made)
        return made

    async def go(self) -> None:
        for made in self._made:
            await made.close()


@pytest.fixture
async def party(real_server: RealServer, namespace: str) -> AsyncIterator[Party]:
    invited = Party(real_server, namespace)
    yield invited
    await invited.go()


def calls_in(snapshot: TokenCaptureSnapshot) -> set[str]:
    return {entry.model_call_id for entry in snapshot.entries}


def long_entry(rollout: str, call: str) -> TokenEntry:
    """An entry of token blocks that it shares with every other call, and of some that it may share."""
    shared = 256 * (len(call) - 1)
    return sample_entry(rollout, call, prompt_token_ids=PROMPT[:shared] + random_ids(600, seed=len(call)))


async def fill(sink: RedisTokenSink, rollout: str, attempt: str = "1") -> None:
    for number in range(RECORDS):
        await sink.begin_call(rollout, f"c{number}")
        prompt = PROMPT[: 250 * (number + 1)]
        await sink.put(sample_entry(rollout, f"c{number}", response_id=attempt, prompt_token_ids=prompt))


def attempts_in(snapshot: TokenCaptureSnapshot) -> set[str | None]:
    return {entry.response_id for entry in snapshot.entries}


# Freeze against writers


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "unannounced"])
async def test_a_freeze_among_64_writers_holds_exactly_what_was_acknowledged(
    party: Party, *, announced: bool
) -> None:
    choice = random.Random(7)
    sinks, source = [party.sink() for _ in range(4)], party.source(chunk_bytes=2_000)

    async def write(rollout: str, number: int, frozen: asyncio.Event, pause: int) -> tuple[str, bool, bool]:
        call, sink = f"c{number}", sinks[number % len(sinks)]
        try:
            if announced:
                await sink.begin_call(rollout, call)
            for _ in range(pause):
                await asyncio.sleep(0)
            after = frozen.is_set()
            await sink.put(long_entry(rollout, call))
        except TokenCaptureFrozenError:
            return call, False, False
        return call, True, after

    async def freeze(rollout: str, frozen: asyncio.Event, pause: int) -> TokenCaptureSnapshot:
        for _ in range(pause):
            await asyncio.sleep(0)
        snapshot = await source.freeze(rollout)
        frozen.set()
        return snapshot

    sizes = set()
    for turn in range(ROUNDS):
        rollout, frozen = f"r{turn}", asyncio.Event()
        freezing = asyncio.create_task(freeze(rollout, frozen, choice.randrange(120)))
        writes = await asyncio.gather(
            *(write(rollout, number, frozen, choice.randrange(60)) for number in range(PUTTERS))
        )
        snapshot = await freezing
        acknowledged = {call for call, stored, _ in writes if stored}
        assert not any(late for _, stored, late in writes if stored), "stored after freeze had returned"
        assert calls_in(snapshot) == acknowledged
        assert snapshot.incomplete == any(reason.code == "lost-call" for reason in snapshot.reasons)
        again = await source.freeze(rollout)
        assert (again.snapshot_id, again.version) == (snapshot.snapshot_id, snapshot.version)
        assert calls_in(again) == acknowledged
        for call, stored, _ in writes[:3]:
            repeated = sinks[0].put(long_entry(rollout, call))
            if stored:
                await repeated  # a lost acknowledgement must not cost a rollout
            else:
                with pytest.raises(TokenCaptureFrozenError):
                    await repeated
        sizes.add(len(acknowledged))
    assert len(sizes) > 1, "freeze never fell among the writers"


async def test_many_freezes_at_once_give_one_snapshot(party: Party) -> None:
    await fill(party.sink(), "r")
    sources = [party.source(chunk_bytes=1) for _ in range(4)]
    snapshots = await asyncio.gather(*(source.freeze("r") for source in sources for _ in range(8)))
    assert len({(snapshot.snapshot_id, snapshot.version) for snapshot in snapshots}) == 1
    assert all(len(snapshot.entries) == RECORDS and not snapshot.incomplete for snapshot in snapshots)


async def test_one_call_put_by_many_workers_at_once_is_stored_once(party: Party) -> None:
    sinks = [party.sink() for _ in range(4)]
    await asyncio.gather(*(sink.put(sample_entry("r", "c")) for sink in sinks for _ in range(16)))
    snapshot = await party.source().freeze("r")
    assert calls_in(snapshot) == {"c"}
    assert (snapshot.version, snapshot.incomplete) == (2, False)


async def test_of_two_contents_put_at_once_one_wins_and_the_rollout_is_incomplete(party: Party) -> None:
    sinks = [party.sink() for _ in range(2)]
    for turn in range(ROUNDS):
        rollout = f"r{turn}"
        outcomes = await asyncio.gather(
            *(
                sink.put(sample_entry(rollout, "c", response_id=f"{number}"))
                for number, sink in enumerate(sinks)
            ),
            return_exceptions=True,
        )
        refused = [isinstance(outcome, ValueError) for outcome in outcomes]
        assert sorted(refused) == [False, True]
        snapshot = await party.source().freeze(rollout)
        assert attempts_in(snapshot) == {f"{refused.index(False)}"}
        assert (snapshot.incomplete, snapshot.version) == (True, 3)


# A read in chunks, with something in between

Between = Callable[[RedisTokenSink, RedisTokenSource, TokenCaptureSnapshot], Awaitable[Any]]


async def drop(_: RedisTokenSink, trainer: RedisTokenSource, first: TokenCaptureSnapshot) -> None:
    assert await trainer.drop("r", snapshot_id=first.snapshot_id, version=first.version)


async def retire(_: RedisTokenSink, trainer: RedisTokenSource, __: TokenCaptureSnapshot) -> None:
    await trainer.retire(["r"])


async def delete(_: RedisTokenSink, trainer: RedisTokenSource, __: TokenCaptureSnapshot) -> None:
    await trainer.delete(["r"])


async def reuse(worker: RedisTokenSink, trainer: RedisTokenSource, __: TokenCaptureSnapshot) -> None:
    await trainer.delete(["r"])
    await fill(worker, "r", attempt="2")


async def reuse_and_freeze(
    worker: RedisTokenSink, trainer: RedisTokenSource, first: TokenCaptureSnapshot
) -> None:
    await reuse(worker, trainer, first)
    await trainer.freeze("r")


async def retire_and_reuse(
    worker: RedisTokenSink, trainer: RedisTokenSource, first: TokenCaptureSnapshot
) -> None:
    await trainer.retire(["r"])
    await reuse_and_freeze(worker, trainer, first)


async def mark(worker: RedisTokenSink, _: RedisTokenSource, __: TokenCaptureSnapshot) -> None:
    await worker.mark_incomplete("r", "lost")


class ChunkedRead:
    """Runs ``between`` just before the reader asks for its chunk number ``at``, once."""

    def __init__(self, reader: RedisTokenSource, at: int, between: Callable[[], Awaitable[Any]]) -> None:
        self.chunks = 0
        self._executor: Executor = reader._executors.get()
        self._run, self._at, self._between = self._executor.run, at, between
        self._executor.run = self.run  # type: ignore[method-assign]

    async def run(self, call: scripts.Call, subject: Subject, **options: Any) -> scripts.Reply:
        if call.step is scripts.Step.READ:
            self.chunks += 1
            if self.chunks == self._at:
                await self._between()
        return await self._run(call, subject, **options)


@pytest.mark.parametrize("at", range(1, RECORDS))
@pytest.mark.parametrize("between", [drop, retire, delete, reuse, reuse_and_freeze, retire_and_reuse])
async def test_what_ends_while_it_is_read_is_the_retired_error_and_never_incomplete(
    party: Party, between: Between, at: int
) -> None:
    worker, trainer, reader = party.sink(), party.source(), party.source(chunk_bytes=1)
    await fill(worker, "r")
    first = await trainer.freeze("r")
    read = ChunkedRead(reader, at, lambda: between(worker, trainer, first))
    with pytest.raises(TokenCaptureRetiredError, match="rollout r"):
        await reader.freeze("r")
    assert read.chunks == at


@pytest.mark.parametrize("at", range(1, RECORDS))
async def test_a_mark_while_it_is_read_gives_the_newer_version_whole(party: Party, at: int) -> None:
    worker, trainer, reader = party.sink(), party.source(), party.source(chunk_bytes=1)
    await fill(worker, "r")
    first = await trainer.freeze("r")
    ChunkedRead(reader, at, lambda: mark(worker, trainer, first))
    snapshot = await reader.freeze("r")
    assert (snapshot.snapshot_id, snapshot.version) == (first.snapshot_id, first.version + 1)
    assert [(reason.code, reason.model_call_id) for reason in snapshot.reasons] == [("marked", "lost")]
    assert len(snapshot.entries) == RECORDS


async def test_trainers_that_end_and_reuse_a_rollout_at_random_never_show_a_mixture(party: Party) -> None:
    choice = random.Random(11)
    worker, trainer, reader = party.sink(), party.source(), party.source(chunk_bytes=1)
    seen = set()
    for turn in range(ROUNDS * 2):
        await fill(worker, "r")
        first = await trainer.freeze("r")
        between = choice.choice([drop, retire, delete, mark])

        async def act(between: Between = between, first: TokenCaptureSnapshot = first) -> None:
            for _ in range(choice.randrange(100)):
                await asyncio.sleep(0)
            await between(worker, trainer, first)

        outcome, _ = await asyncio.gather(reader.freeze("r"), act(), return_exceptions=True)
        if isinstance(outcome, TokenCaptureSnapshot) and outcome.entries:
            assert outcome.snapshot_id == first.snapshot_id, turn
            assert len(outcome.entries) == RECORDS
            assert outcome.incomplete == (outcome.version > first.version)
            assert not outcome.incomplete or between is mark
            seen.add("snapshot")
        elif isinstance(outcome, TokenCaptureSnapshot):
            assert between is delete, "an unknown rollout is empty and complete"
            assert (outcome.version, outcome.incomplete) == (1, False)
        else:
            assert isinstance(outcome, TokenCaptureRetiredError)
            seen.add("retired")
        await trainer.delete(["r"])
    assert "snapshot" in seen


# Trainers against each other


async def test_two_trainers_that_drop_one_snapshot_both_hear_yes(party: Party) -> None:
    await fill(party.sink(), "r")
    trainers = [party.source() for _ in range(2)]
    snapshot = await trainers[0].freeze("r")
    same: dict[str, Any] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    assert await asyncio.gather(*(trainer.drop("r", **same) for trainer in trainers)) == [True, True]


async def test_the_drop_of_an_older_version_hears_no_whoever_comes_first(party: Party) -> None:
    worker, trainer = party.sink(), party.source()
    await fill(worker, "r")
    old = await trainer.freeze("r")
    await worker.mark_incomplete("r")
    new = await trainer.freeze("r")
    drops = [
        trainer.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        for snapshot in (old, new, old, new)
    ]
    assert await asyncio.gather(*drops) == [False, True, False, True]


async def test_a_mark_and_a_drop_at_once_leave_no_mark_unseen(party: Party) -> None:
    worker, trainer = party.sink(), party.source()
    outcomes = set()
    for turn in range(ROUNDS):
        rollout = f"r{turn}"
        await fill(worker, rollout)
        snapshot = await trainer.freeze(rollout)
        same: dict[str, Any] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
        both: list[Awaitable[Any]] = [worker.mark_incomplete(rollout), trainer.drop(rollout, **same)]
        marked, dropped = await asyncio.gather(*both, return_exceptions=True)
        assert dropped == isinstance(marked, TokenCaptureRetiredError)
        if not dropped:
            assert marked is None
            assert (await trainer.freeze(rollout)).incomplete
        outcomes.add(dropped)
    assert outcomes <= {True, False}


async def test_retires_and_deletes_at_once_count_every_rollout_at_most_once(party: Party) -> None:
    worker, trainers = party.sink(), [party.source() for _ in range(4)]
    rollouts = [f"r{number}" for number in range(20)]
    await asyncio.gather(*(worker.begin_call(rollout, "c") for rollout in rollouts))
    for end in ("retire", "delete"):
        replies = await asyncio.gather(*(getattr(trainer, end)(rollouts * 2) for trainer in trainers))
        assert all(len(reply["removed"]) + len(reply["absent"]) == len(rollouts) for reply in replies)
        removed = {rollout for reply in replies for rollout in reply["removed"]}
        assert removed == (set(rollouts) if end == "retire" else set())


# Latecomers of an attempt that is over


@pytest.mark.parametrize("again", ["put", "empty", "announced", "frozen"])
async def test_a_late_record_of_an_old_attempt_does_not_touch_the_new_one(party: Party, again: str) -> None:
    old, new, trainer = party.sink(), party.sink(), party.source()
    await old.begin_call("r", "late")
    await trainer.delete(["r"])
    match again:
        case "put":
            await new.put(sample_entry("r", "c", response_id="2"))
        case "announced":
            await new.begin_call("r", "c")
        case "frozen":
            await trainer.freeze("r")
    for latecomer in (
        old.put(sample_entry("r", "late")),
        old.mark_incomplete("r", "late"),
        old.record_engine_refusal("r", model_call_id="late", code="x"),
    ):
        with pytest.raises(TokenCaptureRetiredError, match="call 'late' of rollout r"):
            await latecomer
    if again == "announced":
        await new.put(sample_entry("r", "c", response_id="2"))
    snapshot = await trainer.freeze("r")
    assert not snapshot.incomplete
    assert attempts_in(snapshot) == ({"2"} if again in ("put", "announced") else set())
    assert snapshot.refusals == ()


class Straggler:
    """The first script call of a step is held up on its way; its sender sends the step again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: scripts.Step) -> None:
        self._step = step
        self._calls: list[scripts.Call] = []
        monkeypatch.setattr(batches, "commands", self._command)

    def _command(self, calls: list[scripts.Call], dialect: scripts.Dialect, *, by_source: bool) -> Any:
        if calls[0].step is self._step and not self._calls:
            self._calls = list(calls)
            raise redis.ConnectionError("cut on the way")
        return scripts.commands(calls, dialect, by_source=by_source)

    async def arrives(self, executor: Executor) -> None:
        for call in self._calls:
            reply = await executor.run(call, Subject("r"), deadline=executor.deadline())
            assert reply.code == "OK"


async def test_a_begin_that_arrives_after_its_attempt_was_deleted_lets_no_old_record_in(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, trainer = party.sink(), party.sink(), party.source()
    straggler = Straggler(monkeypatch, scripts.Step.BEGIN)
    await old.begin_call("r", "old")
    await trainer.delete(["r"])
    await straggler.arrives(trainer._executors.get())
    with pytest.raises(TokenCaptureRetiredError):
        await old.put(sample_entry("r", "old"))
    await new.begin_call("r", "new")
    await new.put(sample_entry("r", "new"))
    snapshot = await trainer.freeze("r")
    assert [entry.model_call_id for entry in snapshot.entries] == ["new"]
    assert snapshot.incomplete  # the late intent costs a sample, and nothing else


async def test_a_freeze_that_arrives_after_a_delete_makes_no_old_snapshot_of_the_new_attempt(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, trainer = party.sink(), party.source()
    await fill(worker, "r")
    straggler = Straggler(monkeypatch, scripts.Step.FREEZE)
    old = await trainer.freeze("r")
    await trainer.delete(["r"])
    await fill(worker, "r", attempt="2")
    await straggler.arrives(trainer._executors.get())
    new = await trainer.freeze("r")
    assert (attempts_in(new), new.version) == ({"2"}, old.version)
    assert not await trainer.drop("r", snapshot_id=old.snapshot_id, version=old.version)
    assert await trainer.drop("r", snapshot_id=new.snapshot_id, version=new.version)


@pytest.mark.parametrize("forgotten", [True, False])
async def test_reading_does_not_go_on_in_another_snapshot(
    party: Party, namespace: str, *, forgotten: bool
) -> None:
    """As where the server forgot the freeze, whether or not somebody has frozen the rollout again."""
    worker, trainer = party.sink(), party.source()
    await fill(worker, "r")
    if not forgotten:
        await trainer.freeze("r")
    executor, key = trainer._executors.get(), rollout_key(namespace, "r")
    there = await executor.run(scripts.peek(key), Subject("r"), deadline=executor.deadline())
    call = scripts.read(
        key,
        incarnation=there.incarnation,
        snapshot_id="another",
        version=there.version,
        from_seq=1,
        max_bytes=1,
    )
    reply = await executor.run(call, Subject("r"), deadline=executor.deadline())
    assert reply.code == "CHANGED"


@pytest.mark.parametrize("step", ["delete", "retire", "put", "mark", "refuse", "read"])
async def test_a_delayed_duplicate_of_a_step_does_not_touch_a_new_attempt(
    party: Party, namespace: str, step: str
) -> None:
    worker, trainer = party.sink(), party.source()
    key, subject, executor = rollout_key(namespace, "r"), Subject("r"), trainer._executors.get()

    async def run(call: scripts.Call) -> scripts.Reply:
        return await executor.run(call, subject, deadline=executor.deadline())

    await fill(worker, "r")
    old = (await run(scripts.peek(key))).incarnation
    await trainer.delete(["r"])
    await fill(worker, "r", attempt="2")
    new = await run(scripts.peek(key))
    assert new.incarnation != old
    duplicates = {
        "delete": scripts.delete(key, incarnation=old),
        "retire": scripts.retire(key, incarnation=old, new_incarnation="other", tombstone_ttl_s=60),
        "put": scripts.put(
            key,
            codec.encode(
                sample_entry("r", "c0", prompt_token_ids=random_ids(600, seed=1)), max_record_bytes=2**20
            ),
            incarnation=old,
            first_block=0,
        ),
        "mark": scripts.mark(key, "c0", new_incarnation="other", incarnation=old, mark_id="0" * 16),
        "refuse": scripts.refuse(
            key, "c9", new_incarnation="other", incarnation=old, code="x", details=b"\x80"
        ),
        "read": scripts.read(
            key, incarnation=old, snapshot_id="s", version=new.version, from_seq=1, max_bytes=1
        ),
    }
    assert (await run(duplicates[step])).code in ("CHANGED", "RETIRED")
    assert await run(scripts.peek(key)) == new
    snapshot = await trainer.freeze("r")
    assert (attempts_in(snapshot), snapshot.incomplete) == ({"2"}, False)


@pytest.mark.parametrize("step", ["put", "delete", "drop"])
async def test_two_delayed_duplicates_of_one_attempt_do_not_touch_a_new_one(
    party: Party, namespace: str, step: str
) -> None:
    worker, trainer = party.sink(), party.source()
    key, subject, executor = rollout_key(namespace, "r"), Subject("r"), trainer._executors.get()

    async def run(call: scripts.Call) -> scripts.Reply:
        return await executor.run(call, subject, deadline=executor.deadline())

    begin = scripts.begin(key, "old", new_incarnation=new_name())
    freeze = scripts.freeze(key, new_incarnation=new_name(), new_snapshot_id=new_name(), max_bytes=1)
    incarnation = (await run(begin)).incarnation
    record = codec.encode(sample_entry("r", "old"), max_record_bytes=2**20)
    put = scripts.put(key, record, incarnation=incarnation, first_block=0)
    await run(put)
    frozen = scripts.Frozen.parse(await run(freeze))
    drop = scripts.drop(
        key,
        snapshot_id=frozen.snapshot_id.encode(),
        version=frozen.reply.version,
        tombstone_ttl_s=60,
    )
    delete = scripts.delete(key, incarnation=incarnation)
    await run(delete)

    if step == "drop":
        await worker.put(sample_entry("r", "new"))
        await run(freeze)
        assert (await run(drop)).code == "STALE"
        return
    await run(begin)
    await worker.begin_call("r", "new")
    await run({"put": put, "delete": delete}[step])
    snapshot = await trainer.freeze("r")
    assert snapshot.incomplete
    assert snapshot.entries == ()


async def test_a_repeated_drop_does_not_touch_a_new_attempt(party: Party) -> None:
    worker, trainer = party.sink(), party.source()
    await fill(worker, "r")
    old = await trainer.freeze("r")
    same: dict[str, Any] = {"snapshot_id": old.snapshot_id, "version": old.version}
    assert await trainer.drop("r", **same)
    await trainer.delete(["r"])
    await fill(worker, "r", attempt="2")
    assert not await trainer.drop("r", **same)
    await trainer.freeze("r")
    assert not await trainer.drop("r", **same)
    assert attempts_in(await trainer.freeze("r")) == {"2"}


async def test_an_argument_that_cannot_be_sent_fails_its_own_caller_only(party: Party) -> None:
    sink, source = party.sink(), party.source()
    await fill(sink, "r")
    wrong: list[dict[str, Any]] = [
        {"snapshot_id": "x", "version": True},
        {"snapshot_id": "x", "version": None},
        {"snapshot_id": "x", "version": 1.5},
        {"snapshot_id": "x", "version": "\ud800"},
        {"snapshot_id": "\ud800", "version": 1},
        {"snapshot_id": None, "version": 1},
    ]
    outcomes = await asyncio.gather(
        *(source.drop("r", **arguments) for arguments in wrong),
        *(source.freeze("r") for _ in range(16)),
        return_exceptions=True,
    )
    refused, frozen = outcomes[: len(wrong)], outcomes[len(wrong) :]
    assert all(isinstance(outcome, TokenCaptureSnapshot) for outcome in frozen), frozen
    assert all(outcome is False or isinstance(outcome, TypeError) for outcome in refused), refused
