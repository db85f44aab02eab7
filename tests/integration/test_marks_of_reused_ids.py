"""An id that is used again: a call reported as lost shows, even if it was announced to an earlier attempt."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.sample_entries import sample_entry
from support.servers import RealServer

from gym_capture_redis.errors import TokenCaptureRetiredError
from gym_capture_redis.protocols import IncompleteCode
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

ROLLOUT = "rollout"


@pytest.fixture
async def ends(valkey9: RealServer, namespace: str) -> AsyncIterator[tuple[RedisTokenSink, RedisTokenSource]]:
    async with (
        RedisTokenSink(valkey9.url, namespace=namespace) as sink,
        RedisTokenSource(valkey9.url, namespace=namespace) as source,
    ):
        yield sink, source


async def test_a_call_that_could_not_be_put_into_the_next_attempt_marks_it(
    ends: tuple[RedisTokenSink, RedisTokenSource],
) -> None:
    sink, source = ends
    await sink.begin_call(ROLLOUT, "one")
    await source.delete([ROLLOUT])
    await sink.put(sample_entry(ROLLOUT, "two"))
    with pytest.raises(TokenCaptureRetiredError):
        await sink.put(sample_entry(ROLLOUT, "one"))
    await sink.mark_incomplete(ROLLOUT, "one")
    snapshot = await source.freeze(ROLLOUT)
    assert [(reason.code, reason.model_call_id) for reason in snapshot.reasons] == [
        (IncompleteCode.MARKED, "one")
    ]


async def test_a_late_mark_of_a_worker_that_knows_no_later_attempt_touches_none(
    ends: tuple[RedisTokenSink, RedisTokenSource], valkey9: RealServer, namespace: str
) -> None:
    sink, source = ends
    await sink.begin_call(ROLLOUT, "one")
    await source.delete([ROLLOUT])
    async with RedisTokenSink(valkey9.url, namespace=namespace) as other:
        await other.put(sample_entry(ROLLOUT, "two"))
    with pytest.raises(TokenCaptureRetiredError):
        await sink.mark_incomplete(ROLLOUT, "one")
    assert not (await source.freeze(ROLLOUT)).incomplete
