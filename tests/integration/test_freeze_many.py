"""Many rollouts frozen at once: each exactly as alone, none too many in memory, and no failure spreads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import redis
from support.backends import EVERY_KIND, place_of
from support.sample_entries import exact, exact_dump, sample_entry
from support.sequences import random_ids

from gym_capture_redis import reading
from gym_capture_redis import source as source_module
from gym_capture_redis.errors import (
    BackendUnavailableError,
    CaptureError,
    CorruptRecordError,
    InvalidIdentifierError,
    TokenCaptureRetiredError,
    UnsupportedFormatError,
)
from gym_capture_redis.executor import Executor
from gym_capture_redis.inflight import ByteBudget
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import FreezeOutcome, TokenCaptureSnapshot
from gym_capture_redis.reading import READERS, FrozenRollout
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.settings import Durability
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.snapshot import SnapshotAssembly
from gym_capture_redis.source import RedisTokenSource
from gym_capture_redis.subject import Subject

PATIENCE_S = 60.0
"""Far longer than anything below takes: only what hangs reaches it."""

MANY = 3 * READERS + 5
HUNDREDS = 300
ARRAY_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")


@dataclass
class Backend:
    """A server and a run on it, with one writer."""

    url: str
    namespace: str
    durability: Durability
    redis: redis.Redis
    sink: RedisTokenSink

    def key(self, rollout: str) -> str:
        return rollout_key(self.namespace, rollout).decode()

    def settings(self, **others: Any) -> dict[str, Any]:
        return {"namespace": self.namespace, "durability": self.durability, **others}

    def source(self, **settings: Any) -> RedisTokenSource:
        return RedisTokenSource(self.url, **self.settings(**settings))

    async def fill(self, rollouts: Iterable[str]) -> None:
        await asyncio.gather(*(self.sink.put(entry) for name in rollouts for entry in entries_of(name)))


@pytest.fixture(params=EVERY_KIND)
async def backend(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Backend]:
    with place_of(request, namespace) as place:
        async with RedisTokenSink(place.url, namespace=namespace, durability=place.durability) as sink:
            yield Backend(place.url, namespace, place.durability, place.redis, sink)


def entries_of(rollout: str) -> list[TokenEntry]:
    """One or several calls that could be of no other rollout; every seventh has a few blocks."""
    seed = sum(rollout.encode())
    length = 900 if seed % 7 == 0 else 20
    return [
        sample_entry(rollout, f"c{number}", prompt_token_ids=random_ids(length, seed), response_id=rollout)
        for number in range(1 + seed % 3)
    ]


def names(count: int, prefix: str = "r") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def snapshot_of(outcome: FreezeOutcome) -> TokenCaptureSnapshot:
    assert outcome.error is None
    assert outcome.snapshot is not None
    assert outcome.snapshot.rollout_id == outcome.rollout_id
    return outcome.snapshot


async def collect(outcomes: AsyncIterator[FreezeOutcome]) -> dict[str, FreezeOutcome]:
    """All outcomes by rollout; fails if one comes twice."""
    found: dict[str, FreezeOutcome] = {}
    async with asyncio.timeout(PATIENCE_S):
        async for outcome in outcomes:
            assert outcome.rollout_id not in found
            assert (outcome.snapshot is None) != (outcome.error is None)
            found[outcome.rollout_id] = outcome
    return found


def assert_whole(outcome: FreezeOutcome) -> None:
    snapshot = snapshot_of(outcome)
    assert not snapshot.incomplete, snapshot.reasons
    assert {entry.model_call_id: exact_dump(entry) for entry in snapshot.entries} == {
        entry.model_call_id: exact_dump(entry) for entry in entries_of(outcome.rollout_id)
    }


def comparable(snapshot: TokenCaptureSnapshot) -> Any:
    """All that a snapshot says, with arrays as their type and their values."""

    def field(value: Any) -> Any:
        return (value.dtype.name, value.tolist()) if isinstance(value, np.ndarray) else exact(value)

    entries = [
        (
            type(entry),
            entry.model_dump(mode="json", exclude=set(ARRAY_FIELDS)),
            [field(getattr(entry, name)) for name in ARRAY_FIELDS],
        )
        for entry in snapshot.entries
    ]
    about = (snapshot.snapshot_id, snapshot.version, snapshot.incomplete, snapshot.stored_bytes)
    return snapshot.rollout_id, about, snapshot.reasons, snapshot.refusals, entries


# Each once, and as alone


@pytest.mark.parametrize("arrays", [False, True], ids=["lists", "arrays"])
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
async def test_every_rollout_comes_once_and_is_what_freezing_it_alone_gives(
    backend: Backend, chunk_bytes: int, *, arrays: bool
) -> None:
    rollouts = names(MANY)
    await backend.fill(rollouts)
    await backend.sink.begin_call("r1", "open")
    await backend.sink.mark_incomplete("r2", "lost")
    await backend.sink.record_engine_refusal("r3", model_call_id="refused", code="full", why="x")
    async with backend.source(chunk_bytes=chunk_bytes) as source:
        found = await collect(source.freeze_many(rollouts, arrays=arrays))
        assert found.keys() == set(rollouts)
        freeze = source.freeze_arrays if arrays else source.freeze
        for rollout in rollouts:
            assert comparable(snapshot_of(found[rollout])) == comparable(await freeze(rollout))


async def test_ids_given_several_times_come_once(backend: Backend) -> None:
    rollouts = names(READERS + 3)
    await backend.fill(rollouts)
    async with backend.source() as source:
        found = await collect(source.freeze_many([*rollouts, *rollouts[::-1], "r0", "new", "new"]))
    assert found.keys() == {*rollouts, "new"}
    for rollout in rollouts:
        assert_whole(found[rollout])


async def test_unknown_rollouts_are_empty_complete_and_frozen(backend: Backend) -> None:
    async with backend.source() as source:
        found = await collect(source.freeze_many(names(MANY, "unknown")))
        assert len(found) == MANY
        for rollout, outcome in found.items():
            snapshot = snapshot_of(outcome)
            assert (snapshot.entries, snapshot.incomplete, snapshot.version) == ((), False, 1)
            assert (await source.freeze(rollout)).snapshot_id == snapshot.snapshot_id


async def test_nothing_asked_for_gives_nothing(backend: Backend) -> None:
    async with backend.source() as source:
        nothings: tuple[Iterable[str], ...] = ([], (), {}, iter(()))
        for nothing in nothings:
            assert await collect(source.freeze_many(nothing)) == {}


@pytest.mark.parametrize("form", [tuple, set, dict.fromkeys, iter, lambda ids: (name for name in ids)])
async def test_ids_may_come_in_any_iterable(backend: Backend, form: Callable[[list[str]], Any]) -> None:
    rollouts = names(READERS + 3)
    await backend.fill(rollouts)
    async with backend.source() as source:
        found = await collect(source.freeze_many(form(rollouts)))
    assert found.keys() == set(rollouts)
    for outcome in found.values():
        assert_whole(outcome)


async def test_a_rollout_frozen_among_many_takes_nothing_new_and_is_dropped_as_usual(
    backend: Backend,
) -> None:
    rollouts = names(READERS + 3)
    await backend.fill(rollouts)
    async with backend.source() as source:
        found = await collect(source.freeze_many(rollouts))
        for rollout, outcome in found.items():
            with pytest.raises(CaptureError, match="frozen"):
                await backend.sink.put(sample_entry(rollout, "late"))
            snapshot = snapshot_of(outcome)
            assert await source.drop(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)


# Refused at once


@pytest.mark.parametrize("ids", ["r", "", b"r"])
async def test_one_bare_id_is_refused_before_anything_is_sent(backend: Backend, ids: Any) -> None:
    async with backend.source() as source:
        with pytest.raises(TypeError, match="several ids, not one"):
            source.freeze_many(ids)
    assert not backend.redis.exists(backend.key("r"))


@pytest.mark.parametrize("ids", [None, 5, [["r"]]])
async def test_what_is_no_iterable_of_ids_is_refused_at_once(backend: Backend, ids: Any) -> None:
    async with backend.source() as source:
        with pytest.raises(TypeError):
            source.freeze_many(ids)


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, 2.0, "1", [], float("nan"), np.float64(3)])
async def test_a_bound_that_is_no_positive_integer_is_refused_at_once(backend: Backend, nbytes: Any) -> None:
    async with backend.source() as source:
        with pytest.raises(ValueError, match="max_inflight_bytes must be a positive integer, not"):
            source.freeze_many(["r"], max_inflight_bytes=nbytes)
    assert not backend.redis.exists(backend.key("r"))


# Failures stay where they are

FAILING: dict[str, type[CaptureError]] = {
    "retired": TokenCaptureRetiredError,
    "dropped": TokenCaptureRetiredError,
    "unreadable": CorruptRecordError,
    "string": CorruptRecordError,
    "newer": UnsupportedFormatError,
}
MALFORMED = ("bad/id", "", "x" * 256, "é", " r0")


async def make_failing(backend: Backend, source: RedisTokenSource) -> None:
    await backend.fill(["retired", "dropped", "unreadable", "newer"])
    await source.retire(["retired"])
    snapshot = await source.freeze("dropped")
    assert await source.drop("dropped", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    backend.redis.hset(backend.key("unreadable"), "s", "1 what is this")
    backend.redis.hset(backend.key("newer"), "s", "12 in another form")
    backend.redis.set(backend.key("string"), "theirs")


@pytest.mark.parametrize("max_inflight_bytes", [None, 1])
async def test_those_that_fail_fail_alone_each_with_its_own_error(
    backend: Backend, max_inflight_bytes: int | None
) -> None:
    good = names(MANY)
    await backend.fill(good)
    async with backend.source() as source:
        await make_failing(backend, source)
        ids = [*FAILING, *good[:5], *MALFORMED, *good[5:]]
        found = await collect(source.freeze_many(ids, max_inflight_bytes=max_inflight_bytes))
    assert found.keys() == {*good, *FAILING, *MALFORMED}
    for rollout, kind in FAILING.items():
        error = found[rollout].error
        assert type(error) is kind
        assert error.rollout_id == rollout
        assert f"rollout {rollout}" in str(error)
    for rollout in MALFORMED:
        assert type(found[rollout].error) is InvalidIdentifierError
    for rollout in good:
        assert_whole(found[rollout])


@pytest.mark.parametrize("malformed", [None, 5, b"r", 1.5, ("r",)])
async def test_an_id_that_is_no_string_fails_alone(backend: Backend, malformed: Any) -> None:
    await backend.fill(["r0", "r1"])
    async with backend.source() as source:
        found = await collect(source.freeze_many(["r0", malformed, "r1"]))
    assert type(found[malformed].error) is InvalidIdentifierError
    for rollout in ("r0", "r1"):
        assert_whole(found[rollout])


async def test_a_damaged_record_makes_its_own_rollout_incomplete_only(backend: Backend) -> None:
    rollouts = names(READERS + 3)
    await backend.fill(rollouts)
    record: Any = backend.redis.hget(backend.key("r4"), "r:c0")
    backend.redis.hset(backend.key("r4"), "r:c0", record[:-1] + bytes([record[-1] ^ 1]))
    async with backend.source() as source:
        found = await collect(source.freeze_many(rollouts))
    snapshot = snapshot_of(found.pop("r4"))
    assert ("corrupt", "c0") in {(reason.code, reason.model_call_id) for reason in snapshot.reasons}
    assert "c0" not in {entry.model_call_id for entry in snapshot.entries}
    for outcome in found.values():
        assert_whole(outcome)


async def test_an_error_that_is_of_no_rollout_is_raised_where_the_outcomes_are_taken(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = names(MANY)
    await backend.fill(rollouts)

    def finish(assembly: SnapshotAssembly) -> TokenCaptureSnapshot:
        if assembly._rollout_id == "r20":
            raise ZeroDivisionError("a bug")
        return original(assembly)

    original = SnapshotAssembly.finish
    async with backend.source() as source:
        await source.freeze("warm")
        before = asyncio.all_tasks()
        with monkeypatch.context() as patched:
            patched.setattr(SnapshotAssembly, "finish", finish)
            with pytest.raises(ZeroDivisionError):
                await collect(source.freeze_many(rollouts))
        assert asyncio.all_tasks() == before
        assert len(await collect(source.freeze_many(rollouts))) == MANY


# The bound


class Watched:
    """Counts snapshots that were put together and not taken yet, and keeps the budgets that bound them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.untaken = self.most_untaken = 0
        self.untaken_beside: dict[str, int] = {}
        self.budgets: list[ByteBudget] = []
        self.many: list[reading.ManyRollouts] = []
        finish, make_many = SnapshotAssembly.finish, reading.ManyRollouts

        def finish_and_count(assembly: SnapshotAssembly) -> TokenCaptureSnapshot:
            self.untaken_beside[assembly._rollout_id] = self.untaken
            self.untaken += 1
            self.most_untaken = max(self.most_untaken, self.untaken)
            return finish(assembly)

        def keep_many(*args: Any) -> reading.ManyRollouts:
            self.many.append(many := make_many(*args))
            return many

        def keep_budget(max_bytes: int) -> ByteBudget:
            self.budgets.append(budget := ByteBudget(max_bytes))
            return budget

        monkeypatch.setattr(SnapshotAssembly, "finish", finish_and_count)
        monkeypatch.setattr(source_module, "ManyRollouts", keep_many)
        monkeypatch.setattr(source_module, "ByteBudget", keep_budget)

    def take(self) -> None:
        self.untaken -= 1

    async def until_all_wait_but(self, finished: int) -> None:
        """Until so many outcomes can be taken and every other reader waits for room."""
        (many,), (budget,) = self.many, self.budgets
        async with asyncio.timeout(PATIENCE_S):
            while (  # noqa: ASYNC110 - readers tell nobody that they wait
                many._finished.qsize() != finished or len(budget._waiting) != many._outstanding - finished
            ):
                await asyncio.sleep(0)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
