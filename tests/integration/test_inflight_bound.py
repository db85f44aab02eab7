"""However many puts wait, few are encoded at a time; none is dropped, and nothing else waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import numpy as np
import pytest
from support.proxies import StallingProxy
from support.sample_entries import exact_dump, sample_entry
from support.sequences import random_ids
from support.servers import RealServer

from gym_capture_redis import batches, codec, retry, scripts, taking
from gym_capture_redis.errors import BackendUnavailableError, InvalidRecordError, TokenCaptureRetiredError
from gym_capture_redis.executor import Executor
from gym_capture_redis.inflight import Hold
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import IncompleteCode, TokenCaptureSnapshot
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.scripts import Call, Dialect, Step
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource
from gym_capture_redis.subject import Subject

ROLLOUT = "r"
BOUND = 2**20
"""The least that ``max_inflight_bytes`` may be."""

TOKENS = 20_000
FITTING = 3
"""So many entries of so many tokens find room at once: each holds 16 bytes a token."""

PUTS = 40
PATIENCE_S = 60.0
"""Far longer than anything below takes: only what hangs reaches it."""


class Bench:
    """A server of the test's own, and one sink with little room, connected and at rest."""

    def __init__(self, server: RealServer, namespace: str) -> None:
        self.server, self.namespace = server, namespace
        self.redis = server.client()
        self.key = rollout_key(namespace, ROLLOUT).decode()
        self.sink = self.make_sink()
        self.encoded: list[str] = []
        self.under_way: set[str] = set()
        self.most_under_way = 0

    def make_sink(self, url: str | None = None, **settings: Any) -> RedisTokenSink:
        defaults: dict[str, Any] = {
            "namespace": self.namespace,
            "timeout_s": PATIENCE_S,
            "max_inflight_bytes": BOUND,
        }
        return RedisTokenSink(url or self.server.url, **defaults | settings)

    @property
    def executor(self) -> Executor:
        return self.sink._executors.get()

    @property
    def waiting(self) -> int:
        """How many puts wait for room."""
        return len(self.executor._budget._waiting)

    async def warm_up(self) -> None:
        """Let the server know the scripts, and the lanes their connections."""
        calls = [self.sink.begin_call("warm", f"c{number}") for number in range(2 * batches.MAX_BATCH_CALLS)]
        await asyncio.gather(*calls)
        await self.sink.mark_incomplete("warm")
        await self.sink.put(sample_entry("warm", "c0", routed_experts=None))
        self.encoded.clear()

    async def put(self, entry: TokenEntry) -> None:
        """Put, and note from its encoding to its end that it is under way."""
        try:
            await self.sink.put(entry)
        finally:
            self.under_way.discard(entry.model_call_id)

    def put_all(self, entries: Iterable[TokenEntry]) -> dict[str, asyncio.Task[None]]:
        return {entry.model_call_id: asyncio.create_task(self.put(entry)) for entry in entries}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - puts tell nobody that they wait
                await asyncio.sleep(0)

    async def until_all_wait_but(self, tasks: dict[str, asyncio.Task[None]], inside: int) -> None:
        """Until so many puts are under way, and the others wait for room."""
        await self.until(lambda: len(self.under_way) == inside and self.waiting == len(tasks) - inside)

    async def freeze(self) -> TokenCaptureSnapshot:
        async with RedisTokenSource(self.server.url, namespace=self.namespace) as source:
            return await source.freeze(ROLLOUT)

    def fields(self) -> dict[bytes, bytes]:
        found: Any = self.redis.hgetall(self.key)
        return dict(found)

    def nothing_is_held(self) -> None:
        assert self.executor._budget.held_bytes == 0
        assert self.waiting == 0


