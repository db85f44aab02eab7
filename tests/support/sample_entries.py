"""Entries for tests: one small one, any one (hypothesis), and what makes two of them exactly equal."""

from __future__ import annotations

import base64
import struct
from itertools import cycle, islice
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gym_capture_redis.records import TokenEntry

SMALL: dict[str, Any] = {
    "rollout_id": "rollout",
    "model_call_id": "call",
    "model": "policy",
    "prompt_token_ids": [1, 2, 300],
    "generation_token_ids": [70_000, 5],
    "generation_log_probs": [-0.5, -0.1],
    "routed_experts": [[[1, 2]], [[3, 4]]],
    "output_items": [{"type": "message", "content": [{"type": "output_text", "text": "hé"}]}],
    "token_item_index": 0,
    "response_id": "resp-1",
    "created_at": 1_700_000_000.125,
}


def sample_entry(rollout_id: str = "rollout", model_call_id: str = "call", **fields: Any) -> TokenEntry:
    return TokenEntry(**SMALL | {"rollout_id": rollout_id, "model_call_id": model_call_id} | fields)


def exact(value: Any) -> Any:
    """``value`` in a form whose equality also compares types and every bit of a float."""
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, list):
        return [exact(item) for item in value]
    if isinstance(value, dict):
        return {(type(key), key): exact(item) for key, item in value.items()}
    return type(value), value


def exact_dump(entry: Any) -> Any:
    return exact(entry.model_dump(mode="json"))


def _nested(shape: list[int], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    if not shape:
        return values
    return st.lists(_nested(shape[1:], values), min_size=shape[0], max_size=shape[0])


token_ids = st.one_of(
    st.integers(0, 255), st.integers(0, 2**16), st.integers(0, 2**32), st.integers(0, 2**63 - 1)
)
finite_floats = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.floats(allow_nan=False, allow_infinity=False),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
expert_ids = st.one_of(
    st.integers(0, 255), st.integers(-128, 127), st.integers(0, 511), st.integers(-(2**63), 2**64 - 1)
)
nested_experts = st.lists(st.integers(0, 3), min_size=1, max_size=3).flatmap(
    lambda shape: _nested(shape, expert_ids)
)
ragged_experts = st.lists(st.lists(expert_ids, max_size=3), max_size=3)
float_experts = st.lists(st.lists(finite_floats, max_size=2), max_size=2)
canonical_routes = st.builds(
    lambda width, raw: f"nrlre1:{width}:{len(raw)}x1x1:{base64.b64encode(raw).decode()}",
    st.sampled_from(["int8", "int16", "int32"]),
    st.binary(max_size=12),
)
other_routes = st.sampled_from(
    [
        "",
        "nrlre1:int8:1x1x1:",
        "nrlre1:int8:1x1x1:AB==",  # the unused bits are not zero
        "nrlre1:int8:1x1x1:AA",  # no padding
        "nrlre1:int8:1x1x1:AA==\n",
        "nrlre1:int8:1x1x1:A A=",
        "nrlre1:int8:1x1x1:é",
        "nrlre1:int8:1x1x1:_-==",
        "nrlre2:int8:1x1x1:AA==",
        "nrlre1::x:AA==",
    ]
)
routed_experts = st.one_of(
    st.none(),
    nested_experts,
    ragged_experts,
    float_experts,
    canonical_routes,
    other_routes,
    st.text(max_size=8),
    st.dictionaries(st.text(max_size=4), json_values, max_size=2),
)
extra_names = st.text(min_size=1, max_size=8).filter(lambda name: name not in TokenEntry.model_fields)
output_items = st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), max_size=3)
lineages: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {"parent_call_id": "parent"},
        {"parent_resolution": "root"},
        {"parent_resolution": "unresolved", "parent_resolution_reason": "not_attempted"},
        {"parent_resolution": "resolved", "parent_call_id": "parent", "prompt_is_delta": True},
    ]
)


long_ids = st.builds(
    lambda pattern, length: list(islice(cycle(pattern), length)),
    st.lists(token_ids, min_size=1, max_size=4),
    st.sampled_from([255, 256, 257, 600]),
)
"""Enough for several token blocks."""


@st.composite
def entry_fields(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of any valid entry."""
    generated = draw(st.lists(token_ids, max_size=6))
    items = draw(output_items)
    return {
        **draw(st.dictionaries(extra_names, json_values, max_size=3)),
        "rollout_id": draw(st.text(max_size=6)),
        "model_call_id": draw(st.text(max_size=6)),
        "model": draw(st.text(max_size=6)),
        "prompt_token_ids": draw(st.lists(token_ids, max_size=6) | long_ids),
        "generation_token_ids": generated,
        "generation_log_probs": [draw(finite_floats) for _ in generated],
        "routed_experts": draw(routed_experts),
        "output_items": items,
        "token_item_index": draw(st.integers(0, len(items) - 1)) if items else None,
        "response_id": draw(st.none() | st.text(max_size=6)),
        "created_at": draw(finite_floats),
        "cum_len": draw(st.none() | st.integers(0, 2**40)),
        "continuation_fingerprint": draw(st.text(max_size=6)),
        "fingerprint_version": draw(st.none() | st.integers(-(2**31), 2**31)),
        "prefix_requested": draw(st.booleans()),
        **draw(lineages),
    }


def as_numpy(entry: TokenEntry) -> TokenEntry:
    """Copy ``entry`` with its arrays as numpy arrays, as an engine may hand them over."""
    experts = entry.routed_experts
    return entry.model_copy(
        update={
            "prompt_token_ids": np.asarray(entry.prompt_token_ids, np.uint64),
            "generation_token_ids": np.asarray(entry.generation_token_ids, np.int64),
            "generation_log_probs": np.asarray(entry.generation_log_probs, np.float64),
            "routed_experts": np.asarray(experts) if isinstance(experts, list) else experts,
        }
    )
