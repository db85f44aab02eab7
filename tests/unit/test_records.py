"""The record of a model call, and reading it off what three kinds of API serve."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from gym_capture_redis.records import (
    TOKEN_FIELDS,
    ParentResolutionStatus,
    TokenEntry,
    check_entry,
    compute_digest,
    cumulative_tokens,
    extract_token_fields,
    response_to_output_items,
    strip_token_fields,
)

SERVED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "served_responses.jsonl").read_text().splitlines()
]
ARRAYS = {
    "prompt_token_ids": [1, 2, 3],
    "generation_token_ids": [4, 5],
    "generation_log_probs": [-0.5, -0.25],
}


def entry(**fields: Any) -> TokenEntry:
    return TokenEntry(**{"rollout_id": "rollout", "model_call_id": "call", **ARRAYS, **fields})


# The entry


def test_an_entry_needs_only_its_ids_and_arrays() -> None:
    assert entry().model_dump(mode="json") == {
        "schema_version": 1,
        "rollout_id": "rollout",
        "model_call_id": "call",
        "model": "",
        **ARRAYS,
        "routed_experts": None,
        "output_items": [],
        "token_item_index": None,
        "response_id": None,
        "created_at": 0.0,
        "parent_call_id": None,
        "cum_len": None,
        "digest": None,
        "parent_resolution": None,
        "continuation_fingerprint": "",
        "continuation_context_len": 0,
        "continuation_context_digest": "",
        "parent_resolution_reason": "",
        "fingerprint_version": None,
        "prompt_is_delta": False,
        "prefix_requested": False,
        "prefix_supplied": False,
    }


@pytest.mark.parametrize("field", ["rollout_id", "model_call_id", *ARRAYS])
def test_an_entry_without_a_required_field_is_refused(field: str) -> None:
    fields = {"rollout_id": "rollout", "model_call_id": "call", **ARRAYS}
    del fields[field]
    with pytest.raises(ValidationError, match=field):
        TokenEntry.model_validate(fields)


def test_unknown_fields_survive_the_round_trip() -> None:
    dump = entry(reward_hint={"score": [1, None, "x"]}).model_dump(mode="json")
    assert dump["reward_hint"] == {"score": [1, None, "x"]}
    assert TokenEntry.model_validate_json(json.dumps(dump)).model_dump(mode="json") == dump


def test_the_arrays_may_be_empty() -> None:
    empty = entry(prompt_token_ids=[], generation_token_ids=[], generation_log_probs=[])
    assert empty.model_dump(mode="json")["generation_log_probs"] == []


@pytest.mark.parametrize("experts", [None, [[[0, 300]], [[7, 1]]], "nrlre1:int16:1x1x2:AAABAA=="])
def test_routed_experts_are_kept_as_they_come(experts: object) -> None:
    assert entry(routed_experts=experts).model_dump(mode="json")["routed_experts"] == experts


def test_a_newer_schema_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"schema_version 2.*with schema_version 1, or upgrade"):
        entry(schema_version=2)


@pytest.mark.parametrize("version", [0, -1])
def test_a_schema_below_one_is_refused(version: int) -> None:
    with pytest.raises(ValueError, match=rf"schema_version {version}.*start at 1"):
        entry(schema_version=version)


def test_every_generated_id_has_a_log_probability() -> None:
    with pytest.raises(ValueError, match="2 generation_token_ids need as many generation_log_probs, not 1"):
        entry(generation_log_probs=[-0.5])


@pytest.mark.parametrize("index", [-1, 2, 3])
def test_the_token_item_is_one_of_the_output_items(index: int) -> None:
    with pytest.raises(ValueError, match=f"token_item_index is {index}, but there are 2"):
        entry(output_items=[{}, {}], token_item_index=index)


def test_any_output_item_can_be_the_token_item() -> None:
    assert entry(output_items=[{}, {}], token_item_index=0).token_item_index == 0
    assert entry(output_items=[{}, {}], token_item_index=1).token_item_index == 1


@pytest.mark.parametrize("parent", [None, ""])
def test_a_resolved_call_names_its_parent(parent: str | None) -> None:
    with pytest.raises(ValueError, match="resolved needs a parent_call_id"):
        entry(parent_resolution="resolved", parent_call_id=parent)


@pytest.mark.parametrize("status", ["root", "unresolved"])
@pytest.mark.parametrize("parent", ["call-0", ""])
def test_a_root_or_unresolved_call_names_no_parent(status: str, parent: str) -> None:
    with pytest.raises(ValueError, match=f"parent_resolution {status} cannot have a parent_call_id"):
        entry(parent_resolution=status, parent_call_id=parent)


@pytest.mark.parametrize("lineage", [{}, {"parent_resolution": "root"}, {"parent_call_id": "call-0"}])
def test_a_delta_prompt_needs_a_resolved_parent(lineage: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="delta prompt needs parent_resolution resolved"):
        entry(prompt_is_delta=True, **lineage)


def test_consistent_lineage_is_accepted() -> None:
    assert entry(parent_resolution="root").parent_resolution is ParentResolutionStatus.ROOT
    assert entry(parent_resolution="unresolved").parent_resolution is ParentResolutionStatus.UNRESOLVED
    assert entry(parent_call_id="call-0").parent_resolution is None
    child = entry(parent_resolution="resolved", parent_call_id="call-0", prompt_is_delta=True)
    assert child.parent_resolution is ParentResolutionStatus.RESOLVED


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"generation_log_probs": []},
        {"token_item_index": 0},
        {"parent_resolution": "resolved"},
        {"parent_resolution": "orphan"},
        {"prompt_is_delta": True},
    ],
)
def test_an_entry_changed_after_it_was_built_can_be_checked_again(change: dict[str, Any]) -> None:
    changed = entry()
    check_entry(changed)
    for name, value in change.items():
        setattr(changed, name, value)
    with pytest.raises(ValueError, match=next(iter(change)).removeprefix("prompt_is_")):
        check_entry(changed)


def test_a_status_assigned_as_text_is_dumped_like_the_enum() -> None:
    assigned: Any = entry()
    assigned.parent_resolution = "root"
    assert assigned.model_dump(mode="json") == entry(parent_resolution="root").model_dump(mode="json")
    assert assigned.model_dump()["parent_resolution"] is ParentResolutionStatus.ROOT


# The digest


def test_the_digest_of_no_tokens_is_that_of_the_domain_alone() -> None:
    assert compute_digest([]) == hashlib.sha256(b"nemo-gym-tokens").hexdigest()


@pytest.mark.parametrize("token_ids", [[0], [1, 2, 3], [2**64 - 1], list(range(2000))])
def test_the_digest_covers_length_and_ids_as_big_endian_numbers(token_ids: list[int]) -> None:
    encoded = b"nemo-gym-tokens" + struct.pack(">BQ", 1, len(token_ids))
    for token_id in token_ids:
        encoded += struct.pack(">Q", token_id)
    assert compute_digest(token_ids) == hashlib.sha256(encoded).hexdigest()


def test_the_digest_is_the_same_whatever_carries_the_ids() -> None:
    array: Any = np.array([1, 2, 3], dtype=np.int32)
    assert compute_digest(array) == compute_digest((1, 2, 3)) == compute_digest([1, 2, 3])
    assert compute_digest(array[:0]) == compute_digest([])


@pytest.mark.parametrize("bad", [-1, 2**64, 1.0, "7", None])
def test_an_id_that_is_no_token_id_is_refused_by_position(bad: Any) -> None:
    with pytest.raises(ValueError, match="at position 2 is no integer"):
        compute_digest([5, 6, bad, 7])


def test_the_sequence_of_a_call_is_its_prompt_and_what_was_generated() -> None:
    call = entry()
    assert cumulative_tokens(call) == [1, 2, 3, 4, 5]
    assert call.prompt_token_ids == [1, 2, 3]


def test_the_sequence_of_a_delta_is_not_guessed() -> None:
    delta = entry(prompt_is_delta=True, parent_resolution="resolved", parent_call_id="call-0")
    with pytest.raises(ValueError, match="call holds a delta prompt"):
        cumulative_tokens(delta)


# Token arrays on a served response


def test_the_arrays_are_found_on_a_responses_output_item() -> None:
    response = {"output": [{"type": "reasoning"}, {"type": "message", **ARRAYS, "routed_experts": "nrlre1:"}]}
    assert extract_token_fields(response) == {**ARRAYS, "routed_experts": "nrlre1:"}


def test_the_arrays_are_found_on_a_chat_completions_message() -> None:
    response = {"choices": [{"message": {"content": "hi", **ARRAYS}}]}
    assert extract_token_fields(response) == {**ARRAYS, "routed_experts": None}


def test_empty_arrays_are_arrays() -> None:
    empty: dict[str, list[Any]] = {name: [] for name in ARRAYS}
    assert extract_token_fields({"output": [empty]}) == {**empty, "routed_experts": None}


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"output": None, "choices": None},
        {"output": [], "choices": []},
        {"output": "text", "choices": ""},
        {"output": {"text": 1}},
        {"output": [None, "text", 1, ["nested"], {"type": "message"}]},
        {"output": [dict.fromkeys(ARRAYS)]},
        {"output": [{"routed_experts": "nrlre1:"}]},
        {"choices": [None, {}, {"message": None}, {"message": "text"}, {"message": {"content": "hi"}}]},
        {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hi"}]},
    ],
)
def test_a_response_without_arrays_has_none(response: dict[str, Any]) -> None:
    assert extract_token_fields(response) is None


@pytest.mark.parametrize("missing", list(ARRAYS))
def test_only_some_of_the_arrays_is_an_error(missing: str) -> None:
    item = {**ARRAYS, missing: None}
    with pytest.raises(ValueError, match=f"without {missing}"):
        extract_token_fields({"output": [item]})


@pytest.mark.parametrize(
    "response",
    [
        {"output": [ARRAYS, ARRAYS]},
        {"choices": [{"message": ARRAYS}, {"message": ARRAYS}]},
        {"output": [ARRAYS], "choices": [{"message": {"prompt_token_ids": []}}]},
    ],
)
def test_arrays_on_several_items_are_an_error(response: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="2 items of the response carry token ids"):
        extract_token_fields(response)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ({"output": 5}, "output of the response is a int, not a list"),
        ({"choices": "text"}, "choices of the response is a str, not a list"),
        ({"choices": {"0": {}}}, "choices of the response is a dict, not a list"),
        ({"choices": [{}, "text"]}, r"choices\[1\] of the response is a str, not a dict"),
        ([ARRAYS], "The response is a list, not a dict"),
    ],
)
def test_a_malformed_response_is_refused_in_clear_words(response: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extract_token_fields(response)


# Stripped output items


def test_items_are_stripped_of_the_arrays_and_nothing_else() -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning"},
        {"type": "message", "content": [], **ARRAYS, "routed_experts": "x"},
    ]
    assert strip_token_fields(items) == ([{"type": "reasoning"}, {"type": "message", "content": []}], 1)
    assert set(items[1]) == {"type", "content", *TOKEN_FIELDS}


def test_without_generated_ids_no_item_is_the_token_item() -> None:
    assert strip_token_fields([{"prompt_token_ids": [1], "generation_token_ids": None}]) == ([{}], None)
    assert strip_token_fields([]) == ([], None)


def test_several_items_with_generated_ids_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"items \[0, 2\] all carry"):
        strip_token_fields([ARRAYS, {}, ARRAYS])


def test_an_item_that_is_no_dict_is_refused_in_clear_words() -> None:
    items: Any = [{}, "text"]
    with pytest.raises(ValueError, match="Output item 1 is a str"):
        strip_token_fields(items)


# Output items of three APIs


def test_responses_output_is_taken_as_it_is() -> None:
    items = [{"type": "reasoning", "summary": []}, {"type": "function_call", "name": "ls"}]
    assert response_to_output_items({"output": [*items, None, "text"], "choices": [{"message": {}}]}) == items


def test_a_chat_message_becomes_a_message_item() -> None:
    message = {"content": "hi", "tool_calls": [{"id": "t"}]}
    assert response_to_output_items({"output": [], "choices": [{"message": message}]}) == [
        {"content": "hi", "tool_calls": [{"id": "t"}], "type": "message", "role": "assistant"}
    ]
    assert message == {"content": "hi", "tool_calls": [{"id": "t"}]}


def test_a_chat_message_keeps_its_own_type_and_role() -> None:
    message = {"role": "tool", "type": "other"}
    assert response_to_output_items({"choices": [{"message": message}]}) == [message]


def test_a_choice_without_a_message_keeps_its_place() -> None:
    blank = {"type": "message", "role": "assistant"}
    assert response_to_output_items({"choices": [None, {}, {"message": None}]}) == [blank] * 3
    assert response_to_output_items({"choices": [{"message": "text"}]}) == []


def test_an_anthropic_message_becomes_reasoning_and_one_message() -> None:
    text, tool = {"type": "text", "text": "hi"}, {"type": "tool_use", "name": "ls"}
    content = [
        {"type": "thinking", "thinking": "hm"},
        text,
        {"type": "redacted_thinking", "data": "sealed"},
        tool,
    ]
    assert response_to_output_items({"type": "message", "role": "assistant", "content": content}) == [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "sealed"},
        {"type": "message", "role": "assistant", "content": [text, tool]},
    ]


def test_anthropic_blocks_without_their_content_stay_as_empty_reasoning() -> None:
    content = [{"type": "thinking", "thinking": None}, {"type": "redacted_thinking"}]
    assert response_to_output_items({"type": "message", "role": "assistant", "content": content}) == [
        {"type": "reasoning", "summary": []},
        {"type": "reasoning", "summary": []},
    ]


@pytest.mark.parametrize("content", [None, []])
def test_an_empty_anthropic_message_has_no_items(content: object) -> None:
    assert response_to_output_items({"type": "message", "role": "assistant", "content": content}) == []


def test_a_string_of_anthropic_content_is_refused_in_clear_words() -> None:
    with pytest.raises(ValueError, match="content of the response is a str, not a list"):
        response_to_output_items({"type": "message", "role": "assistant", "content": "hi"})


def test_a_response_of_no_known_shape_has_no_items() -> None:
    assert response_to_output_items({"text": "hi"}) == []


@pytest.mark.parametrize(
    "served", SERVED, ids=lambda served: f"{served['rollout_id']}-{served['model_call_id']}"
)
def test_a_really_served_response_becomes_an_entry_without_losing_a_bit(served: dict[str, Any]) -> None:
    fields = extract_token_fields(served["response"])
    assert fields is not None
    items, index = strip_token_fields(response_to_output_items(served["response"]))
    assert index is not None
    carrier = served["response"]["output"][index]
    dump = entry(**fields, output_items=items, token_item_index=index).model_dump(mode="json")
    assert {name: dump[name] for name in ARRAYS} == {name: carrier[name] for name in ARRAYS}
    assert {**dump["output_items"][index], **{name: carrier[name] for name in ARRAYS}} == carrier
    assert not any(name in item for item in items for name in TOKEN_FIELDS)
