"""Steps that a server acknowledged and forgot come back by the workers that know of them, or show as lost."""

from __future__ import annotations

import asyncio
import base64
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.forgetting import aof_size, come_back_empty, come_back_short, restart
from support.polling import wait_until
from support.sample_entries import exact_dump, sample_entry
from support.sequences import random_ids
from support.servers import RealServer
from support.stored_state import FIELD, parse_state

from gym_capture_redis.errors import BackendUnavailableError
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import IncompleteCode, TokenCaptureSnapshot
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

PATIENCE_S = 30.0
SETTINGS: dict[str, Any] = {"namespace": "run", "timeout_s": PATIENCE_S}
KEY = rollout_key("run", "r")
LONG_EXPERTS = "nrlre1:int8:8192x48x8:" + base64.b64encode(random.Random(0).randbytes(3 * 2**20)).decode()
"""Stored in three parts, ahead of their record."""

LONG_AGO_S = 0.05
"""For sources that do not wait for what may come back."""


@pytest.fixture
async def new_worker(server: RealServer) -> AsyncIterator[Callable[..., RedisTokenSink]]:
    workers: list[RedisTokenSink] = []

    def worker(**settings: Any) -> RedisTokenSink:
        workers.append(RedisTokenSink(server.url, **SETTINGS, **settings))
        return workers[-1]

    yield worker
    for each in workers:
        await each.close()


async def capture(sink: RedisTokenSink, *calls: str, rollout: str = "r", **fields: Any) -> None:
    for call in calls:
        await sink.begin_call(rollout, call)
        await sink.put(sample_entry(rollout, call, **fields))


async def frozen(server: RealServer, rollout: str = "r") -> TokenCaptureSnapshot:
    async with RedisTokenSource(server.url, **SETTINGS, settle_s=LONG_AGO_S) as source:
        return await source.freeze(rollout)


def reasons(snapshot: TokenCaptureSnapshot) -> list[tuple[str, str]]:
    return [(reason.code, reason.model_call_id) for reason in snapshot.reasons]


def calls(snapshot: TokenCaptureSnapshot) -> set[str]:
    return {entry.model_call_id for entry in snapshot.entries}


def fields_of(server: RealServer, key: bytes = KEY) -> dict[bytes, bytes]:
    with server.client() as client:
        held: Any = client.hgetall(key.decode())
    return dict(held)


async def until(server: RealServer, happened: Callable[[dict[bytes, bytes]], bool]) -> None:
    """Poll the rollout until what an idle worker does is done."""
    await asyncio.to_thread(
        wait_until,
        lambda: happened(fields_of(server)),
        "the rollout got its steps back",
        timeout_s=PATIENCE_S,
    )


def has_steps(*numbers: int) -> Callable[[dict[bytes, bytes]], bool]:
    return lambda fields: {b"o:%d" % number for number in numbers} <= fields.keys()


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


NewWorker = Callable[..., RedisTokenSink]
Step = Callable[[RedisTokenSource, TokenCaptureSnapshot], Awaitable[None]]


# One worker