async def test_hundreds_with_a_bound_of_one_byte_are_all_read_one_at_a_time(
    backend: Backend, watched: Watched, chunk_bytes: int
) -> None:
    rollouts = names(HUNDREDS)
    await backend.fill(rollouts)
    seen = set()
    async with backend.source(chunk_bytes=chunk_bytes) as source:
        async for outcome in source.freeze_many(rollouts, max_inflight_bytes=1):
            watched.take()
            assert_whole(outcome)
            seen.add(outcome.rollout_id)
            if len(seen) < 20:
                await asyncio.sleep(0)
    assert seen == set(rollouts)
    assert watched.most_untaken == 1
    assert [budget.held_bytes for budget in watched.budgets] == [0]


async def test_without_reason_to_wait_no_more_are_read_ahead_than_there_are_readers(
    backend: Backend, watched: Watched
) -> None:
    rollouts = names(MANY)
    await backend.fill(rollouts)
    async with backend.source() as source:
        taken = 0
        async for outcome in source.freeze_many(rollouts):
            watched.take()
            assert_whole(outcome)
            taken += 1
            await watched.until_all_wait_but(min(READERS, MANY - taken))
    assert taken == MANY
    assert watched.most_untaken == READERS


async def test_a_rollout_larger_than_the_bound_is_read_alone_and_lets_the_small_ones_go_on(
    backend: Backend, watched: Watched
) -> None:
    rollouts = names(READERS - 1)
    await backend.fill(rollouts)
    large = sample_entry("large", "c", prompt_token_ids=random_ids(200_000), routed_experts=None)
    await backend.sink.put(large)
    async with backend.source(chunk_bytes=1_000) as source:
        async for outcome in source.freeze_many(["large", *rollouts], max_inflight_bytes=100_000):
            watched.take()
            if outcome.rollout_id == "large":
                assert exact_dump(snapshot_of(outcome).entries[0]) == exact_dump(large)
            else:
                assert_whole(outcome)
    assert watched.untaken_beside.keys() == {"large", *rollouts}
    assert watched.untaken_beside["large"] == 0
    assert watched.most_untaken > 1
    assert watched.budgets[0].held_bytes == 0


