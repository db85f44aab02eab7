"""A mark has an id: made again under it, it changes nothing; another mark of the call moves the version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from support.servers import RealServer

from gym_capture_redis import scripts
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import IncompleteCode
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource
from gym_capture_redis.subject import Subject

MOST_IDS = 32
KEPT_BYTES = len("1700000000000 marked") + 17 * MOST_IDS

Mark = Callable[[int], Awaitable[tuple[str, int]]]


@pytest.fixture
async def mark(real_server: RealServer, namespace: str) -> AsyncIterator[Mark]:
    """Makes the mark with this number; answers with the outcome and the version."""
    async with RedisTokenSink(real_server.url, namespace=namespace) as sink:

        async def run(number: int) -> tuple[str, int]:
            executor = sink._executors.get()
            call = scripts.mark(
                rollout_key(namespace, "r"),
                "call",
                new_incarnation="a" * 32,
                incarnation="",
                mark_id=f"{number:016x}",
            )
            reply = await executor.run(call, Subject("r"), deadline=executor.deadline())
            return reply.code, reply.version

        yield run


async def test_the_same_mark_is_made_once_and_another_one_moves_the_version(
    mark: Mark, real_server: RealServer, namespace: str
) -> None:
    assert [await mark(number) for number in (1, 1, 2, 1, 2)] == [
        *(("OK", 1), ("SAME", 1), ("OK", 2), ("SAME", 2), ("SAME", 2)),
    ]
    async with RedisTokenSource(real_server.url, namespace=namespace) as source:
        assert (await source.freeze("r")).version == 3
        assert await mark(1) == ("SAME", 3)
        assert await mark(3) == ("OK", 4)
        snapshot = await source.freeze("r")
    assert [(reason.code, reason.model_call_id) for reason in snapshot.reasons] == [
        (IncompleteCode.MARKED, "call")
    ]


async def test_the_ids_of_the_newest_marks_are_kept_and_no_more(
    mark: Mark, real_server: RealServer, namespace: str
) -> None:
    for number in range(3 * MOST_IDS):
        assert await mark(number) == ("OK", number + 1)
    for number in range(2 * MOST_IDS, 3 * MOST_IDS):
        assert (await mark(number))[0] == "SAME"
    with real_server.client() as client:
        assert client.hstrlen(rollout_key(namespace, "r").decode(), "f:call") == KEPT_BYTES
