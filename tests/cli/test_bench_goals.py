"""Goals and verdicts, figures of several rounds, and the JSON document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from gym_capture_redis.cli.bench.document import as_document
from gym_capture_redis.cli.bench.goals import (
    GOALS,
    Better,
    Figure,
    Goal,
    NotMeasured,
    Verdict,
    all_rows,
    judge,
)
from gym_capture_redis.cli.bench.machine import filesystem_of
from gym_capture_redis.cli.bench.rounds import growth_exponent, percentile, ratio, rotated
from gym_capture_redis.cli.bench.section import Section


def goal(better: Better, at_least: float, aim: float | None) -> Goal:
    return Goal("key", "what", "other", at_least, aim, better, str)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (9, Verdict.AIM),
        (8, Verdict.AIM),
        (7.9, Verdict.AT_LEAST),
        (4, Verdict.AT_LEAST),
        (3.9, Verdict.SHORT),
    ],
)
def test_where_more_is_better(value: float, verdict: Verdict) -> None:
    assert judge(goal(Better.HIGHER, 4, 8), Figure(value)) is verdict


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (1, Verdict.AIM),
        (1.5, Verdict.AIM),
        (2, Verdict.AT_LEAST),
        (2.5, Verdict.AT_LEAST),
        (2.6, Verdict.SHORT),
    ],
)
def test_where_less_is_better(value: float, verdict: Verdict) -> None:
    assert judge(goal(Better.LOWER, 2.5, 1.5), Figure(value)) is verdict


@pytest.mark.parametrize(("value", "verdict"), [(1, Verdict.AIM), (1.1, Verdict.SHORT)])
def test_without_an_aim_the_least_is_all_there_is_to_meet(value: float, verdict: Verdict) -> None:
    assert judge(goal(Better.LOWER, 1, None), Figure(value)) is verdict


def test_what_was_not_measured_meets_nothing() -> None:
    assert judge(goal(Better.LOWER, 1, None), NotMeasured("no server")) is Verdict.NOT_MEASURED


def test_every_goal_is_a_row_whatever_was_measured() -> None:
    rows = all_rows({"latency": Figure(1.0)}, otherwise="not asked for")

    assert [row[0] for row in rows] == list(GOALS)
    assert {verdict for row_goal, _, verdict in rows if row_goal.key != "latency"} == {Verdict.NOT_MEASURED}


def test_keys_are_unique_and_every_aim_is_beyond_the_least() -> None:
    assert len({one.key for one in GOALS}) == len(GOALS)
    for one in GOALS:
        assert one.aim is None or (one.aim > one.at_least) == (one.better is Better.HIGHER)


def test_turns_rotate() -> None:
    assert [rotated("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert rotated([], 3) == []


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    figure = ratio([10, 20, 1000], [5, 5, 1000], unit="calls/s")

    assert figure.rounds == (2, 4, 1)
    assert figure.value == 2
    assert figure.detail == "20 against 5 calls/s"


def test_percentiles() -> None:
    values = list(range(100, 0, -1))

    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7], 0.5)) == (50, 99, 7)


@pytest.mark.parametrize("exponent", [1, 2])
def test_growth_is_told_by_its_exponent(exponent: int) -> None:
    assert growth_exponent([turn**exponent for turn in range(1, 41)]) == pytest.approx(exponent)


def test_the_document_says_everything_in_plain_json() -> None:
    section = Section("cost", data={"rates": [1 / 3, float("inf")], "pair": (2, 3)}, notes=["a remark"])
    rows = all_rows({"latency": Figure(1 / 3, "1 against 3", (1 / 3,))}, otherwise="not asked for")
    document = as_document(machine={"cores": "2"}, run={"rounds": 1}, rows=rows, sections=[section])

    assert json.loads(json.dumps(document)) == document | {
        "sections": {"cost": {"data": {"rates": [0.333333, None], "pair": [2, 3]}, "notes": ["a remark"]}}
    }
    by_key = {row["key"]: row for row in document["goals"]}
    assert set(by_key) == {one.key for one in GOALS}
    assert (by_key["latency"]["value"], by_key["latency"]["rounds"]) == (0.333333, [0.333333])
    assert (by_key["workers"]["value"], by_key["workers"]["reason"]) == (None, "not asked for")


def test_the_filesystem_is_that_of_the_longest_mount_point(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"a / ext4 rw 0 0\nb {tmp_path} tmpfs rw 0 0\nc {tmp_path}/other xfs rw 0 0\n")

    assert filesystem_of(tmp_path, mounts) == "tmpfs"
    assert filesystem_of(tmp_path, tmp_path / "none") == "unknown"