async def test_the_bound_is_the_setting_unless_another_is_given(backend: Backend, watched: Watched) -> None:
    async with backend.source(max_inflight_bytes=2**21) as source:
        await collect(source.freeze_many(["r"]))
        await collect(source.freeze_many(["r"], max_inflight_bytes=7))
    assert [budget.max_bytes for budget in watched.budgets] == [2**21, 7]


@pytest.mark.parametrize("arrays", [False, True], ids=["lists", "arrays"])
async def test_rollouts_larger_than_a_chunk_come_whole(backend: Backend, *, arrays: bool) -> None:
    entries = {
        rollout: [
            sample_entry(rollout, f"c{number}", prompt_token_ids=random_ids(3_000 + 500 * number, seed))
            for number in range(6)
        ]
        for seed, rollout in enumerate(names(READERS + 2))
    }
    await asyncio.gather(*(backend.sink.put(entry) for of in entries.values() for entry in of))
    async with backend.source(chunk_bytes=3_000) as source:
        found = await collect(source.freeze_many(entries, arrays=arrays, max_inflight_bytes=200_000))
        for rollout, of in entries.items():
            snapshot = snapshot_of(found[rollout])
            assert not snapshot.incomplete, snapshot.reasons
            assert {entry.model_call_id: list(entry.prompt_token_ids) for entry in snapshot.entries} == {
                entry.model_call_id: entry.prompt_token_ids for entry in of
            }


