"""A Cluster of three primaries, each with a replica if wanted; real servers on 127.0.0.1."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import redis
from support.polling import wait_until
from support.servers import RealServer, free_port

SLOTS = 16_384
PRIMARIES = 3
NODE_TIMEOUT_MS = 1_000
CHANGE_TIMEOUT_S = 40.0
"""For anything that the Cluster does by itself: to meet, to agree, to promote, to catch up."""

MIGRATE_TIMEOUT_MS = 5_000


@dataclass(frozen=True)
class Member:
    """One line of what a node says of the Cluster."""

    node_id: str
    port: int
    flags: frozenset[str]
    primary_id: str
    link_up: bool
    slots: tuple[range, ...]

    def serves(self, slot: int) -> bool:
        return any(slot in part for part in self.slots)


class ClusterNode(RealServer):
    """One node; what it knows of the Cluster survives its restarts."""

    def __init__(self, binary: Path, **config: str) -> None:
        self.bus_port = free_port()
        super().__init__(
            binary,
            cluster_enabled="yes",
            cluster_port=str(self.bus_port),
            cluster_node_timeout=str(NODE_TIMEOUT_MS),
            cluster_replica_validity_factor="0",
            repl_diskless_sync_delay="0",
            **config,
        )

    def ask(self, *command: str | int) -> Any:
        with self.client() as client:
            return client.execute_command("CLUSTER", *command)

    def node_id(self) -> str:
        answer: bytes = self.ask("MYID")
        return answer.decode()

    def members(self) -> dict[str, Member]:
        """Everyone whom this node knows, by node id."""
        with self.client() as client:
            client.response_callbacks.clear()
            text: Any = client.execute_command("CLUSTER", "NODES")
        return {member.node_id: member for member in map(_parse, text.decode().splitlines())}

    def first_slot(self) -> int:
        """One that this primary serves."""
        return self.members()[self.node_id()].slots[0].start

    def state(self) -> str:
        with self.client() as client:
            client.response_callbacks.clear()
            text: Any = client.execute_command("CLUSTER", "INFO")
        return str(dict(line.split(":", 1) for line in text.decode().splitlines())["cluster_state"])


def _parse(line: str) -> Member:
    node_id, address, flags, primary_id, _ping, _pong, _epoch, link, *slots = line.split()
    ranges = [part.split("-") for part in slots if not part.startswith("[")]
    return Member(
        node_id=node_id,
        port=int(address.partition("@")[0].rpartition(":")[2]),
        flags=frozenset(flags.split(",")),
        primary_id="" if primary_id == "-" else primary_id,
        link_up=link == "connected",
        slots=tuple(range(int(ends[0]), int(ends[-1]) + 1) for ends in ranges),
    )


class ClusterGroup:
    """Started with ``with``; ready when every node says that all is well and knows all slots."""

    def __init__(self, binary: Path, *, replicas: bool = False, **config: str) -> None:
        self._first = [ClusterNode(binary, **config) for _ in range(PRIMARIES)]
        self._second = [ClusterNode(binary, **config) for _ in range(PRIMARIES if replicas else 0)]
        self.nodes = (*self._first, *self._second)
        self._running = contextlib.ExitStack()

    @property
    def url(self) -> str:
        """Names two of the nodes; the others are found."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])

    def node_of(self, key: bytes) -> ClusterNode:
        """The primary that serves ``key``."""
        return self.node_of_slot(self.slot_of(key))

    def slot_of(self, key: bytes) -> int:
        with self._alive()[0].client() as client:
            return int(client.execute_command("CLUSTER", "KEYSLOT", key))

    def node_of_slot(self, slot: int) -> ClusterNode:
        members = self._alive()[0].members().values()
        port = next(member.port for member in members if member.serves(slot))
        return next(node for node in self.nodes if node.port == port)

    def primaries(self) -> list[ClusterNode]:
        """Those that serve slots."""
        serving = {member.port for member in self._alive()[0].members().values() if member.slots}
        return [node for node in self.nodes if node.port in serving]

    def replica_of(self, primary: ClusterNode) -> ClusterNode:
        primary_id = primary.node_id()
        members = self._alive()[0].members().values()
        port = next(member.port for member in members if member.primary_id == primary_id)
        return next(node for node in self.nodes if node.port == port)

    def migrate_slot(self, slot: int, to: ClusterNode, between: Callable[[], None] = lambda: None) -> None:
        """Move a slot key by key, as live traffic meets it; ``between`` is called before each key."""
        source = self.node_of_slot(slot)
        source_id, target_id = source.node_id(), to.node_id()
        to.ask("SETSLOT", slot, "IMPORTING", source_id)
        source.ask("SETSLOT", slot, "MIGRATING", target_id)
        for key in _keys_in_slot(source, slot):
            between()
            with source.client() as client:
                client.migrate("127.0.0.1", to.port, key, 0, MIGRATE_TIMEOUT_MS)
        for node in (to, source, *(node for node in self.primaries() if node not in (to, source))):
            node.ask("SETSLOT", slot, "NODE", target_id)
        self._wait_for_owner(slot, to)

    def kill_primary(self, primary: ClusterNode) -> ClusterNode:
        """``kill -9`` a primary, wait until its replica is promoted, and return that one."""
        slot = primary.first_slot()
        replica = self.replica_of(primary)
        primary.kill()
        self._wait_for_owner(slot, replica)
        return replica

    def switch_over(self, primary: ClusterNode) -> ClusterNode:
        """Have a primary and its replica exchange their roles, and return the new primary."""
        slot = primary.first_slot()
        replica = self.replica_of(primary)
        replica.ask("FAILOVER")
        self._wait_for_owner(slot, replica)
        self.wait_for_replicas()
        return replica

    def revive(self) -> None:
        """Start what is dead again, and wait until replicas have caught up."""
        for node in self.nodes:
            if not node.is_running:
                node.start()
        self.wait_for_replicas()

    def wait_for_replicas(self) -> None:
        wait_until(self._replicas_follow, "all replicas have caught up", timeout_s=CHANGE_TIMEOUT_S)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as running:
            for node in self.nodes:
                running.enter_context(node)
            self._join()
            self._running = running.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _join(self) -> None:
        for number, node in enumerate(self._first):
            first, end = SLOTS * number // PRIMARIES, SLOTS * (number + 1) // PRIMARIES
            node.ask("ADDSLOTSRANGE", first, end - 1)
            node.ask("SET-CONFIG-EPOCH", number + 1)
        for one in self.nodes[1:]:
            one.ask("MEET", "127.0.0.1", self.nodes[0].port, self.nodes[0].bus_port)
        wait_until(self._all_well, "all nodes have met", timeout_s=CHANGE_TIMEOUT_S)
        for primary, replica in zip(self._first, self._second, strict=False):
            replica.ask("REPLICATE", primary.node_id())
        self.wait_for_replicas()

    def _alive(self) -> list[ClusterNode]:
        return [node for node in self.nodes if node.is_running]

    def _all_well(self) -> bool:
        return all(
            node.state() == "ok" and _is_whole(node.members(), len(self.nodes)) for node in self._alive()
        )

    def _replicas_follow(self) -> bool:
        roles = {id(node): _replication(node) for node in self.nodes}
        followers = [role for role in roles.values() if role["role"] == "slave"]
        return (
            self._all_well()
            and len(followers) == len(self._second)
            and all(role["master_link_status"] == "up" for role in followers)
            and all(self._names_roles(node) for node in self.nodes)
        )

    def _names_roles(self, node: ClusterNode) -> bool:
        members = node.members().values()
        return sum(bool(member.primary_id) for member in members) == len(self._second) and all(
            bool(member.slots) != bool(member.primary_id) for member in members
        )

    def _wait_for_owner(self, slot: int, owner: ClusterNode) -> None:
        owner_id = owner.node_id()

        def is_agreed() -> bool:
            return all(
                node.state() == "ok" and node.members()[owner_id].serves(slot) for node in self._alive()
            )

        wait_until(is_agreed, f"port {owner.port} serves slot {slot}", timeout_s=CHANGE_TIMEOUT_S)


def _keys_in_slot(node: ClusterNode, slot: int) -> Iterator[bytes]:
    """Keys that are there, one at a time, until there is none: traffic may add some meanwhile."""
    while keys := node.ask("GETKEYSINSLOT", slot, 1):
        yield keys[0]


def _is_whole(members: dict[str, Member], size: int) -> bool:
    return (
        len(members) == size
        and sum(len(part) for member in members.values() for part in member.slots) == SLOTS
        and all(
            member.link_up or "myself" in member.flags
            for member in members.values()
            if not member.flags & {"fail", "handshake"}
        )
    )


def _replication(node: ClusterNode) -> dict[str, Any]:
    with node.client() as client:
        facts: redis.typing.ResponseT = client.info("replication")
    assert isinstance(facts, dict)
    return facts
