"""Gym's own checks of a transport, within one process and across two."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
from support.servers import RealServer
from support.sink_process import SinkProcess

from gym_capture_redis import RedisTokenSink, RedisTokenSource, gym_compat

pytest.importorskip("nemo_gym.token_id_capture", reason="these are NeMo Gym's own checks")

CHECKS = [
    "put_then_freeze_visibility",
    "idempotent_reput",
    "conflicting_reput",
    "mark_incomplete_durability",
    "freeze_idempotency",
    "post_freeze_write_safety",
    "conditional_retirement",
    "begin_call_custody",
]


async def assert_conformance(make_sink: Callable[[], Any], make_source: Callable[[], Any]) -> None:
    run_conformance: Any = gym_compat.gym_attribute("conformance", "run_conformance")
    passed = await run_conformance(make_sink, make_source)
    assert set(passed) >= set(CHECKS)


async def test_fakeredis_conforms(namespace: str) -> None:
    options: dict[str, Any] = {"namespace": namespace, "durability": "memory"}
    await assert_conformance(
        functools.partial(RedisTokenSink, "fakeredis://conformance", **options),
        functools.partial(RedisTokenSource, "fakeredis://conformance", **options),
    )


async def test_a_real_server_conforms(real_server: RealServer, namespace: str) -> None:
    await assert_conformance(
        functools.partial(RedisTokenSink, real_server.url, namespace=namespace),
        functools.partial(RedisTokenSource, real_server.url, namespace=namespace),
    )


async def test_sinks_in_another_process_conform(real_server: RealServer, namespace: str) -> None:
    factory = functools.partial(RedisTokenSink, real_server.url, namespace=namespace)
    with SinkProcess(factory) as process:
        assert process.pid != os.getpid()
        await assert_conformance(
            process.make_sink,
            functools.partial(RedisTokenSource, real_server.url, namespace=namespace),
        )
