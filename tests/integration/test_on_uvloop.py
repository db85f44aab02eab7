"""On uvloop, the event loop of vLLM and of many other servers, all is as on asyncio's own."""

from __future__ import annotations

import asyncio
import base64
import random
import signal
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop
from support.sample_entries import exact_dump, sample_entry
from support.servers import RealServer

from gym_capture_redis import RedisTokenSink, RedisTokenSource
from gym_capture_redis.errors import BackendUnavailableError

EXPERTS = [[[number % 128, 7]] for number in range(20_000)]
ROUTES = "nrlre1:int8:32768x48x2:" + base64.b64encode(random.Random(1).randbytes(3 * 2**20)).decode()
"""Three parts."""

CALLS = [f"call-{number}" for number in range(100)]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario)


def url_of(server: RealServer, kind: str) -> str:
    return server.url if kind == "unix" else server.tcp_url


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_rollouts_are_put_frozen_and_dropped(one_server: RealServer, kind: str, namespace: str) -> None:
    url = url_of(one_server, kind)
    entries = [sample_entry("rollout", call) for call in CALLS]
    large = [
        sample_entry("rollout", "large", routed_experts=EXPERTS),
        sample_entry("rollout", "long", routed_experts=ROUTES),
    ]

    async def scenario() -> None:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        async with (
            RedisTokenSink(url, namespace=namespace) as sink,
            RedisTokenSource(url, namespace=namespace) as source,
        ):
            await asyncio.gather(*(sink.begin_call("rollout", call) for call in CALLS))
            await asyncio.gather(*(sink.put(entry) for entry in [*entries, *large]))
            await sink.mark_incomplete("another", "lost")
            outcomes = {
                outcome.rollout_id: outcome async for outcome in source.freeze_many(["rollout", "another"])
            }
            another, snapshot = outcomes["another"].snapshot, outcomes["rollout"].snapshot
            assert another is not None
            assert another.incomplete
            assert snapshot is not None
            assert not snapshot.incomplete
            back = {entry.model_call_id: exact_dump(entry) for entry in snapshot.entries}
            assert back == {entry.model_call_id: exact_dump(entry) for entry in [*entries, *large]}
            dropped = await source.drop("rollout", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            assert dropped

    run(scenario())


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_put_outlasts_cut_connections_and_ends_where_the_server_stays_away(
    kind: str, namespace: str, valkey9: RealServer
) -> None:
    async def scenario(server: RealServer) -> None:
        url = url_of(server, kind)
        async with RedisTokenSink(url, namespace=namespace) as sink:
            await sink.put(sample_entry("rollout", "before"))
            await asyncio.to_thread(server.cut_connections)
            await sink.put(sample_entry("rollout", "after"))
        # One connection: what is sent over another one must connect first.
        async with RedisTokenSink(url, namespace=namespace, timeout_s=1, connections=1) as sink:
            await sink.begin_call("rollout", "never")
            server.pause()
            with pytest.raises(BackendUnavailableError, match="may or may not have been applied"):
                await sink.put(sample_entry("rollout", "never"))
            server.kill(signal.SIGKILL)
            with pytest.raises(BackendUnavailableError, match="was not sent, nothing changed"):
                await sink.put(sample_entry("rollout", "never"))

    with RealServer(valkey9.binary) as server:
        run(scenario(server))