# Consumers that leave


async def take(outcomes: AsyncIterator[FreezeOutcome], count: int) -> list[str]:
    return [(await anext(outcomes)).rollout_id for _ in range(count)]


@pytest.mark.parametrize("max_inflight_bytes", [None, 1])
@pytest.mark.parametrize("taken", [0, 1, READERS + 2, MANY])
async def test_a_closed_iterator_leaves_no_task_behind_and_the_source_usable(
    backend: Backend, watched: Watched, taken: int, max_inflight_bytes: int | None
) -> None:
    rollouts = names(MANY)
    await backend.fill(rollouts)
    async with backend.source() as source:
        await source.freeze("warm")
        before = asyncio.all_tasks()
        outcomes: Any = source.freeze_many(rollouts, max_inflight_bytes=max_inflight_bytes)
        async with contextlib.aclosing(outcomes):
            await take(outcomes, taken)
        assert asyncio.all_tasks() == before
        assert len(await collect(source.freeze_many(rollouts))) == MANY
    assert [budget.held_bytes for budget in watched.budgets[1:]] == [0]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
async def test_a_cancelled_consumer_leaves_no_task_behind_and_the_source_usable(
    backend: Backend, steps: int
) -> None:
    rollouts = names(MANY)
    await backend.fill(rollouts)
    # One connection, which is there after the first call: to make another may take tasks of redis-py's.
    async with backend.source(chunk_bytes=1, connections=1) as source:
        await source.freeze("warm")
        before = asyncio.all_tasks()
        consumer = asyncio.create_task(collect(source.freeze_many(rollouts)))
        for _ in range(steps):
            await asyncio.sleep(0)
        consumer.cancel()
        ended = (await asyncio.gather(consumer, return_exceptions=True))[0]
        assert isinstance(ended, asyncio.CancelledError | dict)  # it may have been done by then
        assert asyncio.all_tasks() == before
        found = await collect(source.freeze_many(rollouts))
    for outcome in found.values():
        assert_whole(outcome)


