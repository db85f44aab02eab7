"""What is put and frozen: rollouts of entries, and how much of them is new information."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from gym_capture_redis import gym_compat
from gym_capture_redis.cli.served_calls import MODEL, RecordedRollout, ServedCall, load_rollouts
from gym_capture_redis.records import ParentResolutionStatus, TokenEntry, compute_digest

Rollout = list[Any]
"""The entries of one rollout, in the order of its calls: Gym's ``TokenEntry`` where Gym is importable."""

BYTES_PER_ID = 4
BYTES_PER_LOG_PROB = 4

_FIRST_CALL_AT = 1_767_225_600.0
"""A fixed time of day, so that the same workload has the same bytes in every run."""


class Recipe(Protocol):
    """Makes rollouts, the same for the same number in every process. Sent to worker processes."""

    @property
    def rollouts(self) -> int:
        """How many there are; numbers go on from 0 to below it, and may go beyond it."""

    def rollout(self, number: int) -> Rollout:
        """All entries of one rollout."""

    def __str__(self) -> str:
        """Say in words what it makes."""


@dataclass(frozen=True)
class Recorded:
    """Attempts at the recorded rollouts that come with the package."""

    rollouts: int

    def rollout(self, number: int) -> Rollout:
        """Attempts go round the recordings."""
        attempt, which = divmod(number, len(self._recordings))
        recorded = self._recordings[which]
        calls = [recorded.call(index) for index in range(recorded.call_count)]
        return entries_of(f"{recorded.rollout_id}-attempt-{attempt}", calls)

    def __str__(self) -> str:
        """Say in words what it makes."""
        return f"{self.rollouts} attempts at the {len(self._recordings)} recorded agent rollouts"

    @cached_property
    def _recordings(self) -> tuple[RecordedRollout, ...]:
        return load_rollouts()


class Workload:
    """The rollouts of a recipe, made once."""

    def __init__(self, recipe: Recipe, numbers: Iterable[int] | None = None) -> None:
        self.recipe = recipe
        self.rollouts = [recipe.rollout(number) for number in numbers or range(recipe.rollouts)]
        self.calls = sum(map(len, self.rollouts))

    @cached_property
    def new_information(self) -> int:
        """Bytes that no prompt before had: see ``new_information``."""
        return sum(sum(new_information(rollout)) for rollout in self.rollouts)

    @property
    def tokens(self) -> int:
        """Ids of all prompts and generations, repeated ones too."""
        return sum(entry.cum_len for rollout in self.rollouts for entry in rollout)


def entries_of(
    rollout_id: str, calls: Sequence[ServedCall], *, routed_experts: Sequence[Any] | None = None
) -> Rollout:
    """Build the entries of served calls as the capture flow does, stamps included."""
    entry_type: Any = gym_compat.gym_attribute("records", "TokenEntry") or TokenEntry
    entries = []
    for number, call in enumerate(calls):
        sequence = call.prompt_token_ids + call.generation_token_ids
        entries.append(
            entry_type(
                rollout_id=rollout_id,
                model_call_id=call.model_call_id,
                model=MODEL,
                prompt_token_ids=call.prompt_token_ids,
                generation_token_ids=call.generation_token_ids,
                generation_log_probs=call.generation_log_probs,
                routed_experts=routed_experts[number] if routed_experts else None,
                output_items=call.output_items,
                token_item_index=call.token_item_index,
                response_id=f"resp-{rollout_id}-{number}",
                created_at=_FIRST_CALL_AT + number,
                cum_len=len(sequence),
                digest=compute_digest(sequence),
                parent_resolution=ParentResolutionStatus.UNRESOLVED.value,
                parent_resolution_reason="not_attempted",
            )
        )
    return entries


def new_information(rollout: Rollout) -> list[int]:
    """Bytes of each call that must be kept somehow: new ids and log probabilities at 4 B, text as UTF-8 JSON.

    Ids are new that go beyond what the prompt shares with the sequence of the call before; text is
    ``output_items``. Routed experts are not counted.
    """
    of_calls: list[int] = []
    before: list[int] = []
    for entry in rollout:
        sequence = entry.prompt_token_ids + entry.generation_token_ids
        ids = BYTES_PER_ID * (len(sequence) - _shared(before, sequence))
        log_probs = BYTES_PER_LOG_PROB * len(entry.generation_log_probs)
        text = json.dumps(entry.output_items, ensure_ascii=False, separators=(",", ":")).encode()
        of_calls.append(ids + log_probs + len(text))
        before = sequence
    return of_calls


def _shared(first: list[int], second: list[int]) -> int:
    """How many ids both begin with; as a rule one begins with the whole of the other."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])