async def test_a_busy_worker_puts_back_what_was_lost_before_it_goes_on(
    server: RealServer, new_worker: NewWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = new_worker()
    await capture(worker, "first")
    size = aof_size(server)
    await capture(worker, "second")
    await worker.begin_call("r", "third")
    before = fields_of(server)
    await asyncio.to_thread(come_back_short, server, size)
    await worker.put(sample_entry("r", "third"))
    after = fields_of(server)
    assert {name: after[name] for name in before if name.startswith(b"o:")} == {
        name: value for name, value in before.items() if name.startswith(b"o:")
    }
    snapshot = await frozen(server)
    assert (reasons(snapshot), calls(snapshot)) == ([], {"first", "second", "third"})
    (message,) = errors_in(caplog)
    assert "without 3 of the newest steps" in message


async def test_steps_that_are_not_kept_show_though_others_took_their_numbers(
    server: RealServer, new_worker: NewWorker
) -> None:
    forgetful, other = new_worker(max_recent_bytes=0), new_worker()
    await capture(other, "before")
    size = aof_size(server)
    await capture(forgetful, "lost")
    await asyncio.to_thread(come_back_short, server, size)
    await capture(other, "after", "long after")
    await forgetful.begin_call("another", "call")
    assert reasons(await frozen(server)) == [(IncompleteCode.LOST_STEPS, "")]


async def test_an_idle_worker_notices_by_itself(server: RealServer, new_worker: NewWorker) -> None:
    worker = new_worker()
    await worker.begin_call("r", "first")
    size = aof_size(server)
    await worker.put(sample_entry("r", "first"))
    await asyncio.to_thread(come_back_short, server, size)
    await until(server, has_steps(2))
    snapshot = await frozen(server)
    assert (reasons(snapshot), calls(snapshot)) == ([], {"first"})


async def test_an_idle_worker_that_keeps_nothing_notices_that_something_is_missing(
    server: RealServer, new_worker: NewWorker
) -> None:
    worker = new_worker(max_recent_bytes=0)
    await capture(worker, "first")
    size = aof_size(server)
    await capture(worker, "second")
    await asyncio.to_thread(come_back_short, server, size)
    await until(server, lambda fields: parse_state(fields[FIELD])["seq"] == b"4")
    assert reasons(await frozen(server)) == [(IncompleteCode.LOST_STEPS, "")]


async def test_every_kind_of_step_comes_back(server: RealServer, new_worker: NewWorker) -> None:
    worker = new_worker()
    entry = sample_entry("r", "long", routed_experts=LONG_EXPERTS)
    await worker.begin_call("r", "known before")
    size = aof_size(server)
    await worker.put(entry)
    await worker.begin_call("r", "refused")
    await worker.record_engine_refusal("r", model_call_id="refused", code="too-long")
    await worker.mark_incomplete("r", "marked")
    before = fields_of(server)
    assert sum(name.startswith(b"b:") for name in before) > 2
    await asyncio.to_thread(come_back_short, server, size)
    await until(server, has_steps(*range(1, int(parse_state(before[FIELD])["seq"]) + 1)))
    after = fields_of(server)
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} <= {b"s", b"f:marked"}
    snapshot = await frozen(server)
    assert reasons(snapshot) == [
        (IncompleteCode.MARKED, "marked"),
        (IncompleteCode.LOST_CALL, "known before"),
    ]
    assert [exact_dump(each) for each in snapshot.entries] == [exact_dump(entry)]
    assert [refusal.model_call_id for refusal in snapshot.refusals] == ["refused"]


async def test_what_was_put_back_is_put_back_again_after_the_next_loss(
    server: RealServer, new_worker: NewWorker
) -> None:
    worker = new_worker()
    await worker.begin_call("r", "first")
    size = aof_size(server)
    await worker.put(sample_entry("r", "first"))
    for _ in range(2):
        await asyncio.to_thread(come_back_short, server, size)
        await until(server, has_steps(2))
    assert reasons(await frozen(server)) == []


async def test_a_server_at_its_memory_limit_gets_back_what_it_lost(
    server: RealServer, new_worker: NewWorker
) -> None:
    worker = new_worker()
    await worker.begin_call("r", "first")
    size = aof_size(server)
    await worker.put(sample_entry("r", "first"))
    server.config["maxmemory"] = "1mb"  # less than it takes to run
    await asyncio.to_thread(come_back_short, server, size)
    await until(server, has_steps(2))
    with pytest.raises(BackendUnavailableError, match="out of memory"):
        await worker.begin_call("r", "second")
    assert reasons(await frozen(server)) == []


