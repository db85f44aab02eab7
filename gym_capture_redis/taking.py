"""Taking the content of an entry: its small fields in their JSON form, checked, and its arrays as they are.

Entries can change after they were built, so what a reader would refuse, or would load as something else, is
refused here (contract, section 2). The arrays are checked when they are packed. No I/O here.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from gym_capture_redis.errors import InvalidRecordError
from gym_capture_redis.experts import expert_bytes
from gym_capture_redis.plain_fields import plain_fields, plain_text_length
from gym_capture_redis.plain_words import broken_rule
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.small_fields import ARRAY_FIELDS, PACKED_FIELDS, SUBJECT_FIELDS, without_omitted

LARGE_TOKENS = 65_536
"""Records above this many tokens, or with routed experts, are worth a thread of their own."""

EMPTY_ARRAYS: dict[str, Any] = {name: [] for name in ARRAY_FIELDS}

_BYTES_PER_TOKEN = 16
"""Of an id on its way: four packed, three in a block, and both again in the pipeline."""


class TakenEntry(NamedTuple):
    """The content of an entry: its small fields in their JSON form, as they are stored, and its arrays."""

    rollout_id: Any
    model_call_id: Any
    small_fields: dict[str, Any]
    prompt_token_ids: Any
    generation_token_ids: Any
    generation_log_probs: Any
    routed_experts: Any
    text_length: int
    """Characters of all text in the small fields."""

    @property
    def tokens(self) -> int:
        """How many ids it has, as far as that can be told before they are checked."""
        return _length(self.prompt_token_ids) + _length(self.generation_token_ids)

    @property
    def is_large(self) -> bool:
        """Whether encoding it would hold an event loop noticeably."""
        return self.routed_experts is not None or self.tokens > LARGE_TOKENS

    @property
    def nbytes(self) -> int:
        """About how much memory encoding and sending it takes."""
        return _BYTES_PER_TOKEN * self.tokens + expert_bytes(self.routed_experts) + self.text_length

    def subject(self) -> tuple[Any, Any]:
        """Rollout id and call id, not checked."""
        return self.rollout_id, self.model_call_id

    def copied(self) -> TakenEntry:
        """The same with values of its own, for another thread while the caller may change the entry.

        Of nested lists of routed experts only the outermost is copied: the rest would take seconds.
        """
        return TakenEntry(
            *self.subject(),
            deepcopy(self.small_fields),
            _copied(self.prompt_token_ids),
            _copied(self.generation_token_ids),
            _copied(self.generation_log_probs),
            _copied(self.routed_experts),
            self.text_length,
        )


def take(entry: Any) -> TakenEntry:
    """Take the content of any ``TokenEntry``-like pydantic model, checking all but its arrays.

    Raises:
        InvalidRecordError: it is no such entry, breaks a rule, or cannot be serialised.

    """
    if not isinstance(entry, BaseModel):
        raise InvalidRecordError(f"put takes a TokenEntry, nothing of type {type(entry).__name__}")
    small_fields = plain_fields(entry)
    text_length = None if small_fields is None else plain_text_length(small_fields)
    if small_fields is None or text_length is None:
        return _taken_by_pydantic(entry)
    return _taken(entry, small_fields, without_omitted(small_fields), text_length)


def _taken_by_pydantic(entry: Any) -> TakenEntry:
    small_fields = _content_without_arrays(entry)
    stored = without_omitted(small_fields)
    _check_rereading(stored, small_fields)
    return _taken(entry, small_fields, stored, _text_length(stored))


def _taken(entry: Any, small_fields: dict[str, Any], stored: dict[str, Any], text_length: int) -> TakenEntry:
    return TakenEntry(
        small_fields.get("rollout_id"),
        small_fields.get("model_call_id"),
        stored,
        entry.prompt_token_ids,
        entry.generation_token_ids,
        entry.generation_log_probs,
        getattr(entry, "routed_experts", None),
        text_length,
    )


def _content_without_arrays(entry: BaseModel) -> dict[str, Any]:
    missing = [name for name in (*ARRAY_FIELDS, *SUBJECT_FIELDS) if not hasattr(entry, name)]
    if missing:
        raise InvalidRecordError(f"put takes a TokenEntry; this {type(entry).__name__} lacks {missing[0]}")
    try:
        # A changed entry may hold other types than declared; what matters is what they serialise to.
        dumped: Any = entry.model_dump(mode="json", exclude=PACKED_FIELDS, warnings=False)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise _unserialisable(
            error, {name: _text_or_none(getattr(entry, name)) for name in SUBJECT_FIELDS}
        ) from None
    if not isinstance(dumped, dict):
        raise InvalidRecordError(f"a {type(entry).__name__} is serialised as something else than its fields")
    return dumped


def _check_rereading(stored: dict[str, Any], small_fields: dict[str, Any]) -> None:
    """Refuse what a reader would refuse, or would load as something else."""
    subject = {name: small_fields[name] for name in SUBJECT_FIELDS if name in small_fields}
    try:
        reread = TokenEntry.model_validate(subject | stored | EMPTY_ARRAYS)
    except ValidationError as error:
        raise _invalid(broken_rule(error), small_fields) from None
    read = reread.__dict__ | (reread.model_extra or {})
    changed = [name for name, value in stored.items() if read[name] != value]
    if changed:
        raise _invalid(f"{changed[0]} would be read back as another value", small_fields)


def _unserialisable(error: Exception, small_fields: dict[str, Any]) -> InvalidRecordError:
    return _refusal(f"the record cannot be serialised: {reason_of(error)}", small_fields)


def _invalid(problem: str, small_fields: dict[str, Any]) -> InvalidRecordError:
    return _refusal(f"the record is invalid: {problem}", small_fields)


def _refusal(what: str, small_fields: dict[str, Any]) -> InvalidRecordError:
    subject = {name: small_fields.get(name) for name in SUBJECT_FIELDS}
    return InvalidRecordError(f"{what} ({name_of(subject)})", **subject)


def _length(values: Any) -> int:
    if isinstance(values, list | tuple):
        return len(values)
    return np.size(values) if isinstance(values, np.ndarray) else 0


def _text_length(fields: dict[str, Any]) -> int:
    """Characters of all text in the fields: of output items and of extra fields there may be any number.

    Nothing is copied: many entries may have to wait for room.
    """
    length, values = 0, list(fields.values())
    for value in values:  # which grow meanwhile
        if isinstance(value, str):
            length += len(value)
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
    return length


def _copied(values: Any) -> Any:
    return values.copy() if isinstance(values, list | np.ndarray) else values


def name_of(subject: dict[str, Any]) -> str:
    """Which call of which rollout, for messages."""
    return f"call {subject['model_call_id']!r} of rollout {subject['rollout_id']}"


def reason_of(error: Exception) -> str:
    """What went wrong, by class only: the message could quote token data."""
    if isinstance(error, UnicodeEncodeError):
        return "a string is not valid UTF-8"
    if isinstance(error, OverflowError):
        return "an integer does not fit 64 bits"
    if isinstance(error, RecursionError) or "recursion" in str(error):
        return "it is nested too deeply"
    return f"a value is not plain JSON ({type(error).__name__})"


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None
