"""Workloads of the benchmark: made the same every time, and how much of them is new."""

from __future__ import annotations

import itertools
import json
import pickle
from typing import Any

import pytest

pytest.importorskip("typer")

from gym_capture_redis.cli.bench.shape import Shape, ShapeError, parse_experts
from gym_capture_redis.cli.bench.workload import Recorded, Workload, new_information
from gym_capture_redis.cli.served_calls import load_rollouts
from gym_capture_redis.records import compute_digest

SMALL = Shape(rollouts=3, calls=4, first_prompt=100, growth=30, generated=20)


def dumped(rollout: list[Any]) -> list[dict[str, Any]]:
    return [entry.model_dump(mode="json") for entry in rollout]


def test_each_prompt_is_the_sequence_before_it_and_the_growth() -> None:
    rollout = SMALL.rollout(0)

    assert [len(entry.prompt_token_ids) for entry in rollout] == [100, 150, 200, 250]
    assert all(len(entry.generation_token_ids) == len(entry.generation_log_probs) == 20 for entry in rollout)
    for before, after in itertools.pairwise(rollout):
        sequence = before.prompt_token_ids + before.generation_token_ids
        assert after.prompt_token_ids[: len(sequence)] == sequence


def test_a_shape_makes_the_same_rollout_for_the_same_number_only() -> None:
    assert dumped(SMALL.rollout(1)) == dumped(SMALL.rollout(1))
    assert SMALL.rollout(1)[0].prompt_token_ids != SMALL.rollout(2)[0].prompt_token_ids


@pytest.mark.parametrize("recipe", [SMALL, Recorded(2)], ids=["shape", "recorded"])
def test_a_recipe_arrives_whole_in_another_process(recipe: Any) -> None:
    assert dumped(pickle.loads(pickle.dumps(recipe)).rollout(1)) == dumped(recipe.rollout(1))


def test_entries_are_stamped_as_the_capture_flow_does() -> None:
    entry = SMALL.rollout(0)[1]
    sequence = entry.prompt_token_ids + entry.generation_token_ids

    assert (entry.cum_len, entry.digest) == (len(sequence), compute_digest(sequence))
    assert (entry.parent_resolution, entry.parent_resolution_reason) == ("unresolved", "not_attempted")


def test_experts_have_gyms_string_form_for_every_id_of_the_sequence() -> None:
    (entry,) = Shape(calls=1, first_prompt=10, generated=2, experts=(3, 2)).rollout(0)

    assert entry.routed_experts.startswith("nrlre1:int8:12x3x2:")


@pytest.mark.parametrize("text", ["", "48", "48x", "x8", "0x8", "4x4x4", "-1x2"])
def test_other_experts_are_refused(text: str) -> None:
    with pytest.raises(ShapeError, match="LAYERSxTOPK"):
        parse_experts(text)


def test_experts_are_read() -> None:
    assert parse_experts("48x8") == (48, 8)


def test_attempts_go_round_the_recordings_under_ids_of_their_own() -> None:
    recordings = load_rollouts()
    workload = Workload(Recorded(len(recordings) + 1))
    first, again = workload.rollouts[0], workload.rollouts[-1]

    assert len({rollout[0].rollout_id for rollout in workload.rollouts}) == len(recordings) + 1
    assert [entry.prompt_token_ids for entry in first] == [entry.prompt_token_ids for entry in again]
    assert workload.calls == sum(map(len, workload.rollouts))


def test_a_part_of_a_workload_holds_the_rollouts_of_its_numbers() -> None:
    part = Workload(SMALL, numbers=[2, 0])

    assert [dumped(rollout) for rollout in part.rollouts] == [
        dumped(SMALL.rollout(2)),
        dumped(SMALL.rollout(0)),
    ]


def test_new_information_counts_every_new_id_log_prob_and_text_once() -> None:
    rollout = SMALL.rollout(0)
    text = sum(
        len(json.dumps(entry.output_items, ensure_ascii=False, separators=(",", ":")).encode())
        for entry in rollout
    )

    assert sum(new_information(rollout)) == 4 * (100 + 3 * 30 + 4 * 20) + 4 * (4 * 20) + text


def test_what_another_branch_repeats_is_not_new() -> None:
    first, second, *_ = SMALL.rollout(0)
    second.prompt_token_ids[90:] = [1] * (len(second.prompt_token_ids) - 90)
    (whole,), (_, rest) = new_information([second]), new_information([first, second])

    assert whole - rest == 4 * 90


def test_the_recorded_calls_hold_as_much_as_is_documented() -> None:
    workload = Workload(Recorded(len(load_rollouts())))

    assert workload.calls == 187
    assert round(workload.new_information / workload.calls) == 3_987
