"""The record of one model call, and how it is read off a served response.

Contract, section 2. `TokenEntry` has the fields, order and defaults of Gym's, so that both dump to the
same JSON; it is always this package's own class, also where Gym is importable. No Redis here.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "REQUIRED_TOKEN_FIELDS",
    "SCHEMA_VERSION",
    "TOKEN_FIELDS",
    "ParentResolutionStatus",
    "TokenEntry",
    "check_entry",
    "compute_digest",
    "cumulative_tokens",
    "extract_token_fields",
    "response_to_output_items",
    "strip_token_fields",
]

SCHEMA_VERSION = 1
"""The newest ``schema_version`` that this package reads, and the one it writes."""

REQUIRED_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""What a captured response carries, all three on the same item."""

TOKEN_FIELDS = (*REQUIRED_TOKEN_FIELDS, "routed_experts")
"""Everything that is held on the entry and stripped from its output items."""


class ParentResolutionStatus(StrEnum):
    """Whether a call continues an earlier call of its rollout."""

    ROOT = "root"
    """It continues none: its request holds nothing a model said."""

    RESOLVED = "resolved"
    """It continues exactly the call named by ``parent_call_id``."""

    UNRESOLVED = "unresolved"
    """It may continue one, but which was not proven."""


_STATUSES = tuple(status.value for status in ParentResolutionStatus)


class TokenEntry(BaseModel):
    """What one model call was conditioned on and what it sampled.

    ``prompt_token_ids`` holds P ids, ``generation_token_ids`` G ids and ``generation_log_probs`` the
    natural logarithms of their probabilities, also G. ``routed_experts`` is [tokens][layers][top_k], a
    packed string, or None. ``output_items`` are the response's items without these arrays, of which
    ``token_item_index`` says which one carried them. ``created_at`` is in seconds since the epoch.

    Unknown fields are kept. A record that breaks a rule of `check_entry` is refused with pydantic's
    ValidationError, a ValueError. Assignments are not checked: check again before storing.
    """

    # "model_" is a reserved prefix for field names in pydantic before 2.10.
    # What is wrong is told by field and place, never by token data.
    model_config = ConfigDict(extra="allow", protected_namespaces=(), hide_input_in_errors=True)

    schema_version: int = SCHEMA_VERSION
    rollout_id: str
    model_call_id: str
    model: str = ""
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    routed_experts: Any | None = None
    output_items: list[dict[Any, Any]] = Field(default_factory=list)
    token_item_index: int | None = None
    response_id: str | None = None
    created_at: float = 0.0

    # Lineage: which call this one continues, and by what a later call recognises it as its parent.
    parent_call_id: str | None = None
    cum_len: int | None = None
    digest: str | None = None
    parent_resolution: ParentResolutionStatus | None = None
    continuation_fingerprint: str = ""
    continuation_context_len: int = 0
    continuation_context_digest: str = ""
    parent_resolution_reason: str = ""
    fingerprint_version: int | None = None

    # With a delta prompt, prompt_token_ids is only what follows the parent's sequence.
    prompt_is_delta: bool = False

    prefix_requested: bool = False
    prefix_supplied: bool = False

    @model_validator(mode="after")
    def _keep_the_rules(self) -> TokenEntry:
        check_entry(self)
        return self

    @field_serializer("parent_resolution")
    def _dump_parent_resolution(self, status: str | None) -> Any:
        # Gym's capture flow assigns its own enum, of the same values, which pydantic would warn about.
        return None if status is None else ParentResolutionStatus(status)


def check_entry(entry: TokenEntry) -> None:
    """Check the rules of contract section 2 that tie fields to each other.

    Works on Gym's entries as on ours, and costs nothing per token.

    Raises:
        ValueError: a schema version this package does not read, arrays of different lengths, an item
            index out of range, or parent fields that contradict each other. The message says which.

    """
    if not 1 <= entry.schema_version <= SCHEMA_VERSION:
        raise ValueError(
            f"The record has schema_version {entry.schema_version}, and this version of gym-capture-redis "
            f"knows none above {SCHEMA_VERSION}. Build the record with schema_version {SCHEMA_VERSION}, or "
            "upgrade gym-capture-redis: in the trainer first, then here."
            if entry.schema_version > SCHEMA_VERSION
            else f"The record has schema_version {entry.schema_version}; versions start at 1."
        )
    generated, scored = len(entry.generation_token_ids), len(entry.generation_log_probs)
    if generated != scored:
        raise ValueError(f"{generated} generation_token_ids need as many generation_log_probs, not {scored}.")
    items = len(entry.output_items)
    if entry.token_item_index is not None and not 0 <= entry.token_item_index < items:
        raise ValueError(f"token_item_index is {entry.token_item_index}, but there are {items} output_items.")
    _check_parent(entry)


def _check_parent(entry: TokenEntry) -> None:
    status, parent = entry.parent_resolution, entry.parent_call_id
    # Compared by value: the status may be Gym's enum, or a plain string assigned later.
    if status is not None and status not in _STATUSES:
        raise ValueError(f"parent_resolution is {status!r}; it can be root, resolved or unresolved.")
    resolved = status == ParentResolutionStatus.RESOLVED
    if resolved and not parent:
        raise ValueError("A record with parent_resolution resolved needs a parent_call_id.")
    if status is not None and not resolved and parent is not None:
        raise ValueError(f"A record with parent_resolution {status} cannot have a parent_call_id.")
    if entry.prompt_is_delta and not resolved:
        raise ValueError("A delta prompt needs parent_resolution resolved: it is a delta to the parent.")


