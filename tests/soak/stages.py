"""Where a soak plays: a server behind a bad network, a Sentinel group or a Cluster, with their faults."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.cluster import SLOTS, ClusterGroup, ClusterNode
from support.proxies import READ_BYTES, FaultyProxy
from support.sentinel import SentinelGroup
from support.servers import RealServer

LONGEST_PAUSE_S = 5.0
"""Beyond the deadlines of workers, and beyond what Sentinels and nodes wait for."""

BAD_NETWORK_S = 2.0

LEVELS: dict[str, dict[str, str]] = {
    "memory": {"appendonly": "no"},
    "aof": {"appendfsync": "everysec"},
    "fsync": {"appendfsync": "always"},
}


@dataclass(frozen=True)
class Fault:
    """``counts_as`` is its row of the table; ``may_lose``: the server may forget what it acknowledged."""

    name: str
    counts_as: str
    run: Callable[[], Awaitable[None]]
    may_lose: bool = False


@dataclass(frozen=True)
class Stage:
    """A place to play, and its faults."""

    url: str
    keeps_all: bool
    faults: list[Fault] = field(default_factory=list)

    def add(self, name: str, counts_as: str, run: Callable[[], object], *, may_lose: bool = False) -> None:
        async def in_a_thread() -> None:
            await asyncio.to_thread(run)

        self.faults.append(Fault(name, counts_as, in_a_thread, may_lose))


@asynccontextmanager
async def standalone(binary: Path, durability: str, chance: random.Random) -> AsyncIterator[Stage]:
    with RealServer(binary, **LEVELS[durability]) as server:
        async with FaultyProxy(server.socket_path) as proxy:
            stage = Stage(proxy.url, keeps_all=durability != "memory")

            def kill() -> None:
                server.wait_until_written()
                server.kill()
                server.start()

            async def cut() -> None:
                proxy.cut()

            async def swallow() -> None:
                proxy.swallow_a_reply()

            async def slow_down() -> None:
                proxy.longest_delay_s = chance.uniform(0, 0.1)
                await asyncio.sleep(BAD_NETWORK_S)
                proxy.longest_delay_s = 0

            async def split() -> None:
                proxy.slice_bytes = chance.randint(1, 20)
                await asyncio.sleep(BAD_NETWORK_S)
                proxy.slice_bytes = READ_BYTES

            stage.add("kill -9 of the server", "kills", kill, may_lose=durability == "memory")
            stage.faults.append(_pause([server], chance))
            stage.faults.append(Fault("connections cut", "cuts", cut))
            stage.faults.append(Fault("a reply swallowed", "cuts", swallow))
            stage.faults.append(Fault("a slow network", "bad networks", slow_down))
            stage.faults.append(Fault("messages split", "bad networks", split))
            yield stage


@asynccontextmanager
async def sentinel(binary: Path, durability: str, chance: random.Random) -> AsyncIterator[Stage]:
    with SentinelGroup(binary, **LEVELS[durability]) as group:
        stage = Stage(group.url, keeps_all=False)

        def kill() -> None:
            group.kill_primary()
            group.revive()

        def kill_replica() -> None:
            group.replica().kill()
            group.revive()

        stage.add("kill -9 of the primary", "failovers", kill, may_lose=True)
        stage.add("failover by order", "failovers", group.switch_over, may_lose=True)
        stage.add("kill -9 of the replica", "kills", kill_replica)
        stage.add("connections cut", "cuts", lambda: group.primary().cut_connections())
        stage.faults.append(_pause(group.servers, chance, until=group.wait_for_replica, may_lose=True))
        yield stage


@asynccontextmanager
async def cluster(binary: Path, durability: str, chance: random.Random) -> AsyncIterator[Stage]:
    with ClusterGroup(binary, replicas=True, **LEVELS[durability]) as group:
        stage = Stage(group.url, keeps_all=False)

        def kill() -> None:
            group.kill_primary(chance.choice(group.primaries()))
            group.revive()

        def switch_over() -> None:
            group.switch_over(chance.choice(group.primaries()))

        def migrate() -> None:
            for slot in chance.sample(range(SLOTS), 20):
                group.migrate_slot(slot, chance.choice(_others(group, slot)))

        def cut() -> None:
            for node in group.primaries():
                node.cut_connections()

        stage.add("kill -9 of a primary", "failovers", kill, may_lose=True)
        stage.add("failover by order", "failovers", switch_over, may_lose=True)
        stage.add("slots migrated", "migrations", migrate)
        stage.add("connections cut", "cuts", cut)
        stage.faults.append(_pause(group.nodes, chance, until=group.wait_for_replicas, may_lose=True))
        yield stage


STAGES = {"standalone": standalone, "sentinel": sentinel, "cluster": cluster}


def _others(group: ClusterGroup, slot: int) -> list[ClusterNode]:
    owner = group.node_of_slot(slot)
    return [node for node in group.primaries() if node is not owner]


def _pause(
    servers: list[RealServer] | tuple[RealServer, ...],
    chance: random.Random,
    *,
    until: Callable[[], None] = lambda: None,
    may_lose: bool = False,
) -> Fault:
    async def pause() -> None:
        with _paused(chance.choice(servers)):
            await asyncio.sleep(chance.uniform(0, LONGEST_PAUSE_S))
        await asyncio.to_thread(until)

    return Fault("a server paused", "pauses", pause, may_lose)


@contextlib.contextmanager
def _paused(server: RealServer) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()