async def test_a_server_without_a_file_forgets_the_attempt_and_the_worker_says_so(
    server: RealServer, new_worker: NewWorker, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    server.config["appendonly"] = "no"
    server.start()
    worker = new_worker(durability="memory")
    await capture(worker, "first", "second")
    await asyncio.to_thread(come_back_empty, server)
    await until(server, has_steps(1))
    with server.client() as client:
        assert 0 < client.ttl(KEY.decode()) <= 86_400  # it may have been consumed long ago
    async with RedisTokenSource(server.url, **SETTINGS, durability="memory", settle_s=LONG_AGO_S) as source:
        snapshot = await source.freeze("r")
    assert (reasons(snapshot), calls(snapshot)) == ([(IncompleteCode.LOST_STEPS, "")], set())
    (message,) = errors_in(caplog)
    assert "Rollout r" in message


async def until_nothing_is_kept(worker: RedisTokenSink) -> None:
    healer = worker._executors.get()._healer
    assert healer is not None
    await asyncio.to_thread(wait_until, lambda: not healer.recent.nbytes, "all is old", timeout_s=PATIENCE_S)


def worker_at(server: RealServer, new_worker: NewWorker, durability: str) -> RedisTokenSink:
    """A worker whose steps are soon too old to be kept, and the server as this level needs it."""
    server.kill()
    server.config["appendfsync"] = "always" if durability == "fsync" else "everysec"
    server.start()
    return new_worker(durability=durability, settle_s=LONG_AGO_S)


@pytest.mark.parametrize("durability", ["memory", "aof", "fsync"])
async def test_a_worker_that_did_nothing_for_long_notices_a_server_that_comes_back_empty(
    server: RealServer, new_worker: NewWorker, durability: str
) -> None:
    worker = worker_at(server, new_worker, durability)
    for rollout in ("r", "s"):
        await capture(worker, "first", rollout=rollout)
    for _ in range(2):  # also one that was met as an empty one
        await until_nothing_is_kept(worker)
        await asyncio.to_thread(come_back_empty, server)
        await until(server, has_steps(1))
        async with RedisTokenSink(server.url, **SETTINGS) as other:
            await other.begin_call("s", "second")
            await other.put(sample_entry("s", "second"))
        await asyncio.to_thread(
            wait_until,
            lambda: fields_of(server, rollout_key("run", "s")).keys() >= {b"f:", b"r:second"},
            "the other rollout is marked too",
            timeout_s=PATIENCE_S,
        )
        for rollout, there in (("r", set[str]()), ("s", {"second"})):
            snapshot = await frozen(server, rollout)
            assert (reasons(snapshot), calls(snapshot)) == ([(IncompleteCode.LOST_STEPS, "")], there)


@pytest.mark.parametrize("durability", ["memory", "aof", "fsync"])
async def test_a_worker_that_did_nothing_for_long_notices_that_an_older_file_is_back(
    server: RealServer, new_worker: NewWorker, durability: str
) -> None:
    worker = worker_at(server, new_worker, durability)
    await capture(worker, "first")
    size = aof_size(server)
    await capture(worker, "second")
    await until_nothing_is_kept(worker)
    await asyncio.to_thread(come_back_short, server, size)
    await until(server, lambda fields: parse_state(fields[FIELD])["seq"] == b"4")
    assert reasons(await frozen(server)) == [(IncompleteCode.LOST_STEPS, "")]


async def test_a_worker_that_did_nothing_for_long_has_nothing_to_say_of_a_server_that_lost_nothing(
    server: RealServer, new_worker: NewWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = new_worker(settle_s=LONG_AGO_S)
    for number in range(30):
        await capture(worker, "first", rollout=f"other-{number}")
    await capture(worker, "first")
    before = fields_of(server)
    for _ in range(2):
        await until_nothing_is_kept(worker)
        await asyncio.to_thread(restart, server)
        await worker.begin_call("another", "call")
        assert fields_of(server) == before
    assert errors_in(caplog) == []


async def begin(worker: RedisTokenSink) -> None:
    await worker.begin_call("r", "third")


async def put(worker: RedisTokenSink) -> None:
    await worker.put(sample_entry("r", "third"))


async def mark(worker: RedisTokenSink) -> None:
    await worker.mark_incomplete("r", "third")


async def refuse(worker: RedisTokenSink) -> None:
    await worker.record_engine_refusal("r", model_call_id="third", code="full")


async def freeze_it(worker: RedisTokenSink) -> None:
    async with RedisTokenSource(str(worker._settings.url), **SETTINGS, settle_s=LONG_AGO_S) as source:
        await source.freeze("r")


@pytest.mark.parametrize("step", [begin, put, mark, refuse, freeze_it])
async def test_a_mark_of_what_was_lost_stays_for_good_once_somebody_speaks_of_the_rollout(
    server: RealServer, new_worker: NewWorker, step: Callable[[RedisTokenSink], Awaitable[None]]
) -> None:
    worker = new_worker()
    await capture(worker, "first")
    await asyncio.to_thread(come_back_empty, server)
    await until(server, has_steps(1))
    with server.client() as client:
        assert client.ttl(KEY.decode()) > 0
        await step(new_worker())
        assert client.ttl(KEY.decode()) == -1
    assert (await frozen(server)).incomplete


# Several workers


async def test_each_worker_puts_back_its_own_steps_in_whatever_order_they_come(
    server: RealServer, new_worker: NewWorker
) -> None:
    one, other = new_worker(), new_worker()
    await one.begin_call("r", "first")
    size = aof_size(server)
    await one.put(sample_entry("r", "first"))
    await capture(other, "second")
    await asyncio.to_thread(come_back_short, server, size)
    await other.begin_call("another", "call")  # puts back steps 3 and 4 first
    assert not has_steps(2)(fields_of(server))
    assert has_steps(3, 4)(fields_of(server))
    await until(server, has_steps(2))
    snapshot = await frozen(server)
    assert (reasons(snapshot), calls(snapshot)) == ([], {"first", "second"})


async def test_until_every_worker_has_come_the_rollout_is_short_of_steps(
    server: RealServer, new_worker: NewWorker
) -> None:
    gone, alive = new_worker(), new_worker()
    await capture(alive, "first")
    size = aof_size(server)
    await capture(gone, "second")
    await capture(alive, "third")
    await gone.close()
    await asyncio.to_thread(come_back_short, server, size)
    await alive.begin_call("another", "call")
    snapshot = await frozen(server)
    assert (reasons(snapshot), calls(snapshot)) == ([(IncompleteCode.LOST_STEPS, "")], {"first", "third"})
    assert "3–4" in snapshot.reasons[0].detail  # noqa: RUF001


async def test_a_worker_that_has_only_heard_of_a_number_says_that_it_is_missing(
    server: RealServer, new_worker: NewWorker
) -> None:
    gone, alive = new_worker(), new_worker()
    await capture(alive, "first")
    size = aof_size(server)
    await capture(gone, "second")
    await alive.begin_call("r", "first")  # nothing to do; the reply counts four steps
    await gone.close()
    await asyncio.to_thread(come_back_short, server, size)
    await alive.begin_call("another", "call")
    assert reasons(await frozen(server)) == [(IncompleteCode.LOST_STEPS, "")]


async def test_steps_whose_numbers_went_to_others_make_the_rollout_incomplete(
    server: RealServer, new_worker: NewWorker
) -> None:
    one, other = new_worker(), new_worker()
    await capture(one, "first")
    size = aof_size(server)
    await capture(other, "second")
    await asyncio.to_thread(come_back_short, server, size)
    await capture(one, "third")
    await other.begin_call("another", "call")
    snapshot = await frozen(server)
    assert calls(snapshot) == {"first", "second", "third"}
    assert reasons(snapshot) == [(IncompleteCode.LOST_STEPS, "second")]


async def test_a_put_waits_for_the_blocks_that_another_worker_puts_back(
    server: RealServer, new_worker: NewWorker
) -> None:
    one, other = new_worker(), new_worker()
    prompt = random_ids(600)
    await one.begin_call("r", "first")
    await other.begin_call("r", "second")
    size = aof_size(server)
    await one.put(sample_entry("r", "first", prompt_token_ids=prompt))
    await other.begin_call("r", "third")  # learns which blocks are there
    second = sample_entry("r", "second", prompt_token_ids=prompt + random_ids(300, seed=1))
    await other.put(second)
    await asyncio.to_thread(come_back_short, server, size)
    await other.begin_call("another", "call")
    assert b"r:second" not in fields_of(server)
    await until(server, has_steps(*range(1, 6)))
    await other.put(sample_entry("r", "third"))
    snapshot = await frozen(server)
    assert (reasons(snapshot), calls(snapshot)) == ([], {"first", "second", "third"})


async def test_a_put_whose_blocks_nobody_puts_back_is_marked(
    server: RealServer, new_worker: NewWorker
) -> None:
    gone, alive = new_worker(), new_worker(settle_s=1.0)
    prompt = random_ids(600)
    await alive.begin_call("r", "second")
    size = aof_size(server)
    await gone.put(sample_entry("r", "first", prompt_token_ids=prompt))
    await alive.begin_call("r", "third")
    await alive.put(sample_entry("r", "second", prompt_token_ids=prompt + random_ids(300, seed=1)))
    await gone.close()
    await asyncio.to_thread(come_back_short, server, size)
    await until(server, lambda fields: b"f:second" in fields)
    assert (IncompleteCode.LOST_STEPS, "second") in reasons(await frozen(server))


# After the freeze


async def test_a_mark_that_was_lost_comes_back_and_the_snapshot_cannot_be_dropped(
    server: RealServer, new_worker: NewWorker
) -> None:
    worker = new_worker()
    await capture(worker, "first")
    snapshot = await frozen(server)
    size = aof_size(server)
    await worker.mark_incomplete("r", "second")
    await asyncio.to_thread(come_back_short, server, size)
    await worker.begin_call("another", "call")
    async with RedisTokenSource(server.url, **SETTINGS, settle_s=LONG_AGO_S) as source:
        assert not await source.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        again = await source.freeze("r")
    assert again.snapshot_id == snapshot.snapshot_id
    assert reasons(again) == [(IncompleteCode.MARKED, "second")]


async def test_a_rollout_frozen_too_early_is_marked_and_the_short_snapshot_cannot_be_dropped(
    server: RealServer, new_worker: NewWorker
) -> None:
    worker = new_worker()
    await worker.begin_call("r", "first")
    await worker.put(sample_entry("r", "first"))
    size = aof_size(server)
    await capture(worker, "second")
    await asyncio.to_thread(come_back_short, server, size)
    short = await frozen(server)
    assert (short.incomplete, calls(short)) == (False, {"first"})
    await worker.mark_incomplete("another")
    async with RedisTokenSource(server.url, **SETTINGS, settle_s=LONG_AGO_S) as source:
        assert not await source.drop("r", snapshot_id=short.snapshot_id, version=short.version)
        again = await source.freeze("r")
    assert (again.snapshot_id, reasons(again)) == (short.snapshot_id, [(IncompleteCode.LOST_STEPS, "second")])


@pytest.mark.parametrize("many", [False, True])
async def test_a_freeze_right_after_the_restart_waits_and_sees_what_idle_workers_put_back(
    server: RealServer, new_worker: NewWorker, many: bool
) -> None:
    one, other = new_worker(), new_worker()
    await one.begin_call("r", "first")
    size = aof_size(server)
    await one.put(sample_entry("r", "first"))
    await capture(other, "second")
    await asyncio.to_thread(come_back_short, server, size)
    async with RedisTokenSource(server.url, **SETTINGS) as source:
        if many:
            frozen_by_id = {each.rollout_id: each.snapshot async for each in source.freeze_many(["r", "u"])}
            snapshot, unknown = frozen_by_id["r"], frozen_by_id["u"]
            assert unknown is not None
            assert (unknown.incomplete, unknown.version) == (False, 1)
        else:
            snapshot = await source.freeze("r")
    assert snapshot is not None
    assert (reasons(snapshot), calls(snapshot)) == ([], {"first", "second"})


async def freeze(source: RedisTokenSource, _: TokenCaptureSnapshot) -> None:
    await source.freeze("unknown")


async def drop(source: RedisTokenSource, snapshot: TokenCaptureSnapshot) -> None:
    await source.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)


@pytest.mark.parametrize("step", [freeze, drop])
async def test_on_a_server_that_has_just_been_started_nothing_is_frozen_or_dropped(
    server: RealServer, new_worker: NewWorker, step: Step
) -> None:
    await capture(new_worker(), "first")
    snapshot = await frozen(server)
    before = fields_of(server)
    settings = SETTINGS | {"timeout_s": 0.3, "settle_s": 600.0}
    async with RedisTokenSource(server.url, **settings) as source:
        with pytest.raises(BackendUnavailableError, match="started or promoted a moment ago"):
            await step(source, snapshot)
    assert fields_of(server) == before
    assert fields_of(server, rollout_key("run", "unknown")) == {}


# Where nothing was lost


async def test_a_restart_that_loses_nothing_changes_nothing(
    server: RealServer, new_worker: NewWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = new_worker()
    entry = sample_entry("r", "long", routed_experts=LONG_EXPERTS)
    for rollout in ("r", "frozen", "dropped"):
        await capture(worker, "first", "first", rollout=rollout)
        await worker.begin_call(rollout, "refused")
        await worker.record_engine_refusal(rollout, model_call_id="refused", code="too-long")
    await worker.put(entry)
    await worker.mark_incomplete("frozen", "marked")
    await frozen(server, "frozen")
    snapshot = await frozen(server, "dropped")
    async with RedisTokenSource(server.url, **SETTINGS, settle_s=LONG_AGO_S) as source:
        assert await source.drop("dropped", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    keys = [rollout_key("run", rollout) for rollout in ("r", "frozen", "dropped")]
    before = [fields_of(server, key) for key in keys]
    await asyncio.to_thread(restart, server)
    await worker.begin_call("another", "call")
    assert [fields_of(server, key) for key in keys] == before
    assert errors_in(caplog) == []


async def test_an_id_that_was_deleted_and_begun_again_before_the_restart_is_a_new_attempt(
    server: RealServer, new_worker: NewWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = new_worker()
    async with RedisTokenSource(server.url, **SETTINGS) as source:
        await capture(worker, "first", "second")
        await source.delete(["r"])
        await capture(worker, "first")
    await asyncio.to_thread(restart, server)
    await capture(worker, "third")
    snapshot = await frozen(server)
    assert (reasons(snapshot), calls(snapshot)) == ([], {"first", "third"})
    assert errors_in(caplog) == []


async def test_an_attempt_that_was_deleted_does_not_come_back(
    server: RealServer, new_worker: NewWorker
) -> None:
    worker = new_worker()
    await capture(worker, "first")
    async with RedisTokenSource(server.url, **SETTINGS) as source:
        await source.delete(["r"])
    await asyncio.to_thread(restart, server)
    await worker.begin_call("another", "call")
    state = parse_state(fields_of(server)[FIELD])
    assert (state["records"], state["failures"]) == (b"0", b"1")  # it cannot be told from one that was lost
