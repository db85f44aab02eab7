"""Calls as Gym's ``RolloutTokenCapture`` stages them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from support.conversations import gym
from support.sequences import random_ids

from gym_capture_redis import gym_compat

CaptureAdmission = gym("staging.records", "CaptureAdmission")
RolloutTokenCapture = gym("staging.capture", "RolloutTokenCapture")


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def stage(self, record: Any, *, attachments: Mapping[str, Any] | None = None) -> Any:
        assert attachments is None
        self.records.append(record)
        key = gym_compat.required_attribute("staging.records", "staging_key")
        return gym("staging.records", "StageResult")(
            ok=True, staging_key=key(record.rollout_id, record.model_call_id)
        )


def admission_of(rollout: str, call: str, parent: Any = None, chain: list[str] | None = None) -> Any:
    """How the gate admits a call that begins a chain, or goes on from what ``parent`` acknowledges."""
    if parent is None:
        return CaptureAdmission(rollout_id=rollout, model_call_id=call, mode="text")
    return CaptureAdmission(
        rollout_id=rollout,
        model_call_id=call,
        mode="token_in",
        parent_call_id=parent.model_call_id,
        prev_len=parent.cum_len,
        staging_chain=chain or [],
        parent_chain_hash=parent.chain_hash,
    )


def staged_record(
    rollout: str = "r",
    call: str = "c",
    *,
    ids: list[int] | None = None,
    generated: list[int] | None = None,
    log_probs: list[float] | None = None,
    extras: dict[str, Any] | None = None,
) -> Any:
    """A record that begins a chain, with all its digests."""
    kept, generated = Kept(), generated or [7, 8]
    capture = RolloutTokenCapture(sink=kept, weight_version_fn=lambda: 3)
    coords = capture.complete_call(
        capture.begin_call(admission_of(rollout, call)),
        prompt_token_ids=[*call.encode()] if ids is None else ids,
        generated_token_ids=generated,
        generated_logprobs=log_probs or [-0.1 * (number + 1) for number in range(len(generated))],
        extras=extras,
    )
    assert coords.disposition == "staged"
    return kept.records[0]


def staged_chain(rollout: str, turns: int, *, new_ids: int = 30, seed: int = 0) -> Iterator[Any]:
    """Records that each go on from the one before."""
    kept = Kept()
    capture = RolloutTokenCapture(sink=kept, weight_version_fn=lambda: 3)
    ids: list[int] = []
    parent = None
    for number in range(turns):
        admission = admission_of(rollout, f"c{number}", parent, ["elsewhere"])
        prompt = ids + random_ids(new_ids, seed + 2 * number)
        generated = random_ids(5, seed + 2 * number + 1)
        parent = capture.complete_call(
            capture.begin_call(admission, prefix_token_ids=ids if parent else None),
            prompt_token_ids=prompt,
            generated_token_ids=generated,
            generated_logprobs=[-0.5] * len(generated),
        )
        assert parent.disposition == "staged"
        yield kept.records[-1]
        ids = prompt + generated


def base_of(record: Any) -> dict[str, Any]:
    """What a base snapshot of the record holds, by its repr, which tells -0.0 from 0.0."""
    return {name: repr(value) for name, value in record.model_dump().items() if name != "extras"}
