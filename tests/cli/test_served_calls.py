from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import gym_capture_redis.cli
from gym_capture_redis.cli.served_calls import DATA_FILE, MODEL, RecordedRollout, load_rollouts
from gym_capture_redis.records import extract_token_fields, strip_token_fields

DATA = Path(gym_capture_redis.cli.__file__).parent / "data" / DATA_FILE


@pytest.fixture(scope="module")
def recordings() -> tuple[RecordedRollout, ...]:
    return load_rollouts()


def test_the_recordings_are_what_their_description_says(recordings: tuple[RecordedRollout, ...]) -> None:
    counts = [rollout.call_count for rollout in recordings]
    expanded = sum(
        rollout.call(index).token_count for rollout in recordings for index in range(rollout.call_count)
    )

    assert (len(recordings), sum(counts), min(counts), max(counts)) == (8, 187, 7, 91)
    assert round(expanded / 1e6, 2) == 3.27


def test_each_prompt_is_the_conversation_before_and_what_is_new(
    recordings: tuple[RecordedRollout, ...],
) -> None:
    for row, rollout in zip(gzip.decompress(DATA.read_bytes()).splitlines(), recordings, strict=True):
        prompt: list[int] = []
        items: list[object] = []
        for index, recorded in enumerate(json.loads(row)["calls"]):
            prompt = prompt + recorded["prompt_suffix_token_ids"]
            items = items + recorded["request_suffix_items"]
            call = rollout.call(index)
            assert call.prompt_token_ids == prompt
            assert call.request_items == items
            assert call.generation_token_ids == recorded["generation_token_ids"]
            assert call.generation_log_probs == recorded["generation_log_probs"]
            assert call.token_count == rollout.token_count(index)
            prompt = prompt + recorded["generation_token_ids"]
            items = items + recorded["output_items"]


def test_a_response_carries_the_arrays_on_exactly_one_item(recordings: tuple[RecordedRollout, ...]) -> None:
    call = recordings[0].call(3)

    response = call.response("resp-1")

    assert (response["id"], response["model"]) == ("resp-1", MODEL)
    assert extract_token_fields(response) == {
        "prompt_token_ids": call.prompt_token_ids,
        "generation_token_ids": call.generation_token_ids,
        "generation_log_probs": call.generation_log_probs,
        "routed_experts": None,
    }
    assert strip_token_fields(response["output"]) == (call.output_items, call.token_item_index)


def test_a_response_can_come_without_token_ids(recordings: tuple[RecordedRollout, ...]) -> None:
    call = recordings[0].call(3)

    assert extract_token_fields(call.response("resp-1", with_token_ids=False)) is None
    assert extract_token_fields(call.response("resp-1")) is not None


def test_changing_an_expanded_call_leaves_the_recording_alone(
    recordings: tuple[RecordedRollout, ...],
) -> None:
    call = recordings[0].call(0)
    call.prompt_token_ids.clear()
    call.generation_token_ids.clear()

    assert recordings[0].call(0).token_count == recordings[0].token_count(0)
