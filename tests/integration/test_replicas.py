"""``replicas=n``: a step returns once so many replicas have it, whichever connection it was done over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import REAL_SERVERS, binary_of
from support.polling import wait_until
from support.sample_entries import sample_entry
from support.servers import RealServer

from gym_capture_redis import (
    BackendUnavailableError,
    DurabilityError,
    RedisTokenSink,
    RedisTokenSource,
    connection,
    recent,
)
from gym_capture_redis.connection import Link
from gym_capture_redis.protocols import IncompleteCode
from gym_capture_redis.settings import SinkSettings

PATIENCE_S = 30.0
NOTHING_IS_FORGOTTEN_S = 0.01
IMPATIENCE_S = 4.0
"""Longer than a lane waits for replicas, so that a step is sent again over another connection."""


class Pair(NamedTuple):
    primary: RealServer
    replica: RealServer


@contextlib.contextmanager
def running_pair(binary: Path) -> Iterator[Pair]:
    """A primary with one replica that has caught up."""
    with (
        RealServer(binary, repl_diskless_sync_delay="0") as primary,
        RealServer(binary, replicaof=f"127.0.0.1 {primary.port}") as replica,
    ):
        wait_until(
            lambda: replicas_of(primary) == ["online"], "the replica has caught up", timeout_s=PATIENCE_S
        )
        yield Pair(primary, replica)


@pytest.fixture(scope="module", params=REAL_SERVERS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with running_pair(binary_of(request.param)) as pair:
        yield pair


@pytest.fixture
def own_pair(pair: Pair) -> Iterator[Pair]:
    """One of the test's own, whose primary may die or change its role."""
    with running_pair(pair.primary.binary) as own:
        yield own


@pytest.fixture(autouse=True)
def _resumed(pair: Pair) -> Iterator[None]:
    yield
    pair.replica.resume()


def replicas_of(server: RealServer) -> list[str]:
    with server.client() as client:
        facts: Any = client.info("replication")
    return [facts[f"slave{number}"]["state"] for number in range(facts["connected_slaves"])]


def follows(server: RealServer) -> bool:
    with server.client() as client:
        facts: Any = client.info("replication")
    return bool(facts.get("master_link_status") == "up")


def clients(
    pair: Pair, namespace: str, *, replicas: int = 1, timeout_s: float = PATIENCE_S
) -> tuple[RedisTokenSink, RedisTokenSource]:
    settings: dict[str, Any] = {
        "namespace": namespace,
        "replicas": replicas,
        "timeout_s": timeout_s,
        "settle_s": NOTHING_IS_FORGOTTEN_S,
    }
    return RedisTokenSink(pair.primary.url, **settings), RedisTokenSource(pair.primary.url, **settings)


async def put(sink: RedisTokenSink, _: RedisTokenSource) -> None:
    await sink.put(sample_entry("r", "first"))


async def begin(sink: RedisTokenSink, _: RedisTokenSource) -> None:
    await sink.begin_call("r", "second")


async def mark(sink: RedisTokenSink, _: RedisTokenSource) -> None:
    await sink.mark_incomplete("r", "second")


async def refuse(sink: RedisTokenSink, _: RedisTokenSource) -> None:
    await sink.record_engine_refusal("r", model_call_id="third", code="too-long")


async def freeze(_: RedisTokenSink, source: RedisTokenSource) -> None:
    await source.freeze("frozen")


async def drop(_: RedisTokenSink, source: RedisTokenSource) -> None:
    snapshot = DROPPED
    assert await source.drop("dropped", snapshot_id=snapshot["snapshot_id"], version=snapshot["version"])


async def retire(_: RedisTokenSink, source: RedisTokenSource) -> None:
    await source.retire(["retired"])


async def delete(_: RedisTokenSink, source: RedisTokenSource) -> None:
    await source.delete(["deleted"])


DROPPED: dict[str, Any] = {}
Step = Callable[[RedisTokenSink, RedisTokenSource], Awaitable[None]]
STEPS: list[Step] = [put, begin, mark, refuse, freeze, drop, retire, delete]


def all_steps(
    sink: RedisTokenSink, source: RedisTokenSource, *, return_exceptions: bool = False
) -> asyncio.Future[list[Any]]:
    return asyncio.gather(*(step(sink, source) for step in STEPS), return_exceptions=return_exceptions)


async def prepare(sink: RedisTokenSink, source: RedisTokenSource) -> None:
    """Something for every step to work on."""
    for rollout in ("frozen", "dropped", "retired", "deleted"):
        await sink.put(sample_entry(rollout, "first"))
    await sink.begin_call("r", "first")
    snapshot = await source.freeze("dropped")
    DROPPED.update(snapshot_id=snapshot.snapshot_id, version=snapshot.version)


async def test_what_no_replica_has_is_reported_until_one_has_it(pair: Pair, namespace: str) -> None:
    sink, source = clients(pair, namespace)
    async with sink, source:
        await prepare(sink, source)
        pair.replica.pause()
        # Whoever repeats a step finds it done on the primary, and must wait all the same.
        for _ in range(2):
            hasty_sink, hasty_source = clients(pair, namespace, timeout_s=IMPATIENCE_S)
            async with hasty_sink, hasty_source:
                for outcome in await all_steps(hasty_sink, hasty_source, return_exceptions=True):
                    assert isinstance(outcome, DurabilityError)
                    assert "replicas=1 was not confirmed" in str(outcome)
        repeated = all_steps(sink, source)
        pair.replica.resume()
        await repeated


