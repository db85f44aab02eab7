"""NeMo Gym's own collector: with a source installed it rebuilds from Redis what it would from its files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.agents import DIALECTS
from support.collector import collect
from support.engine import Engine, calls_of
from support.model_servers import (
    NAMESPACE,
    PASSWORD,
    GuardedServer,
    ModelServer,
    capture_in_files,
    capture_in_redis,
    require_gym_servers,
    running,
)
from support.servers import RealServer

from gym_capture_redis import RedisTokenSource
from gym_capture_redis.errors import TokenCaptureRetiredError

require_gym_servers()

ROWS = [
    {
        "dialect": dialect,
        "task": f"task {dialect} {asks_again}",
        "asks_again": asks_again,
        "responses_create_params": {"input": [{"role": "user", "content": "play"}]},
    }
    for dialect in DIALECTS
    for asks_again in (False, True)
]


def rollout_of(record: dict[str, Any]) -> str:
    return f"{record['_ng_task_index']}-{record['_ng_rollout_index']}"


def outcome(record: dict[str, Any]) -> tuple[Any, ...]:
    """What a trainer finds in a record of the collector, all but what is drawn at random."""
    metrics = record["_ng_token_capture"]
    return (
        rollout_of(record),
        record.get("mask_sample", False),
        metrics["n_calls"],
        metrics["chains"],
        calls_of(record["response"]),
    )


def test_rollouts_are_rebuilt_from_redis_as_from_files_and_retired(
    valkey9: RealServer, tmp_path: Path
) -> None:
    with GuardedServer(valkey9.binary) as redis, Engine() as engine, Engine() as other_engine:
        ours = ModelServer(tmp_path, engine.base_url, capture_in_redis(redis))
        theirs = ModelServer(tmp_path, other_engine.base_url, capture_in_files(tmp_path / "captures"))
        with running(ours, theirs):
            records = collect(ours, ROWS, tmp_path / "ours", redis.tcp_url)
            expected = collect(theirs, ROWS, tmp_path / "theirs")
        assert sorted(map(outcome, records)) == sorted(map(outcome, expected))
        assert len(records) == 2 * len(ROWS)
        for record in records:
            row = ROWS[record["_ng_task_index"]]
            _, masked, _, _, calls = outcome(record)
            assert masked == row["asks_again"]
            if not masked:
                each_twice = sorted(engine.served[row["task"]], key=lambda call: len(call.prompt))
                assert calls == each_twice[::2] == each_twice[1::2]
        asyncio.run(assert_retired_unless_masked(redis, records))


async def assert_retired_unless_masked(redis: GuardedServer, records: list[dict[str, Any]]) -> None:
    async with RedisTokenSource(redis.tcp_url, namespace=NAMESPACE, password=PASSWORD) as source:
        for record in records:
            if record.get("mask_sample"):
                assert (await source.freeze(rollout_of(record))).entries
            else:
                with pytest.raises(TokenCaptureRetiredError):
                    await source.freeze(rollout_of(record))
