"""On every input, our record and response parsing give what Gym's give, or a clearer error."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture_redis import gym_compat, records

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("nemo_gym.token_id_capture", reason="these tests compare with NeMo Gym")

SERVED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "served_responses.jsonl").read_text().splitlines()
]
FUNCTIONS = ["extract_token_fields", "response_to_output_items"]

thorough = settings(max_examples=400)


def gym(name: str) -> Any:
    return gym_compat.gym_attribute("records", name)


def outcome(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """Call the function: ("returned", value), ("refused", …) for a ValueError, else ("crashed", …)."""
    try:
        return "returned", function(*args)
    except ValueError:
        return "refused", None
    except (AttributeError, TypeError, StopIteration) as error:
        return "crashed", type(error)


def assert_agreement(name: str, *args: Any) -> None:
    theirs = outcome(gym(name), *args)
    ours = outcome(getattr(records, name), *args)
    if theirs[0] == "crashed" or has_no_list_of_choices(args[0]):
        # Gym fails somewhere inside, or takes the keys of a mapping for choices; ours says what is wrong,
        # or need not care.
        assert ours[0] in ("returned", "refused"), (theirs, ours)
    else:
        assert ours == theirs
        assert as_text(ours) == as_text(theirs)


def has_no_list_of_choices(response: object) -> bool:
    choices = response.get("choices") if isinstance(response, dict) else None
    return bool(choices) and not isinstance(choices, list)


def as_text(value: object) -> str:
    """Return JSON text, which also tells the order of keys and 1 from 1.0 from True."""
    return json.dumps(value)


# Anything JSON can say, but with the names that matter, so that most examples mean something.

scalars = st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | st.text(max_size=3)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
arrays = st.none() | st.lists(st.integers(0, 300), max_size=3)
carriers = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(records.TOKEN_FIELDS, arrays),
        "type": st.sampled_from(["message", "reasoning", None]),
        "role": st.sampled_from(["assistant", "tool", None]),
        "content": anything,
    },
)
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(["thinking", "redacted_thinking", "text", "tool_use"])},
    optional={"thinking": scalars, "data": scalars, "text": scalars},
)
responses = st.fixed_dictionaries(
    {},
    optional={
        "output": st.lists(carriers | anything, max_size=3) | anything,
        "choices": st.lists(st.fixed_dictionaries({}, optional={"message": carriers | anything}), max_size=3)
        | st.lists(anything, max_size=2)
        | anything,
        "type": st.sampled_from(["message", "response"]),
        "role": st.sampled_from(["assistant", "user"]),
        "content": st.none() | st.lists(blocks | anything, max_size=3),
    },
)


@pytest.mark.parametrize("function", FUNCTIONS)
@thorough
@given(response=responses)
def test_any_response_is_read_as_gym_reads_it(function: str, response: dict[str, Any]) -> None:
    assert_agreement(function, response)


@pytest.mark.parametrize("function", FUNCTIONS)
@thorough
@given(response=anything)
def test_what_is_no_response_at_all_is_never_a_crash(function: str, response: Any) -> None:
    assert_agreement(function, response)


@thorough
@given(items=st.lists(carriers, max_size=4) | st.lists(carriers | anything, max_size=3))
def test_any_items_are_stripped_as_gym_strips_them(items: list[Any]) -> None:
    assert_agreement("strip_token_fields", items)


@thorough
@given(token_ids=st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_any_sequence_has_gyms_digest(token_ids: list[int]) -> None:
    assert records.compute_digest(token_ids) == gym("compute_digest")(token_ids)


@thorough
@given(token_ids=st.lists(st.integers(-2, 2**64 + 2) | scalars, max_size=6))
def test_a_sequence_that_gym_refuses_is_refused(token_ids: list[Any]) -> None:
    assert_agreement("compute_digest", token_ids)


# Entries: mostly consistent ones, each field sometimes wrong.

lineages = st.fixed_dictionaries(
    {},
    optional={
        "parent_call_id": st.sampled_from([None, "", "call-0"]),
        "parent_resolution": st.sampled_from([None, "root", "resolved", "unresolved", "orphan"]),
        "parent_resolution_reason": st.text(max_size=3),
        "prompt_is_delta": st.booleans(),
        "cum_len": st.none() | st.integers(),
        "digest": st.none() | st.text(max_size=3),
    },
)
optional_fields = st.fixed_dictionaries(
    {},
    optional={
        "schema_version": st.integers(-1, 3) | scalars,
        "model": scalars,
        "routed_experts": anything,
        "output_items": st.lists(st.dictionaries(st.text(max_size=3), anything, max_size=2), max_size=3),
        "token_item_index": st.none() | st.integers(-2, 3),
        "response_id": st.none() | st.text(max_size=3),
        "created_at": st.floats(),
        "continuation_fingerprint": scalars,
        "continuation_context_len": scalars,
        "fingerprint_version": scalars,
        "prefix_requested": scalars,
        "an_extra": anything,
    },
)
generations = st.lists(st.tuples(st.integers(0, 2**63), st.floats()), max_size=5)


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    generation = draw(generations)
    fields = {
        "rollout_id": "rollout",
        "model_call_id": "call-1",
        "prompt_token_ids": draw(st.lists(st.integers(0, 2**63), max_size=5)),
        "generation_token_ids": [token_id for token_id, _ in generation],
        "generation_log_probs": [log_prob for _, log_prob in generation],
        **draw(optional_fields),
        **draw(lineages),
    }
    for name in draw(st.lists(st.sampled_from(list(fields)), max_size=1)):
        fields[name] = draw(anything)
    return fields


def dumped(entry_class: Any, fields: dict[str, Any]) -> tuple[str, Any]:
    """Validate, then dump in both modes, as text that shows every bit and the order of the fields."""
    status, entry = outcome(entry_class.model_validate, fields)
    if status != "returned":
        return status, None
    return status, [
        as_text(entry.model_dump(mode="json")),
        as_text(entry.model_dump()),
        entry.model_dump_json(),
    ]


@thorough
@given(fields=entries())
def test_any_entry_is_accepted_or_refused_and_dumped_as_by_gym(fields: dict[str, Any]) -> None:
    assert dumped(records.TokenEntry, fields) == dumped(gym("TokenEntry"), fields)


@thorough
@given(fields=entries())
def test_any_sequence_of_an_entry_is_what_gym_reads_from_it(fields: dict[str, Any]) -> None:
    status, entry = outcome(records.TokenEntry.model_validate, fields)
    if status == "returned":
        assert_agreement("cumulative_tokens", entry)


def test_the_entry_classes_have_the_same_fields_order_and_defaults() -> None:
    ours, theirs = records.TokenEntry.model_fields, gym("TokenEntry").model_fields
    assert list(ours) == list(theirs)
    for name, field in ours.items():
        assert field.get_default(call_default_factory=True) == theirs[name].get_default(
            call_default_factory=True
        ), name


def test_the_statuses_and_token_fields_are_gyms() -> None:
    assert list(records.ParentResolutionStatus) == list(gym("ParentResolutionStatus"))
    assert gym("TOKEN_FIELDS") == records.TOKEN_FIELDS
    assert gym("TOKEN_ENTRY_RECORD_SCHEMA_VERSION") == records.SCHEMA_VERSION


def test_an_entry_stamped_by_gym_dumps_without_a_warning() -> None:
    fields = {"rollout_id": "r", "model_call_id": "c", "prompt_token_ids": [1], "generation_token_ids": [2]}
    ours = records.TokenEntry.model_validate({**fields, "generation_log_probs": [-0.5]})
    theirs = gym("TokenEntry").model_validate({**fields, "generation_log_probs": [-0.5]})
    for entry in (ours, theirs):
        gym("stamp_lineage")(entry, "parent", parent_resolution=gym("ParentResolutionStatus").RESOLVED)
        records.check_entry(entry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours.model_dump(mode="json") == theirs.model_dump(mode="json")
        assert ours.model_dump() == theirs.model_dump()
        assert ours.model_dump_json() == theirs.model_dump_json()


@pytest.mark.parametrize(
    "served", SERVED, ids=lambda served: f"{served['rollout_id']}-{served['model_call_id']}"
)
def test_a_really_served_response_is_read_as_gym_reads_it(served: dict[str, Any]) -> None:
    response = served["response"]
    for function in FUNCTIONS:
        assert_agreement(function, response)
    assert_agreement("strip_token_fields", records.response_to_output_items(response))
    token_fields = records.extract_token_fields(response)
    assert token_fields is not None
    assert_agreement(
        "compute_digest", token_fields["prompt_token_ids"] + token_fields["generation_token_ids"]
    )
    fields = {"rollout_id": served["rollout_id"], "model_call_id": served["model_call_id"], **token_fields}
    assert dumped(records.TokenEntry, fields) == dumped(gym("TokenEntry"), fields)
