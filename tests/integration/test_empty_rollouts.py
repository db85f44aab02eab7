"""A source that finds nothing in many rollouts says so once: each of them looks whole."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
from support.sample_entries import sample_entry
from support.servers import RealServer

from gym_capture_redis import RedisTokenSink, RedisTokenSource
from gym_capture_redis.empty_rollouts import WARN_AFTER

EMPTY = [f"empty-{number}" for number in range(3 * WARN_AFTER)]


@pytest.fixture
async def source(valkey9: RealServer, namespace: str) -> AsyncIterator[RedisTokenSource]:
    async with RedisTokenSource(valkey9.url, namespace=namespace, settle_s=0.01) as source:
        yield source


@pytest.fixture
async def sink(valkey9: RealServer, namespace: str) -> AsyncIterator[RedisTokenSink]:
    async with RedisTokenSink(valkey9.url, namespace=namespace, settle_s=0.01) as sink:
        yield sink


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "never had a model call" in record.getMessage()
    ]


@pytest.mark.parametrize("how", ["freeze", "freeze_arrays", "freeze_many"])
async def test_many_rollouts_without_a_call_are_warned_of_once_and_named(
    source: RedisTokenSource, namespace: str, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    async def freeze(rollouts: list[str]) -> None:
        if how == "freeze_many":
            assert [outcome.error async for outcome in source.freeze_many(rollouts)] == [None] * len(rollouts)
            return
        for rollout in rollouts:
            await getattr(source, how)(rollout)

    await freeze(EMPTY[: WARN_AFTER - 1])
    assert not warnings_of(caplog)
    await freeze(EMPTY[WARN_AFTER - 1 :])
    (warning,) = warnings_of(caplog)
    assert f"namespace={namespace!r}" in warning


async def test_the_same_empty_rollout_frozen_often_is_one(
    source: RedisTokenSource, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2 * WARN_AFTER):
        await source.freeze(EMPTY[0])
    assert not warnings_of(caplog)


@pytest.mark.parametrize("held", ["record", "mark", "intent", "refusal"])
async def test_any_call_among_them_shows_that_something_is_captured(
    source: RedisTokenSource, sink: RedisTokenSink, caplog: pytest.LogCaptureFixture, held: str
) -> None:
    if held == "record":
        await sink.put(sample_entry("r", "call"))
    elif held == "mark":
        await sink.mark_incomplete("r", "call")
    elif held == "intent":
        await sink.begin_call("r", "call")
    else:
        await sink.record_engine_refusal("r", model_call_id="call", code="too-long")
    for rollout in [*EMPTY[: WARN_AFTER - 1], "r", *EMPTY[WARN_AFTER - 1 : 2 * WARN_AFTER - 2]]:
        await source.freeze(rollout)
    assert not warnings_of(caplog)
