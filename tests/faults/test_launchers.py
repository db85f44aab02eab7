"""Groups of servers do what they are started for, as redis-py's own clients see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.sentinel import Sentinel
from support.cluster import ClusterGroup, ClusterNode
from support.polling import wait_until
from support.sentinel import CHANGE_TIMEOUT_S, SERVICE, SentinelGroup
from support.servers import RealServer

KEYS = [b"key%d" % number for number in range(40)]


def named_primary(group: SentinelGroup) -> tuple[str, int]:
    make: Any = Sentinel  # redis-py has no types for it
    sentinel = make(group.addresses)
    try:
        address: tuple[str, int] = sentinel.discover_master(SERVICE)
    finally:
        for client in sentinel.sentinels:
            client.close()
    return address


@pytest.mark.parametrize("how", ["kill", "switch over"])
def test_after_a_failover_the_replica_is_the_primary_and_has_the_data(
    sentinel_group: SentinelGroup, how: str
) -> None:
    first, second = sentinel_group.primary(), sentinel_group.replica()
    assert named_primary(sentinel_group) == ("127.0.0.1", first.port)
    with first.client() as client:
        client.set("key", how)
        client.wait(1, 10_000)
    told_before = [len(sentinel.log()) for sentinel in sentinel_group.sentinels]
    if how == "kill":
        assert sentinel_group.kill_primary() is first
        assert not first.is_running
        sentinel_group.revive()
    else:
        sentinel_group.switch_over()
    promotion = f"+switch-master {SERVICE} 127.0.0.1 {first.port} 127.0.0.1 {second.port}"
    logs = zip(sentinel_group.sentinels, told_before, strict=True)
    assert any(promotion in sentinel.log()[length:] for sentinel, length in logs)
    # Where the machine stood still for a second, Sentinel may have failed over once more.
    wait_until(
        lambda: named_primary(sentinel_group) == ("127.0.0.1", sentinel_group.primary().port),
        "all name the same primary",
        timeout_s=CHANGE_TIMEOUT_S,
    )
    for server in (first, second):
        with server.client() as client:
            assert client.get("key") == how.encode()
    sentinel_group.replica().kill()
    sentinel_group.revive()
    assert {sentinel_group.primary(), sentinel_group.replica()} == {first, second}


@pytest.fixture
def cluster_client(cluster_group: ClusterGroup) -> Iterator[redis.RedisCluster]:
    with redis.RedisCluster(host="127.0.0.1", port=cluster_group.nodes[0].port) as client:
        client.flushall(target_nodes=redis.RedisCluster.PRIMARIES)
        for key in KEYS:
            client.set(key, key)
        yield client


def keys_on(node: ClusterNode | RealServer) -> set[bytes]:
    with node.client() as client:
        return set(client.keys())


def test_keys_are_on_the_node_that_is_named(
    cluster_group: ClusterGroup, cluster_client: redis.RedisCluster
) -> None:
    primaries = cluster_group.primaries()
    assert len(primaries) == 3
    for primary in primaries:
        assert keys_on(primary) == {key for key in KEYS if cluster_group.node_of(key) is primary}
    assert cluster_client.mget_nonatomic(KEYS) == KEYS


def test_a_slot_is_migrated_key_by_key_and_every_key_is_found_meanwhile(
    cluster_group: ClusterGroup, cluster_client: redis.RedisCluster
) -> None:
    slot = cluster_group.slot_of(b"{tag}")
    tagged = [b"{tag}%d" % number for number in range(10)]
    for key in tagged:
        cluster_client.set(key, key)
    source = cluster_group.node_of_slot(slot)
    target = next(node for node in cluster_group.primaries() if node is not source)
    moved: list[int] = []

    def between() -> None:
        moved.append(len(keys_on(target) & set(tagged)))
        assert [cluster_client.get(key) for key in tagged] == tagged

    cluster_group.migrate_slot(slot, target, between)
    assert moved == list(range(10))
    assert cluster_group.node_of(b"{tag}") is target
    assert keys_on(target) >= set(tagged)
    assert [cluster_client.get(key) for key in tagged] == tagged


@pytest.mark.parametrize("how", ["kill", "switch over"])
def test_after_a_failover_in_the_cluster_the_replica_serves_the_slots(
    cluster_group: ClusterGroup, cluster_client: redis.RedisCluster, how: str
) -> None:
    primary = cluster_group.node_of(KEYS[0])
    replica = cluster_group.replica_of(primary)
    kept = keys_on(primary)
    with primary.client() as client:
        client.set(KEYS[0], KEYS[0])
        client.wait(1, 10_000)
    if how == "kill":
        assert cluster_group.kill_primary(primary) is replica
        assert not primary.is_running
        cluster_group.revive()
    else:
        assert cluster_group.switch_over(primary) is replica
    assert cluster_group.node_of(KEYS[0]) is replica
    assert cluster_group.replica_of(replica) is primary
    assert keys_on(replica) == kept
    assert [cluster_client.get(key) for key in KEYS] == KEYS
