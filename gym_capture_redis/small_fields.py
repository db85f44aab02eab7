"""The small fields of a record, all but its arrays: which are stored, and by which text they are compared.

No I/O here.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from functools import cache
from typing import Any

SUBJECT_FIELDS = ("rollout_id", "model_call_id")
"""They are in the names of key and field; the digest covers them."""

ARRAY_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
PACKED_FIELDS = {*ARRAY_FIELDS, "routed_experts"}
"""All others are small."""

OMITTED_VALUES: dict[str, Any] = {
    "schema_version": 1,
    "model": "",
    "output_items": [],
    "token_item_index": None,
    "response_id": None,
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
"""Values that a stored record leaves out, and every reader puts back. Part of the format, never changed."""

# What comes here was read from JSON or made by pydantic, which refuses what holds itself.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False)


def without_omitted(small_fields: dict[str, Any]) -> dict[str, Any]:
    """What is stored of the small fields."""
    return {
        name: value
        for name, value in small_fields.items()
        if name not in SUBJECT_FIELDS and (name not in OMITTED_VALUES or value != OMITTED_VALUES[name])
    }


@cache
def omitted_by(entry_type: Hashable) -> dict[str, Any]:
    """What records leave out and this class has: an older one may not know all fields."""
    known = getattr(entry_type, "model_fields", OMITTED_VALUES)
    return {name: value for name, value in OMITTED_VALUES.items() if name in known}


def canonical_json(value: Any) -> bytes:
    """The one text of equal values: ASCII, keys sorted, no spaces.

    Raises:
        ValueError, TypeError, RecursionError: no JSON value, or one that is nested too deeply.

    """
    return _CANONICAL.encode(value).encode("ascii")
