"""Sentinel and Cluster failovers and live slot migration under writers of two processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.cluster import ClusterGroup
from support.forgetting import aof_size, come_back_short
from support.ledger import Kind, Ledger
from support.polling import wait_until
from support.sentinel import SentinelGroup
from support.servers import RealServer
from support.trainers import read_and_judge
from support.writers import Work, WriterProcess, all_work

from gym_capture_redis.keys import rollout_key
from gym_capture_redis.sink import RedisTokenSink

ROLLOUTS = tuple(f"r{number}" for number in range(12))
WRITERS = 16
CALLS = 24
FAULT_AT = 150
"""Acknowledged records; nearly all still are to come."""


@pytest.fixture
def settings(namespace: str) -> dict[str, Any]:
    return {"namespace": namespace, "timeout_s": 60.0}


async def write_through(
    fault: Callable[[], object], url: str, crew: list[WriterProcess], ledger: Ledger, settings: dict[str, Any]
) -> None:
    """Write before, while and after ``fault`` happens: no worker has gone that knows what was lost."""
    over = ledger.path.with_name("over")
    work = Work(url, ledger.path, ROLLOUTS, WRITERS, CALLS, until=over, settings=settings)
    writing = asyncio.create_task(all_work(crew, work))
    await asyncio.to_thread(ledger.wait_for, Kind.RECORD, FAULT_AT)
    await asyncio.to_thread(fault)
    over.touch()
    await writing


def kill_and_revive(group: SentinelGroup) -> None:
    group.kill_primary()
    group.revive()


async def test_what_sentinels_promote_shows_every_loss(
    sentinel_group: SentinelGroup, crew: list[WriterProcess], ledger: Ledger, settings: dict[str, Any]
) -> None:
    kill = partial(kill_and_revive, sentinel_group)
    await write_through(kill, sentinel_group.url, crew, ledger, settings)
    await read_and_judge(sentinel_group.url, ledger, ROLLOUTS, settings=settings)


async def test_what_a_replica_had_to_confirm_is_there_after_its_promotion(
    sentinel_group: SentinelGroup, crew: list[WriterProcess], ledger: Ledger, settings: dict[str, Any]
) -> None:
    await write_through(
        partial(kill_and_revive, sentinel_group), sentinel_group.url, crew, ledger, settings | {"replicas": 1}
    )
    snapshots = await read_and_judge(
        sentinel_group.url, ledger, ROLLOUTS, server_kept_all=True, settings=settings
    )
    assert not ledger.count(Kind.FAILED)
    assert not [reason for snapshot in snapshots.values() for reason in snapshot.reasons]


@pytest.mark.parametrize("sentinel_group", ["redis7"], indirect=True)
async def test_primary_and_replica_that_change_places_show_every_loss(
    sentinel_group: SentinelGroup, crew: list[WriterProcess], ledger: Ledger, settings: dict[str, Any]
) -> None:
    await write_through(sentinel_group.switch_over, sentinel_group.url, crew, ledger, settings)
    await read_and_judge(sentinel_group.url, ledger, ROLLOUTS, settings=settings)


async def test_a_node_of_a_cluster_that_is_killed_shows_every_loss(
    cluster_group: ClusterGroup, crew: list[WriterProcess], ledger: Ledger, settings: dict[str, Any]
) -> None:
    def kill() -> None:
        cluster_group.kill_primary(cluster_group.node_of(rollout_key(settings["namespace"], ROLLOUTS[0])))
        cluster_group.revive()

    await write_through(kill, cluster_group.url, crew, ledger, settings)
    await read_and_judge(cluster_group.url, ledger, ROLLOUTS, settings=settings)


async def test_slots_that_are_migrated_under_writers_lose_nothing(
    cluster_group: ClusterGroup, crew: list[WriterProcess], ledger: Ledger, settings: dict[str, Any]
) -> None:
    def migrate() -> None:
        for rollout in ROLLOUTS:
            slot = cluster_group.slot_of(rollout_key(settings["namespace"], rollout))
            source = cluster_group.node_of_slot(slot)
            target = next(node for node in cluster_group.primaries() if node is not source)
            cluster_group.migrate_slot(slot, target)

    await write_through(migrate, cluster_group.url, crew, ledger, settings)
    assert not ledger.count(Kind.FAILED)
    snapshots = await read_and_judge(
        cluster_group.url, ledger, ROLLOUTS, server_kept_all=True, settings=settings
    )
    assert not [reason for snapshot in snapshots.values() for reason in snapshot.reasons]


async def test_a_node_that_stays_away_holds_up_nothing_that_another_one_forgot(
    valkey9: RealServer, settings: dict[str, Any]
) -> None:
    with ClusterGroup(valkey9.binary, cluster_require_full_coverage="no") as group:
        by_node = {group.node_of(rollout_key(settings["namespace"], each)): each for each in ROLLOUTS}
        (away, first), (forgetful, second), *_ = by_node.items()
        async with RedisTokenSink(group.url, **settings) as sink:
            await sink.begin_call(first, "a")
            await sink.begin_call(second, "a")
            size = aof_size(forgetful)
            await sink.begin_call(second, "b")
            away.kill()
            await asyncio.to_thread(come_back_short, forgetful, size)
            key = rollout_key(settings["namespace"], second).decode()
            with forgetful.client() as client:
                await asyncio.to_thread(
                    wait_until,
                    lambda: client.hexists(key, "c:b"),
                    "the idle worker has put it back",
                    timeout_s=settings["timeout_s"] / 2,
                )
