"""Calls per second that are put, and frozen, with many rollouts in flight; every contender in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from gym_capture_redis.cli.bench import floors
from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.drive import IN_FLIGHT, put_all, read_all
from gym_capture_redis.cli.bench.goals import Figure, NotMeasured
from gym_capture_redis.cli.bench.peers import file_store
from gym_capture_redis.cli.bench.peers.file_store import FileStore
from gym_capture_redis.cli.bench.peers.lineup import Lineup, line_up
from gym_capture_redis.cli.bench.peers.ours import NAME as OURS
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.peers.peer import Peer
from gym_capture_redis.cli.bench.rounds import ratio, rotated
from gym_capture_redis.cli.bench.section import Grid, Section

NAME = "throughput"
FSYNC = f"{OURS}, fsync"
FLOOR = "floor: packing, slicing"
UNIT = "calls/s"
COLLECTOR_NOTE = (
    "The records that are put are kept from the garbage collector (gc.freeze), for every contender: a worker "
    "does not hold all of them at once. The collector stays on, and walks over whatever is read back."
)


@dataclass
class Rates:
    """Calls per second of one contender, a value for each round; what it stores for a call, in bytes."""

    put: list[float] = field(default_factory=list)
    freeze: list[float] = field(default_factory=list)
    arrays: list[float] = field(default_factory=list)
    stored_bytes: float | None = None


async def measure(bench: Bench) -> Section:
    """All rounds of all contenders, and the two floors in each."""
    rates: dict[str, Rates] = {}
    async with line_up(bench) as lineup:
        rounds = bench.options.rounds
        with bench.progress(f"Put and freeze, {rounds} rounds", rounds * len(lineup.peers)) as advance:
            for number in range(rounds):
                for peer in rotated(lineup.peers, number):
                    await _one_round(peer, bench, rates.setdefault(peer.name, Rates()))
                    advance()
                _measure_floors(bench, rates.setdefault(FLOOR, Rates()))
    return _section(bench, lineup, rates)


async def _one_round(peer: Peer, bench: Bench, rates: Rates) -> None:
    rollouts, calls = bench.workload.rollouts, bench.workload.calls
    try:
        await peer.prepare(rollouts)
        rates.put.append(calls / await put_all(peer, rollouts))
        rates.freeze.append(calls / await read_all(peer, rollouts))
        if isinstance(peer, FileStore):
            rates.stored_bytes = peer.stored_bytes / calls
        if isinstance(peer, OurTransport):
            rates.stored_bytes = sum(peer.stored_bytes.values()) / calls
            rates.arrays.append(calls / await read_all(peer, rollouts, peer.read_arrays))
    finally:
        await peer.clear()


def _measure_floors(bench: Bench, rates: Rates) -> None:
    rates.put.append(bench.workload.calls / floors.packing_seconds(bench.workload.rollouts))
    rates.freeze.append(bench.workload.calls / floors.slicing_seconds(bench.workload.rollouts))


def _section(bench: Bench, lineup: Lineup, rates: dict[str, Rates]) -> Section:
    section = Section(NAME, grids=[lineup.describe(), _grid(lineup.peers, rates)])
    section.notes = [*lineup.notes(), COLLECTOR_NOTE]
    if len(bench.workload.rollouts) < IN_FLIGHT:
        section.notes.append(f"Only {len(bench.workload.rollouts)} rollouts were in flight, not {IN_FLIGHT}.")
    section.data = {name: asdict(one) for name, one in rates.items()}
    fast = rates if bench.servers.main.appendfsync != "always" else {}
    section.figures = {
        "put_file_store": _against(fast, OURS, file_store.NAME, "put", lineup),
        "put_packing": _against(fast, OURS, FLOOR, "put", lineup),
        "fsync_file_store": _against(rates, FSYNC, file_store.NAME, "put", lineup),
        "fsync_packing": _against(rates, FSYNC, FLOOR, "put", lineup),
        "freeze_file_store": _against(rates, OURS, file_store.NAME, "freeze", lineup),
        "freeze_slicing": _against(rates, OURS, FLOOR, "freeze", lineup),
        "arrays_file_store": _arrays_against_file_store(rates, lineup),
    }
    return section


def _against(
    rates: dict[str, Rates], ours: str, theirs: str, what: str, lineup: Lineup
) -> Figure | NotMeasured:
    if ours not in rates:
        return NotMeasured(
            "this server fsyncs once a second" if ours == FSYNC else "this server fsyncs every put"
        )
    if theirs not in rates:
        return _left_out(theirs, lineup)
    return ratio(getattr(rates[ours], what), getattr(rates[theirs], what), unit=UNIT)


def _arrays_against_file_store(rates: dict[str, Rates], lineup: Lineup) -> Figure | NotMeasured:
    if file_store.NAME not in rates:
        return _left_out(file_store.NAME, lineup)
    return ratio(rates[OURS].arrays, rates[file_store.NAME].freeze, unit=UNIT)


def _left_out(name: str, lineup: Lineup) -> NotMeasured:
    return NotMeasured(f"{name} is left out: {lineup.left_out[name]}")


def _grid(peers: Sequence[Peer], rates: dict[str, Rates]) -> Grid:
    """Medians of all contenders, and how many times theirs ours are."""
    columns = ("", "put/s", "ours /", "frozen/s", "ours /", "to arrays/s", "bytes/call")
    ours = rates[OURS]
    rows = []
    for name in [*(peer.name for peer in peers), FLOOR]:
        one = rates[name]
        rows.append(
            (
                name,
                f"{median(one.put):,.0f}",
                f"{ratio(ours.put, one.put, unit=UNIT).value:.2f}",
                f"{median(one.freeze):,.0f}",
                f"{ratio(ours.freeze, one.freeze, unit=UNIT).value:.2f}",
                f"{median(one.arrays):,.0f}" if one.arrays else "",
                f"{one.stored_bytes:,.0f}" if one.stored_bytes else "",
            )
        )
    return Grid(f"Calls per second, up to {IN_FLIGHT} rollouts in flight (medians)", columns, rows)