@pytest.mark.parametrize("max_inflight_bytes", [None, 1])
async def test_closing_the_source_gives_every_other_rollout_an_outcome(
    backend: Backend, max_inflight_bytes: int | None
) -> None:
    rollouts = names(MANY)
    await backend.fill(rollouts)
    async with backend.source(chunk_bytes=1) as source:
        outcomes = source.freeze_many(rollouts, max_inflight_bytes=max_inflight_bytes)
        first = await anext(outcomes)
        await source.close()
        others = await collect(outcomes)
        assert {first.rollout_id, *others} == set(rollouts)
        assert any(outcome.error for outcome in others.values())
        for outcome in (first, *others.values()):
            if outcome.error is None:
                assert_whole(outcome)
            else:
                assert type(outcome.error) is BackendUnavailableError
        for outcome in (await collect(source.freeze_many(rollouts))).values():
            assert_whole(outcome)


async def test_several_at_the_same_time_on_one_source_each_give_their_own(backend: Backend) -> None:
    rollouts = names(MANY)
    await backend.fill(rollouts)
    async with backend.source() as source:
        shares = [rollouts[start : start + MANY // 2] for start in range(0, MANY // 2, MANY // 8)]
        bounds = (None, 1, 2**20, 2**30)
        found = await asyncio.gather(
            *(
                collect(source.freeze_many(share, max_inflight_bytes=bounds[number % 4]))
                for number, share in enumerate(shares)
            )
        )
    assert [outcomes.keys() for outcomes in found] == [set(share) for share in shares]
    ids: dict[str, set[str]] = {}
    for outcomes in found:
        for rollout, outcome in outcomes.items():
            assert_whole(outcome)
            ids.setdefault(rollout, set()).add(snapshot_of(outcome).snapshot_id)
    assert {len(of) for of in ids.values()} == {1}


# Others who work on the same rollouts


@pytest.fixture
def before_reading_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[], Any]]]:
    """What to do, by rollout, when the freeze was answered and its second chunk is about to be read."""
    planned: dict[str, Callable[[], Any]] = {}
    original = Executor.run

    async def run(executor: Executor, call: Call, subject: Subject, **options: Any) -> Reply:
        if call.step is Step.READ and (act := planned.pop(subject.rollout_id, None)):
            await act()
        return await original(executor, call, subject, **options)

    monkeypatch.setattr(Executor, "run", run)
    yield planned
    assert not planned, "the test missed its moment"