@pytest.fixture
async def bench(valkey9: RealServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    with RealServer(valkey9.binary) as server:
        made = Bench(server, namespace)
        encode_taken = codec.encode_taken

        def count(entry: taking.TakenEntry, **options: Any) -> codec.EncodedRecord:
            call = entry.model_call_id
            made.encoded.append(call)
            made.under_way.add(call)
            made.most_under_way = max(made.most_under_way, len(made.under_way))
            return encode_taken(entry, **options)

        monkeypatch.setattr(codec, "encode_taken", count)
        async with made.sink:
            await made.warm_up()
            made.under_way.clear()
            made.most_under_way = 0
            yield made
            server.resume()
        made.redis.close()


def entry_of(call: str, tokens: int = TOKENS, **fields: Any) -> TokenEntry:
    fields = {"prompt_token_ids": random_ids(tokens, sum(call.encode())), "routed_experts": None} | fields
    return sample_entry(ROLLOUT, call, **fields)


def entries(count: int = PUTS, **fields: Any) -> list[TokenEntry]:
    return [entry_of(f"c{number}", **fields) for number in range(count)]


def assert_holds(snapshot: TokenCaptureSnapshot, expected: Iterable[TokenEntry]) -> None:
    assert {entry.model_call_id: exact_dump(entry) for entry in snapshot.entries} == {
        entry.model_call_id: exact_dump(entry) for entry in expected
    }


def reasons_of(snapshot: TokenCaptureSnapshot) -> set[tuple[str, str]]:
    return {(reason.code, reason.model_call_id) for reason in snapshot.reasons}


async def outcomes_of(tasks: dict[str, asyncio.Task[None]]) -> dict[str, BaseException | None]:
    async with asyncio.timeout(PATIENCE_S):
        ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
    return dict(zip(tasks, ended, strict=True))


# Few at a time, and none dropped


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "unannounced"])
async def test_while_the_server_hangs_few_puts_are_under_way_and_afterwards_all_are_stored(
    bench: Bench, *, announced: bool
) -> None:
    made = entries()
    if announced:
        await asyncio.gather(*(bench.sink.begin_call(ROLLOUT, entry.model_call_id) for entry in made))
    bench.server.pause()
    tasks = bench.put_all(made)
    await bench.until_all_wait_but(tasks, FITTING)
    assert len(bench.encoded) == FITTING
    assert bench.executor._budget.held_bytes <= 2 * BOUND
    assert not any(task.done() for task in tasks.values())
    bench.server.resume()
    assert set((await outcomes_of(tasks)).values()) == {None}
    assert bench.most_under_way == FITTING
    assert sorted(bench.encoded) == sorted(tasks)
    bench.nothing_is_held()
    snapshot = await bench.freeze()
    assert not snapshot.incomplete, snapshot.reasons
    assert_holds(snapshot, made)


async def test_puts_through_a_connection_that_fell_silent_wait_and_lose_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "_ATTEMPTS_IN_A_DEADLINE", PATIENCE_S)  # each may take a second
    made = entries()
    async with StallingProxy(bench.server.socket_path) as proxy:
        await bench.sink.close()
        bench.sink = bench.make_sink(proxy.url)
        async with bench.sink:
            await bench.warm_up()
            bench.under_way.clear()
            proxy.stall()
            tasks = bench.put_all(made)
            await bench.until_all_wait_but(tasks, FITTING)
            assert set((await outcomes_of(tasks)).values()) == {None}
            bench.nothing_is_held()
    assert bench.most_under_way == FITTING
    snapshot = await bench.freeze()
    assert not snapshot.incomplete, snapshot.reasons
    assert_holds(snapshot, made)


