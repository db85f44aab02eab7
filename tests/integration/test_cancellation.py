"""A cancelled caller leaves nothing behind: no connection out of step, no lost call that looks complete."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from support.sample_entries import exact_dump, sample_entry
from support.servers import RealServer

from gym_capture_redis.errors import TokenCaptureFrozenError, TokenCaptureRetiredError
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import TokenCaptureSnapshot
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

TASKS = 1_000
FOLLOWING_CALLS = 300
MOST_STEPS_OF_THE_LOOP = 60
OPERATIONS = ("put", "begin_call", "mark_incomplete", "freeze", "drop", "retire", "delete")


@dataclass
class Clients:
    """One sink and one source, whose event loop may report nothing."""

    sink: RedisTokenSink
    source: RedisTokenSource
    key: Callable[[str], bytes]
    server: RealServer
    reported: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
async def clients(
    real_server: RealServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Clients]:
    made = Clients(
        RedisTokenSink(real_server.url, namespace=namespace, timeout_s=60),
        RedisTokenSource(real_server.url, namespace=namespace, timeout_s=60, chunk_bytes=1),
        lambda rollout: rollout_key(namespace, rollout),
        real_server,
    )
    asyncio.get_running_loop().set_exception_handler(lambda _, context: made.reported.append(context))
    with caplog.at_level(logging.WARNING):
        yield made
        await made.sink.close()
        await made.source.close()
        gc.collect()
        await asyncio.sleep(0)
    assert made.reported == []
    assert [record.getMessage() for record in caplog.records] == []


async def all_of(calls: list[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*calls)


def payload(rollout: str, call: str = "first") -> Any:
    """An entry that could be of no other call."""
    return sample_entry(rollout, call, prompt_token_ids=[*rollout.encode()] * 100, response_id=rollout)


async def prepare(clients: Clients, rollout: str, operation: str) -> Callable[[], Awaitable[Any]]:
    """Bring a rollout to where ``operation`` makes sense, and return it, not begun."""
    sink, source = clients.sink, clients.source
    await sink.begin_call(rollout, "first")
    await sink.put(payload(rollout))
    ends = [rollout, f"{rollout}.unknown"]
    if operation == "put":
        await sink.begin_call(rollout, "second")
    if operation == "freeze":
        await sink.put(payload(rollout, "second"))
    if operation == "drop":
        snapshot = await source.freeze(rollout)
        return partial(source.drop, rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    made: dict[str, Callable[[], Awaitable[Any]]] = {
        "put": partial(sink.put, payload(rollout, "second")),
        "begin_call": partial(sink.begin_call, rollout, "second"),
        "mark_incomplete": partial(sink.mark_incomplete, rollout, "second"),
        "freeze": partial(source.freeze, rollout),
        "retire": partial(source.retire, ends),
        "delete": partial(source.delete, ends),
    }
    return made[operation]


async def cancel_somewhere(operation: Callable[[], Awaitable[Any]], choice: random.Random) -> str:
    async def run() -> None:
        await operation()

    task = asyncio.create_task(run())
    for _ in range(choice.randrange(MOST_STEPS_OF_THE_LOOP)):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return "cancelled"
    return "done"


async def check_rollout(clients: Clients, rollout: str, operation: str, outcome: str) -> None:
    client = clients.server.client()
    fields: Any = client.hgetall(clients.key(rollout))
    client.close()
    try:
        snapshot = await clients.source.freeze(rollout)
    except TokenCaptureRetiredError:
        assert operation in ("drop", "retire")
        return
    if operation in ("drop", "retire") and outcome == "done":
        pytest.fail(f"{operation} returned, and the rollout was frozen")
    check_snapshot(snapshot, rollout, fields)
    if outcome == "done":
        expected = {"put": {"first", "second"}, "delete": set(), "freeze": {"first", "second"}}
        calls = {entry.model_call_id for entry in snapshot.entries}
        assert calls == expected.get(operation, {"first"})
        assert snapshot.incomplete == (operation in ("begin_call", "mark_incomplete"))


def check_snapshot(snapshot: TokenCaptureSnapshot, rollout: str, fields: dict[bytes, bytes]) -> None:
    for entry in snapshot.entries:
        assert exact_dump(entry) == exact_dump(payload(rollout, entry.model_call_id))
    assert {name[2:].decode() for name in fields if name.startswith(b"r:")} == {
        entry.model_call_id for entry in snapshot.entries
    }
    lost = any(
        name.startswith(b"f:") or (name.startswith(b"c:") and row == b"n") for name, row in fields.items()
    )
    assert snapshot.incomplete == lost, "announced or marked, and complete"


@pytest.mark.parametrize("seed", [1])
async def test_a_thousand_cancelled_callers_leave_every_later_answer_right(
    clients: Clients, seed: int
) -> None:
    choice = random.Random(seed)
    plan = {f"r{number}": OPERATIONS[number % len(OPERATIONS)] for number in range(TASKS)}
    operations = await all_of([prepare(clients, rollout, operation) for rollout, operation in plan.items()])
    outcomes = await all_of([cancel_somewhere(operation, choice) for operation in operations])
    assert set(outcomes) == {"cancelled", "done"}, "the points of cancellation are badly chosen"

    async def follow(rollout: str) -> None:
        await clients.sink.begin_call(rollout, "first")
        await clients.sink.put(payload(rollout))
        snapshot = await clients.source.freeze(rollout)
        assert snapshot.rollout_id == rollout
        assert [exact_dump(entry) for entry in snapshot.entries] == [exact_dump(payload(rollout))]
        assert not snapshot.incomplete

    await all_of([follow(f"later{number}") for number in range(FOLLOWING_CALLS)])
    await all_of(
        [
            check_rollout(clients, rollout, operation, outcome)
            for (rollout, operation), outcome in zip(plan.items(), outcomes, strict=True)
        ]
    )


async def test_a_put_cancelled_while_the_server_hangs_still_tells_by_its_intent(
    namespace: str, valkey9: RealServer
) -> None:
    with RealServer(valkey9.binary) as server:
        sink = RedisTokenSink(server.url, namespace=namespace, timeout_s=60)
        await sink.begin_call("r", "lost")
        server.pause()
        try:
            tasks = [asyncio.create_task(sink.put(payload("r", f"c{number}"))) for number in range(8)]
            tasks.append(asyncio.create_task(sink.put(payload("r", "lost"))))
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(outcome) for outcome in done} == {asyncio.CancelledError}
        finally:
            server.resume()
        await sink.put(payload("other"))
        async with RedisTokenSource(server.url, namespace=namespace) as source:
            snapshot = await source.freeze("r")
            assert snapshot.incomplete == ("lost" not in {entry.model_call_id for entry in snapshot.entries})
            assert len((await source.freeze("other")).entries) == 1
        await sink.close()


async def test_a_cancelled_freeze_holds_its_fence_or_was_never_made(clients: Clients) -> None:
    await clients.sink.put(payload("r"))
    task = asyncio.create_task(clients.source.freeze("r"))
    await asyncio.sleep(0)
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    try:
        await clients.sink.put(payload("r", "second"))
    except TokenCaptureFrozenError:
        expected = {"first"}
    else:
        expected = {"first", "second"}
    snapshot = await clients.source.freeze("r")
    assert {entry.model_call_id for entry in snapshot.entries} == expected
    assert not snapshot.incomplete


async def test_closing_answers_everyone_who_waits(namespace: str, valkey9: RealServer) -> None:
    with RealServer(valkey9.binary) as server:
        sink = RedisTokenSink(server.url, namespace=namespace, timeout_s=60)
        await sink.begin_call("r", "first")
        server.pause()
        try:
            waiting = [asyncio.create_task(sink.begin_call("r", f"c{number}")) for number in range(200)]
            await asyncio.sleep(0)
            async with asyncio.timeout(30):
                await sink.close()
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            server.resume()
    assert {type(outcome).__name__ for outcome in outcomes} == {"BackendUnavailableError"}
    assert all("closed" in str(outcome) for outcome in outcomes)
