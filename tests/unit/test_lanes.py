"""Lanes share their jobs fairly, wake as often as needed, and leave nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import TimeoutError as NoReplyError

from gym_capture_redis import lanes as lanes_module
from gym_capture_redis.connection import EmbeddedLease
from gym_capture_redis.errors import BackendUnavailableError
from gym_capture_redis.lanes import MAX_BATCH_BYTES, MAX_BATCH_CALLS, Lanes
from gym_capture_redis.scripts import Call, Reply, Step, peek
from gym_capture_redis.settings import SinkSettings

PATIENCE_S = 30.0
LANES = 2


class Server:
    """Answers each call with its key, once it is open."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.begun = asyncio.Semaphore(0)
        self.closed_links = 0
        self.silent_links = 0
        self.open = asyncio.Event()
        self.open.set()

    def link(self, *_: Any) -> Link:
        silent = self.silent_links > 0
        self.silent_links -= silent
        return Link(self, silent=silent)


class Link:
    flagged = True
    run_id = "server"

    def __init__(self, server: Server, *, silent: bool) -> None:
        self._server = server
        self._silent = silent

    async def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        keys = [command[3] for command in commands]
        self._server.batches.append(keys)
        self._server.begun.release()
        if self._silent:
            await asyncio.Event().wait()
        await self._server.open.wait()
        return [[b"OK", b"incarnation", 1, 1, key] for key in keys]

    async def close(self) -> None:
        self._server.closed_links += 1


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(lanes_module, "Link", made.link)
    return made


@pytest.fixture
async def lanes(server: Server) -> AsyncIterator[Lanes]:
    assert server.batches == []
    settings = SinkSettings.build("redis://server", "run", {"timeout_s": 4})
    made = Lanes(settings, EmbeddedLease(settings), count=LANES, name="lane")
    yield made
    await made.close()


def submit(lanes: Lanes, call: Call) -> asyncio.Future[Reply]:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    return lanes.submit(call, by_source=False, deadline=deadline)


def calls(count: int) -> list[Call]:
    return [peek(b"key %d" % number) for number in range(count)]


async def answers(futures: list[asyncio.Future[Reply]]) -> list[Any]:
    async with asyncio.timeout(PATIENCE_S):
        return [reply.rest[0] for reply in await asyncio.gather(*futures)]


@pytest.mark.parametrize("count", [1, LANES, MAX_BATCH_CALLS, MAX_BATCH_CALLS + 1, 500])
async def test_every_caller_gets_its_own_answer(lanes: Lanes, server: Server, count: int) -> None:
    for _ in range(3):
        assert await answers([submit(lanes, call) for call in calls(count)]) == [
            call.key for call in calls(count)
        ]
    assert max(map(len, server.batches)) <= MAX_BATCH_CALLS


async def test_what_waits_is_sent_in_few_pipelines(lanes: Lanes, server: Server) -> None:
    await answers([submit(lanes, call) for call in calls(4 * MAX_BATCH_CALLS)])
    assert [len(batch) for batch in server.batches] == [MAX_BATCH_CALLS] * 4


async def test_a_pipeline_ends_with_the_job_that_fills_it(lanes: Lanes, server: Server) -> None:
    large = Call(Step.PUT, b"large", (bytes(MAX_BATCH_BYTES),))
    await answers([submit(lanes, call) for call in (peek(b"before"), large, peek(b"after"))])
    assert server.batches == [[b"before", b"large"], [b"after"]]


async def test_a_caller_that_left_is_passed_over(lanes: Lanes, server: Server) -> None:
    left, stayed = [submit(lanes, call) for call in calls(2)]
    left.cancel()
    assert await answers([stayed]) == [b"key 1"]
    assert server.batches == [[b"key 1"]]


async def test_a_lane_that_is_busy_does_not_hold_what_comes_next(lanes: Lanes, server: Server) -> None:
    server.open.clear()
    futures = []
    for key in (b"first", b"second"):
        futures.append(submit(lanes, peek(key)))
        async with asyncio.timeout(PATIENCE_S):
            await server.begun.acquire()
    assert server.batches == [[b"first"], [b"second"]]
    server.open.set()
    assert await answers(futures) == [b"first", b"second"]


async def test_an_attempt_on_a_silent_connection_ends_in_time_for_another(
    lanes: Lanes, server: Server
) -> None:
    server.silent_links = 1
    with pytest.raises(NoReplyError):
        await submit(lanes, peek(b"first"))
    assert server.closed_links == 1
    assert await answers([submit(lanes, peek(b"again"))]) == [b"again"]


async def test_a_lane_cancelled_by_another_hand_takes_no_job_with_it(lanes: Lanes) -> None:
    await answers([submit(lanes, call) for call in calls(1)])
    await asyncio.sleep(0)
    lanes._tasks[0].cancel()  # its wait is over at once, the task itself ends in the next step of the loop
    assert await answers([submit(lanes, call) for call in calls(3)]) == [call.key for call in calls(3)]


async def test_closing_answers_what_waits_and_refuses_what_comes_later(lanes: Lanes, server: Server) -> None:
    server.open.clear()
    waiting = [submit(lanes, call) for call in calls(3 * MAX_BATCH_CALLS)]
    await asyncio.sleep(0)
    await lanes.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {BackendUnavailableError}
    with pytest.raises(BackendUnavailableError, match="closed"):
        submit(lanes, peek(b"later"))
    await lanes.close()
