"""Gym's own checks of a transport, lineage included, within one process and across several."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
from support.cluster import ClusterGroup
from support.sentinel import SentinelGroup
from support.servers import RealServer
from support.sink_process import SinkProcess

from gym_capture_redis import RedisTokenSink, RedisTokenSource, gym_compat

pytest.importorskip("nemo_gym.token_id_capture", reason="these are NeMo Gym's own checks")

from gym_capture_redis import RedisLineageStore

CHECKS = {
    "put_then_freeze_visibility",
    "idempotent_reput",
    "conflicting_reput",
    "mark_incomplete_durability",
    "freeze_idempotency",
    "post_freeze_write_safety",
    "conditional_retirement",
    "begin_call_custody",
    "lineage_visibility",
    "fresh_client_lineage_visibility",
}

Make = Callable[[], Any]


async def assert_conformance(make_sink: Make, make_source: Make, make_lineage_store: Make) -> None:
    run_conformance: Any = gym_compat.gym_attribute("conformance", "run_conformance")
    assert set(await run_conformance(make_sink, make_source, make_lineage_store)) >= CHECKS


def factories(url: str, **settings: Any) -> tuple[Make, Make, Make]:
    return (
        functools.partial(RedisTokenSink, url, **settings),
        functools.partial(RedisTokenSource, url, **settings),
        functools.partial(RedisLineageStore, url, **settings),
    )


async def assert_conformance_of_processes(url: str, namespace: str) -> None:
    """The sink in one process, the lineage store in another, the source in this one."""
    make_sink, make_source, make_lineage_store = factories(url, namespace=namespace)
    with SinkProcess(make_sink) as sinks, SinkProcess(make_lineage_store) as stores:
        assert len({sinks.pid, stores.pid, os.getpid()}) == 3
        await assert_conformance(sinks.make_sink, make_source, stores.make_lineage_store)


async def test_fakeredis_conforms(namespace: str) -> None:
    await assert_conformance(*factories("fakeredis://conformance", namespace=namespace, durability="memory"))


async def test_a_real_server_conforms(real_server: RealServer, namespace: str) -> None:
    await assert_conformance(*factories(real_server.url, namespace=namespace))


async def test_processes_on_a_real_server_conform(real_server: RealServer, namespace: str) -> None:
    await assert_conformance_of_processes(real_server.url, namespace)


async def test_a_cluster_conforms(cluster_group: ClusterGroup, namespace: str) -> None:
    await assert_conformance(*factories(cluster_group.url, namespace=namespace))


async def test_processes_on_a_cluster_conform(cluster_group: ClusterGroup, namespace: str) -> None:
    await assert_conformance_of_processes(cluster_group.url, namespace)


async def test_a_group_with_sentinels_conforms(sentinel_group: SentinelGroup, namespace: str) -> None:
    await assert_conformance(*factories(sentinel_group.url, namespace=namespace))
