"""Who takes part: this package and the contenders that are installed here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.peers import file_store, ray_queue, transfer_queue
from gym_capture_redis.cli.bench.peers.bare_redis import BareRedis
from gym_capture_redis.cli.bench.peers.file_store import FileStore
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.peers.peer import Peer
from gym_capture_redis.cli.bench.peers.ray_queue import RayQueue
from gym_capture_redis.cli.bench.peers.transfer_queue import TransferQueue
from gym_capture_redis.cli.bench.section import Grid


@dataclass
class Lineup:
    """Contenders that are open, and why others are left out."""

    ours: OurTransport
    peers: list[Peer]
    left_out: dict[str, str] = field(default_factory=dict)

    def describe(self) -> Grid:
        """Tell what each does for its speed."""
        rows = [
            (
                peer.name,
                peer.durability,
                "any number" if peer.several_machines else "one",
                peer.gives_back,
            )
            for peer in self.peers
        ]
        return Grid("Contenders", ("", "an acknowledged put is kept by", "machines", "reading gives"), rows)

    def notes(self) -> list[str]:
        """Name those that are left out."""
        return [f"{name} is left out: {reason}" for name, reason in self.left_out.items()]


@asynccontextmanager
async def line_up(bench: Bench) -> AsyncIterator[Lineup]:
    """Open all contenders that can be had here."""
    ours = bench.ours()
    lineup = Lineup(ours, [ours])
    if (fsync := bench.servers.fsync) is not None:
        lineup.peers.append(OurTransport(fsync, bench.mark, durability="fsync"))
    lineup.peers.append(BareRedis(bench.servers.main, bench.mark, await bench.stored_sizes()))
    async with AsyncExitStack() as stack:
        for name, lacks, make in (
            (file_store.NAME, file_store.missing(), lambda: FileStore(bench.directory)),
            (ray_queue.NAME, ray_queue.missing(), RayQueue),
            (transfer_queue.NAME, transfer_queue.missing(), TransferQueue),
        ):
            if lacks:
                lineup.left_out[name] = f"it needs {lacks}"
                continue
            peer: Peer = make()
            stack.push_async_callback(peer.close)
            try:
                await peer.open()
            except Exception as error:  # noqa: BLE001 - whatever keeps a guest away, the others go on
                lineup.left_out[name] = f"it could not be started ({type(error).__name__}: {error})"
                continue
            lineup.peers.append(peer)
        yield lineup