def compute_digest(token_ids: Sequence[int]) -> str:
    """Hash a token sequence: SHA-256 in hex, the same as Gym's (contract, section 2).

    Raises:
        ValueError: an id is no integer from 0 to 2**64 - 1; the message names its position.

    """
    hasher = hashlib.sha256(b"nemo-gym-tokens")
    if len(token_ids):
        hasher.update(struct.pack(">BQ", 1, len(token_ids)))
        hasher.update(_big_endian_uint64(token_ids))
    return hasher.hexdigest()


def _big_endian_uint64(token_ids: Sequence[int]) -> array[int]:
    # Converted natively and then swapped: half the time of struct's ">Q".
    packed = array("Q")
    try:
        packed.extend(iter(token_ids))  # iter: an array of another typecode would be refused
    except (OverflowError, TypeError):
        raise ValueError(
            f"The token id at position {len(packed)} is no integer from 0 to 2**64 - 1."
        ) from None
    if sys.byteorder == "little":
        packed.byteswap()
    return packed


def cumulative_tokens(entry: TokenEntry) -> list[int]:
    """Return the prompt and generated ids as one list: what a child of this call must start with.

    Raises:
        ValueError: the entry holds a delta prompt, so the sequence is spread over its parents.

    """
    if entry.prompt_is_delta:
        raise ValueError(
            f"Model call {entry.model_call_id} holds a delta prompt; its sequence needs its parents."
        )
    return [*entry.prompt_token_ids, *entry.generation_token_ids]


def extract_token_fields(response_json: dict[str, Any]) -> dict[str, Any] | None:
    """Find the token arrays of a served response: the `TOKEN_FIELDS`, or None if it carries none.

    They are on one Responses ``output`` item or one Chat Completions ``choices[*].message``.

    Raises:
        ValueError: several items carry them, one carries only some, or the response is malformed.

    """
    carriers = [
        item
        for item in (*_output_dicts(response_json), *_chat_messages(response_json))
        if any(item.get(field) is not None for field in REQUIRED_TOKEN_FIELDS)
    ]
    if not carriers:
        return None
    if len(carriers) > 1:
        raise ValueError(f"{len(carriers)} items of the response carry token ids; there can be only one.")
    missing = [field for field in REQUIRED_TOKEN_FIELDS if carriers[0].get(field) is None]
    if missing:
        raise ValueError(f"The response carries token data without {', '.join(missing)}.")
    return {field: carriers[0].get(field) for field in TOKEN_FIELDS}


def strip_token_fields(items: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int | None]:
    """Return the items without their token arrays, and the index of the one that had generated ids.

    The items given are left as they are.

    Raises:
        ValueError: several items carry generated ids, or an item is not a dict.

    """
    stripped: list[dict[str, Any]] = []
    carriers: list[int] = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"Output item {index} is a {type(item).__name__}, not a dict.")  # noqa: TRY004
        if item.get("generation_token_ids") is not None:
            carriers.append(index)
        stripped.append({name: value for name, value in item.items() if name not in TOKEN_FIELDS})
    if len(carriers) > 1:
        raise ValueError(f"Output items {carriers} all carry generated token ids; only one can.")
    return stripped, carriers[0] if carriers else None


def response_to_output_items(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the model said as Responses output items, whatever API served it.

    A Responses ``output`` is taken as it is; an Anthropic message becomes reasoning items and one
    message item; each Chat Completions message becomes a message item.

    Raises:
        ValueError: the response is malformed, such as a string where a list belongs.

    """
    output = _as_dict(payload).get("output")
    if isinstance(output, list) and output:
        return [item for item in output if isinstance(item, dict)]
    if payload.get("type") == "message" and payload.get("role") == "assistant":
        return _anthropic_output_items(_as_list("content", payload.get("content")))
    return [
        {**message, "type": message.get("type", "message"), "role": message.get("role", "assistant")}
        for message in _chat_messages(payload)
    ]


def _anthropic_output_items(blocks: list[Any]) -> list[dict[str, Any]]:
    reasoning: list[dict[str, Any]] = []
    said: list[Any] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            text = block.get("thinking")
            summary = [{"type": "summary_text", "text": text}] if isinstance(text, str) else []
            reasoning.append({"type": "reasoning", "summary": summary})
        elif kind == "redacted_thinking":
            data = block.get("data")
            sealed = {} if data is None else {"encrypted_content": data}
            reasoning.append({"type": "reasoning", "summary": [], **sealed})
        else:
            said.append(block)
    return [*reasoning, {"type": "message", "role": "assistant", "content": said}] if said else reasoning


def _output_dicts(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what can be an item in a Responses ``output``; some APIs put plain text there."""
    output = _as_dict(payload).get("output")
    if isinstance(output, str | bytes | dict):
        return []
    return [item for item in _as_list("output", output) if isinstance(item, dict)]


def _chat_messages(payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each choice's message, an empty one for a choice that has none."""
    for index, choice in enumerate(_as_list("choices", payload.get("choices"))):
        if choice and not isinstance(choice, dict):
            raise ValueError(f"choices[{index}] of the response is a {type(choice).__name__}, not a dict.")
        message = (choice or {}).get("message") or {}
        if isinstance(message, dict):
            yield message


def _as_dict(payload: Any) -> dict[str, Any]:
    if not isinstance(payload, dict):
        raise ValueError(f"The response is a {type(payload).__name__}, not a dict.")  # noqa: TRY004
    return payload


def _as_list(name: str, value: Any) -> list[Any]:
    """Return a list field of the response, empty where it is absent, null or empty."""
    if not value:
        return []
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} of the response is a {type(value).__name__}, not a list.")  # noqa: TRY004
    return list(value)