FORMS: dict[str, dict[str, Any]] = {
    "tokens": {"tokens": 100_000},
    "tokens as an array": {"prompt_token_ids": np.arange(100_000)},
    "experts as a list": {"tokens": 10, "routed_experts": [[[1, 2, 3, 4]] * 100] * 1_000},
    "experts as an array": {"tokens": 10, "routed_experts": np.zeros((1_000, 100, 4), "u1")},
    "experts as a string": {"tokens": 10, "routed_experts": "nrlre1:int8:1x1x1:" + "AAAA" * 100_000},
    "experts of no form": {"tokens": 10, "routed_experts": "x" * 400_000},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_a_record_above_the_bound_goes_alone(bench: Bench, form: dict[str, Any]) -> None:
    small, large = entry_of("small", 10), [entry_of(f"large{number}", **form) for number in range(4)]
    assert taking.take(large[0]).nbytes > BOUND
    bench.server.pause()
    tasks = bench.put_all([*large, small])
    await bench.until_all_wait_but(tasks, 1)
    bench.server.resume()
    assert set((await outcomes_of(tasks)).values()) == {None}
    assert bench.most_under_way == 1
    bench.nothing_is_held()
    snapshot = await bench.freeze()
    assert not snapshot.incomplete, snapshot.reasons
    assert {entry.model_call_id for entry in snapshot.entries} == set(tasks)


async def test_a_record_above_the_bound_waits_for_those_before_it_and_holds_back_those_behind(
    bench: Bench,
) -> None:
    before, large, behind = entry_of("before", 10), entry_of("large", 100_000), entry_of("behind", 10)
    bench.server.pause()
    tasks = bench.put_all([before, large, behind])
    await bench.until_all_wait_but(tasks, 1)
    assert bench.under_way == {"before"}
    bench.server.resume()
    assert set((await outcomes_of(tasks)).values()) == {None}
    assert bench.encoded == ["before", "large", "behind"]
    assert bench.most_under_way == 1
    assert_holds(await bench.freeze(), [before, large, behind])


@pytest.mark.parametrize("large", [True, False], ids=["on a thread", "in the loop"])
async def test_a_record_that_is_refused_gives_its_room_back(bench: Bench, *, large: bool) -> None:
    made = [entry_of(f"c{number}", 70_000 if large else TOKENS) for number in range(PUTS)]
    for entry in made:
        entry.generation_log_probs = [0.0]
    assert {type(error) for error in (await outcomes_of(bench.put_all(made))).values()} == {
        InvalidRecordError
    }
    bench.nothing_is_held()
    assert bench.fields() == {}


# What does not wait


@pytest.fixture
async def no_room(bench: Bench) -> Hold:
    """All room there is, held until the test ends it."""
    return await bench.executor._budget.hold(BOUND)


async def test_marks_refusals_and_announcements_go_through_while_puts_wait_for_room(
    bench: Bench, no_room: Hold
) -> None:
    await bench.sink.begin_call(ROLLOUT, "c0")
    tasks = bench.put_all(entries(5))
    await bench.until_all_wait_but(tasks, 0)
    async with asyncio.timeout(PATIENCE_S):
        await bench.sink.begin_call(ROLLOUT, "announced")
        await bench.sink.record_engine_refusal(ROLLOUT, model_call_id="refused", code="full")
        await bench.sink.mark_incomplete(ROLLOUT, "marked")
    assert not any(task.done() for task in tasks.values())
    assert {field for field in bench.fields() if field[:2] in (b"c:", b"f:", b"r:")} == {
        *(b"c:c0", b"c:announced", b"c:refused", b"f:marked")
    }
    no_room.end()
    assert set((await outcomes_of(tasks)).values()) == {None}
    snapshot = await bench.freeze()
    assert reasons_of(snapshot) == {
        (IncompleteCode.MARKED, "marked"),
        (IncompleteCode.LOST_CALL, "announced"),
    }
    assert [refusal.model_call_id for refusal in snapshot.refusals] == ["refused"]
    assert_holds(snapshot, entries(5))


# Puts that give up


async def test_a_put_that_finds_no_room_in_time_says_that_nothing_was_sent_and_nothing_was(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = entry_of("first", 60_000), entry_of("late")
    await bench.sink.begin_call(ROLLOUT, "late")
    bench.server.pause()
    tasks = bench.put_all([first])
    await bench.until_all_wait_but(tasks, 1)
    monkeypatch.setattr(bench.executor, "_timeout_s", 0.2)
    with pytest.raises(
        BackendUnavailableError, match=r"no room among max_inflight_bytes within 0\.2 s.*nothing was sent"
    ) as refused:
        await bench.put(late)
    assert (refused.value.rollout_id, refused.value.model_call_id) == (ROLLOUT, "late")
    assert "'late' of rollout r" in str(refused.value)
    assert bench.encoded == ["first"]
    bench.server.resume()
    assert set((await outcomes_of(tasks)).values()) == {None}
    bench.nothing_is_held()
    assert bench.fields()[b"c:late"] == b"n"
    assert b"r:late" not in bench.fields()
    snapshot = await bench.freeze()
    assert_holds(snapshot, [first])
    assert reasons_of(snapshot) == {(IncompleteCode.LOST_CALL, "late")}


async def test_puts_that_gave_up_make_room_for_nobody_and_may_be_repeated(
    bench: Bench, no_room: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = entries()
    with monkeypatch.context() as patched:
        patched.setattr(bench.executor, "_timeout_s", 0.1)
        outcomes = await outcomes_of(bench.put_all(made))
    assert {type(error) for error in outcomes.values()} == {BackendUnavailableError}
    assert all("nothing was sent" in str(error) for error in outcomes.values())
    assert bench.encoded == []
    assert bench.fields() == {}
    assert bench.executor._budget.held_bytes == no_room.nbytes == BOUND
    no_room.end()
    bench.nothing_is_held()
    assert set((await outcomes_of(bench.put_all(made))).values()) == {None}
    snapshot = await bench.freeze()
    assert not snapshot.incomplete, snapshot.reasons
    assert_holds(snapshot, made)


async def test_a_cancelled_put_that_waits_for_room_leaves_no_trace(bench: Bench, no_room: Hold) -> None:
    made = entries(6)
    await bench.sink.begin_call(ROLLOUT, "c1")
    tasks = bench.put_all(made)
    await bench.until_all_wait_but(tasks, 0)
    for cancelled in ("c1", "c2", "c4"):
        tasks[cancelled].cancel()
    await bench.until(lambda: bench.waiting == 3)
    no_room.end()
    outcomes = await outcomes_of(tasks)
    assert {call for call, outcome in outcomes.items() if outcome is not None} == {"c1", "c2", "c4"}
    assert sorted(bench.encoded) == ["c0", "c3", "c5"]
    bench.nothing_is_held()
    calls = {field[2:] for field in bench.fields() if field[:2] == b"c:"}
    assert calls == {b"c0", b"c1", b"c3", b"c5"}
    snapshot = await bench.freeze()
    assert reasons_of(snapshot) == {(IncompleteCode.LOST_CALL, "c1")}
    assert_holds(snapshot, [entry for entry in made if entry.model_call_id in ("c0", "c3", "c5")])


@pytest.mark.parametrize("cancelled_first", [True, False], ids=["cancelled first", "let in first"])
async def test_a_put_cancelled_in_the_moment_it_is_let_in_harms_nobody(
    bench: Bench, no_room: Hold, *, cancelled_first: bool
) -> None:
    made = entries(2 * FITTING)
    tasks = bench.put_all(made)
    await bench.until_all_wait_but(tasks, 0)
    if cancelled_first:
        tasks["c0"].cancel()
    no_room.end()
    if not cancelled_first:
        tasks["c0"].cancel()
    outcomes = await outcomes_of(tasks)
    assert isinstance(outcomes.pop("c0"), asyncio.CancelledError)
    assert set(outcomes.values()) == {None}
    bench.nothing_is_held()
    assert_holds(await bench.freeze(), made[1:])


async def test_cancelling_every_put_at_any_step_leaves_all_room_to_the_next(bench: Bench) -> None:
    for steps in range(30):
        tasks = bench.put_all(entry_of(f"s{steps}.{number}") for number in range(2 * FITTING))
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        bench.nothing_is_held()
    tasks = bench.put_all(entries())
    assert set((await outcomes_of(tasks)).values()) == {None}
    snapshot = await bench.freeze()
    assert not snapshot.incomplete, snapshot.reasons
    assert set(tasks) <= {entry.model_call_id for entry in snapshot.entries}


@pytest.mark.parametrize("tokens", [TOKENS, 70_000], ids=["in the loop", "on a thread"])
async def test_closing_answers_every_put_that_waits_for_room(bench: Bench, tokens: int) -> None:
    made = [entry_of(f"c{number}", tokens) for number in range(2 * FITTING)]
    await asyncio.gather(*(bench.sink.begin_call(ROLLOUT, entry.model_call_id) for entry in made))
    bench.server.pause()
    tasks, executor = bench.put_all(made), bench.executor
    await bench.until(lambda: len(bench.under_way) + bench.waiting == len(tasks))
    await bench.sink.close()
    outcomes = await outcomes_of(tasks)
    assert {type(error) for error in outcomes.values()} == {BackendUnavailableError}
    assert all("closed" in str(error) for error in outcomes.values())
    assert executor._budget.held_bytes == 0
    bench.server.resume()
    assert set((await outcomes_of(bench.put_all(made))).values()) == {None}
    snapshot = await bench.freeze()
    assert not snapshot.incomplete, snapshot.reasons
    assert_holds(snapshot, made)


# Callers of one batch

CALLERS = 20
LEAVING = {"c3", "c7", "c19"}


@pytest.fixture
async def batched(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Bench, list[list[str]], dict[str, asyncio.Task[None]]]]:
    """A sink with one connection; the calls of each script call of puts; tasks to cancel as they are sent."""
    await bench.sink.close()
    bench.sink = bench.make_sink(connections=1, max_inflight_bytes=2**26)
    sent: list[list[str]] = []
    cancel_when_sent: dict[str, asyncio.Task[None]] = {}

    def command(calls: list[Call], dialect: Dialect, *, by_source: bool) -> Any:
        if calls[0].step is Step.PUT:
            sent.append([str(call.args[1]) for call in calls])
            if len(calls) > 1:
                while cancel_when_sent:
                    cancel_when_sent.popitem()[1].cancel()
        return scripts.commands(calls, dialect, by_source=by_source)

    async with bench.sink:
        await bench.warm_up()
        monkeypatch.setattr(batches, "commands", command)
        yield bench, sent, cancel_when_sent


@pytest.mark.parametrize("when", ["before it is sent", "as it is sent"])
async def test_cancelling_some_callers_of_a_batch_touches_no_other(
    batched: tuple[Bench, list[list[str]], dict[str, asyncio.Task[None]]], when: str
) -> None:
    bench, sent, cancel_when_sent = batched
    made = entries(CALLERS, tokens=600)
    await asyncio.gather(*(bench.sink.begin_call(ROLLOUT, entry.model_call_id) for entry in made))
    bench.server.pause()
    tasks = bench.put_all([made[0]])
    await bench.until(lambda: len(sent) == 1)
    tasks |= bench.put_all(made[1:])
    await bench.until(lambda: len(bench.encoded) == CALLERS)
    leaving = {call: tasks[call] for call in LEAVING}
    if when == "before it is sent":
        for task in leaving.values():
            task.cancel()
    else:
        cancel_when_sent |= leaving
    bench.server.resume()
    outcomes = await outcomes_of(tasks)
    assert {call for call, outcome in outcomes.items() if outcome is not None} == LEAVING
    assert {type(outcomes[call]) for call in LEAVING} == {asyncio.CancelledError}
    assert not cancel_when_sent
    stored = set(tasks) if when == "as it is sent" else set(tasks) - LEAVING
    assert [set(calls) for calls in sent] == [{"c0"}, stored - {"c0"}]
    bench.nothing_is_held()
    await bench.sink.put(entry_of("later", 10))  # after which the batch before it is done
    snapshot = await bench.freeze()
    assert_holds(
        snapshot, [entry for entry in made if entry.model_call_id in stored] + [entry_of("later", 10)]
    )
    assert reasons_of(snapshot) == {(IncompleteCode.LOST_CALL, call) for call in set(tasks) - stored}


async def test_an_entry_changed_while_it_waits_is_stored_as_it_is_then(bench: Bench) -> None:
    large, waiting = entry_of("large", 100_000), entry_of("waiting", 10)
    bench.server.pause()
    tasks = bench.put_all([large, waiting])
    await bench.until_all_wait_but(tasks, 1)
    waiting.prompt_token_ids = [7, 8, 9]
    waiting.model = "changed"
    bench.server.resume()
    assert set((await outcomes_of(tasks)).values()) == {None}
    assert_holds(await bench.freeze(), [large, waiting])


async def test_an_entry_that_became_that_of_another_call_while_it_waited_is_refused(bench: Bench) -> None:
    large, waiting = entry_of("large", 100_000), entry_of("waiting", 10)
    bench.server.pause()
    tasks = bench.put_all([large, waiting])
    await bench.until_all_wait_but(tasks, 1)
    waiting.model_call_id = "another"
    bench.server.resume()
    outcomes = await outcomes_of(tasks)
    assert isinstance(outcomes["waiting"], InvalidRecordError)
    assert outcomes["large"] is None
    bench.nothing_is_held()
    assert_holds(await bench.freeze(), [large])


async def test_a_put_that_waits_while_its_attempt_is_over_and_its_call_begun_again_is_refused(
    bench: Bench,
) -> None:
    await bench.sink.begin_call(ROLLOUT, "c")
    with await bench.executor.room(BOUND, Subject(ROLLOUT), deadline=bench.executor.deadline()):
        late = bench.put_all([entry_of("c", 10)])
        await bench.until(lambda: bench.waiting == 1)
        async with RedisTokenSource(bench.server.url, namespace=bench.namespace) as source:
            await source.delete([ROLLOUT])
        await bench.sink.begin_call(ROLLOUT, "c")
    assert isinstance((await outcomes_of(late))["c"], TokenCaptureRetiredError)
    snapshot = await bench.freeze()
    assert_holds(snapshot, [])
    assert reasons_of(snapshot) == {(IncompleteCode.LOST_CALL, "c")}
