"""Conversations as NeMo Gym's capture records them: each request repeats all turns before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from support.sequences import random_ids

from gym_capture_redis import gym_compat

TURN_IDS = 400
GENERATED_IDS = 150

Items = list[dict[str, Any]]


class Turn(NamedTuple):
    """A request, the tokens of all that was recorded with it, and the entry that is put."""

    request: Items
    ids: list[int]
    entry: Any


def gym(module: str, name: str) -> Any:
    return gym_compat.required_attribute(module, name)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def conversation(
    rollout: str, turns: int, *, deltas: bool = False, seed: int = 0, **fields: Any
) -> Iterator[Turn]:
    """Turns that each go on from the one before; with ``deltas`` all but the first hold only what they add.

    ``fields`` are further fields of every entry.
    """
    request: Items = [user(f"task of {rollout}")]
    ids, parent = random_ids(TURN_IDS, seed), None
    for number in range(turns):
        generated = random_ids(GENERATED_IDS, seed + 2 * number + 1)
        turn = turn_of(
            rollout, f"call-{number}", request, ids, generated, parent=parent, delta=deltas, **fields
        )
        yield turn
        request = [*request, *turn.entry.output_items, user(f"go on {number}")]
        parent = turn
        ids = turn.ids + random_ids(TURN_IDS, seed + 2 * number + 2)


def turn_of(
    rollout: str,
    call: str,
    request: Items,
    prompt: list[int],
    generated: list[int],
    *,
    parent: Turn | None = None,
    delta: bool = False,
    **fields: Any,
) -> Turn:
    """One call, stamped as the capture stamps it."""
    is_delta = delta and parent is not None
    entry = gym("records", "TokenEntry")(
        rollout_id=rollout,
        model_call_id=call,
        model="policy",
        prompt_token_ids=prompt[len(parent.ids) :] if is_delta and parent else prompt,
        generation_token_ids=generated,
        generation_log_probs=[-0.5] * len(generated),
        output_items=[answer(f"{call} says {generated[0]}")],
        token_item_index=0,
        created_at=1_700_000_000.0,
        parent_call_id=parent.entry.model_call_id if parent else None,
        parent_resolution="resolved" if parent else "root",
        prompt_is_delta=is_delta,
        **fields,
    )
    gym("lineage", "stamp_continuation")(entry, list(request))
    resolution = gym("records", "ParentResolutionStatus")
    gym("records", "stamp_lineage")(
        entry,
        entry.parent_call_id,
        parent_resolution=resolution.RESOLVED if parent else resolution.ROOT,
        cumulative=prompt + generated,
    )
    return Turn(request, prompt + generated, entry)


def continuation(turn: Turn, text: str = "and then?") -> Items:
    """A request that goes on from this turn."""
    return [*turn.request, *turn.entry.output_items, user(text)]