async def test_what_a_replica_has_survives_the_primary(own_pair: Pair, namespace: str) -> None:
    sink, _ = clients(own_pair, namespace)
    async with sink:
        for number in range(20):
            await sink.begin_call("r", f"call-{number}")
            await sink.put(sample_entry("r", f"call-{number}"))
        own_pair.primary.kill()
    with own_pair.replica.client() as client:
        client.execute_command("REPLICAOF", "NO", "ONE")
    async with RedisTokenSource(
        own_pair.replica.url, namespace=namespace, settle_s=NOTHING_IS_FORGOTTEN_S
    ) as source:
        snapshot = await source.freeze("r")
    assert len(snapshot.entries) == 20
    assert not snapshot.incomplete


async def test_a_replica_is_not_read(pair: Pair, namespace: str) -> None:
    sink, source = clients(pair, namespace)
    async with sink, source:
        await sink.put(sample_entry("r", "first"))
        await source.freeze("r")
    async with RedisTokenSource(pair.replica.url, namespace=namespace, timeout_s=0.3) as source:
        with pytest.raises(BackendUnavailableError, match="it is a replica"):
            await source.freeze("r")


async def test_a_primary_that_is_demoted_is_left(own_pair: Pair, namespace: str) -> None:
    def has_refused() -> bool:
        facts: Any = client.info("errorstats")
        return "errorstat_READONLY" in facts

    sink, source = clients(own_pair, namespace, replicas=0)
    async with sink, source:
        await sink.put(sample_entry("r", "first"))
        await source.freeze("r")
        with own_pair.primary.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", own_pair.replica.port)
            steps = asyncio.gather(sink.mark_incomplete("r", "second"), source.freeze("r"))
            await asyncio.to_thread(wait_until, has_refused, "a step was refused", timeout_s=PATIENCE_S)
            assert not steps.done()
            client.execute_command("REPLICAOF", "NO", "ONE")
        _, snapshot = await steps
        assert len(snapshot.entries) == 1


async def name_of(server: RealServer, *, namespace: str) -> str:
    link = Link(SinkSettings.build(server.url, namespace, {}), str(server.socket_path))
    await link.connect()
    await link.close()
    return link.run_id


async def test_a_primary_stays_the_one_that_acknowledged_when_its_first_replica_comes(
    pair: Pair, namespace: str
) -> None:
    """It takes another replication id then, under connections that go on."""
    with RealServer(pair.primary.binary, repl_diskless_sync_delay="0") as primary:
        before = await name_of(primary, namespace=namespace)
        with RealServer(pair.primary.binary, replicaof=f"127.0.0.1 {primary.port}"):
            wait_until(lambda: replicas_of(primary) == ["online"], "it has a replica", timeout_s=PATIENCE_S)
            assert await name_of(primary, namespace=namespace) == before


async def test_a_server_that_was_a_replica_for_a_while_is_another_one(own_pair: Pair, namespace: str) -> None:
    before = await name_of(own_pair.primary, namespace=namespace)
    with own_pair.replica.client() as replica, own_pair.primary.client() as primary:
        replica.execute_command("replicaof", "no", "one")
        primary.execute_command("replicaof", "127.0.0.1", own_pair.replica.port)
        wait_until(
            lambda: replicas_of(own_pair.replica) == ["online"], "it is a replica", timeout_s=PATIENCE_S
        )
        primary.execute_command("replicaof", "no", "one")
    assert await name_of(own_pair.primary, namespace=namespace) != before


async def test_an_idle_connection_finds_out_that_its_server_was_a_replica_for_a_while(
    own_pair: Pair, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_TRUSTED_S", 0.0)
    monkeypatch.setattr(recent, "WATCHED_S", 0.0)
    settings: dict[str, Any] = {"namespace": namespace, "durability": "memory", "timeout_s": PATIENCE_S}
    sink = RedisTokenSink(own_pair.primary.url, **settings, settle_s=NOTHING_IS_FORGOTTEN_S)
    source = RedisTokenSource(own_pair.primary.url, **settings, settle_s=NOTHING_IS_FORGOTTEN_S)
    async with sink, source:
        await sink.begin_call("r", "first")
        await sink.put(sample_entry("r", "first"))
        with own_pair.replica.client() as replica, own_pair.primary.client() as primary:
            replica.execute_command("replicaof", "no", "one")
            await sink.begin_call("r", "second")
            watcher = sink._executors.get()._watcher
            assert watcher is not None
            await watcher  # until nothing is kept
            primary.execute_command("replicaof", "127.0.0.1", own_pair.replica.port)
            wait_until(lambda: follows(own_pair.primary), "it is a replica", timeout_s=PATIENCE_S)
            primary.execute_command("replicaof", "no", "one")
        await sink.begin_call("r", "third")
        await sink.put(sample_entry("r", "third"))
        snapshot = await source.freeze("r")
    assert {reason.code for reason in snapshot.reasons} == {IncompleteCode.LOST_STEPS}