@pytest.mark.parametrize("max_inflight_bytes", [None, 1])
async def test_a_rollout_that_is_marked_while_it_is_read_comes_as_marked(
    backend: Backend,
    watched: Watched,
    before_reading_on: dict[str, Callable[[], Any]],
    max_inflight_bytes: int | None,
) -> None:
    rollouts = names(READERS + 3)
    await backend.fill(rollouts)
    for rollout in ("r2", "r5"):
        before_reading_on[rollout] = partial(backend.sink.mark_incomplete, rollout, "lost")
    async with backend.source(chunk_bytes=1) as source:
        found = await collect(source.freeze_many(rollouts, max_inflight_bytes=max_inflight_bytes))
        for rollout in ("r2", "r5"):
            marked = snapshot_of(found.pop(rollout))
            assert comparable(marked) == comparable(await source.freeze(rollout))
            assert [(reason.code, reason.model_call_id) for reason in marked.reasons] == [("marked", "lost")]
            assert len(marked.entries) == len(entries_of(rollout))
    for outcome in found.values():
        assert_whole(outcome)
    assert watched.budgets[0].held_bytes == 0


@pytest.mark.parametrize("how", ["drop", "retire", "delete"])
async def test_a_rollout_that_another_trainer_ends_while_it_is_read_fails_alone(
    backend: Backend, watched: Watched, before_reading_on: dict[str, Callable[[], Any]], how: str
) -> None:
    rollouts = names(READERS + 3)
    await backend.fill(rollouts)
    async with backend.source(chunk_bytes=1) as source, backend.source() as other:

        async def end() -> None:
            if how == "drop":
                snapshot = await other.freeze("r2")
                assert await other.drop("r2", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            else:
                await getattr(other, how)(["r2"])

        before_reading_on["r2"] = end
        found = await collect(source.freeze_many(rollouts))
    ended = found.pop("r2")
    assert type(ended.error) is TokenCaptureRetiredError
    assert ended.error.rollout_id == "r2"
    for outcome in found.values():
        assert_whole(outcome)
    assert watched.budgets[0].held_bytes == 0


# Deadlines


class Clock:
    """The loop's time, which can leap ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        time = loop.time
        self._leapt_s = 0.0
        monkeypatch.setattr(loop, "time", lambda: time() + self._leapt_s)

    def leap(self, seconds: float) -> None:
        self._leapt_s += seconds


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("chunk_bytes", "max_inflight_bytes"), [(2**20, 1), (1, READERS)], ids=["before", "after the fence"]
)
async def test_a_slow_consumer_costs_no_rollout_that_waits_for_room_its_deadline(
    backend: Backend, watched: Watched, clock: Clock, chunk_bytes: int, max_inflight_bytes: int
) -> None:
    rollouts = names(READERS + 9)
    await backend.fill(rollouts)
    taken = 0
    async with backend.source(timeout_s=PATIENCE_S / 2, chunk_bytes=chunk_bytes) as source:
        async for outcome in source.freeze_many(rollouts, max_inflight_bytes=max_inflight_bytes):
            watched.take()
            assert_whole(outcome)
            taken += 1
            await watched.until_all_wait_but(min(1, len(rollouts) - taken))
            clock.leap(10 * PATIENCE_S)
    assert taken == len(rollouts)
    assert watched.most_untaken == 1


async def test_a_rollout_that_is_marked_again_and_again_ends_at_its_deadline(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.fill(["restless"])
    read = FrozenRollout.read_into

    async def marked_meanwhile(self: FrozenRollout, assembly: SnapshotAssembly) -> bool:
        await backend.sink.mark_incomplete("restless")
        await read(self, assembly)
        return False

    monkeypatch.setattr(FrozenRollout, "read_into", marked_meanwhile)
    async with backend.source(timeout_s=0.5) as source, asyncio.timeout(PATIENCE_S):
        (outcome,) = [outcome async for outcome in source.freeze_many(["restless"])]
    assert isinstance(outcome.error, BackendUnavailableError)
