"""A described workload: made-up calls of a given shape, the same for the same numbers in every run."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_capture_redis.cli.bench.workload import Rollout, entries_of
from gym_capture_redis.cli.served_calls import ServedCall

VOCABULARY = 151_643
"""Ids are drawn from below it, as those of the recorded calls are."""
EXPERTS = 128
"""Experts of a layer: ids fit int8."""
CHARACTERS_PER_TOKEN = 4
_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     \n", "u1")


class ShapeError(ValueError):
    """The shape describes no workload; the message says why."""


@dataclass(frozen=True)
class Shape:
    """How many calls of which size a rollout has.

    Each prompt is the whole sequence of the call before and ``growth`` new ids: what tools and users said.
    ``experts``: layers and experts per token of a mixture-of-experts model, as in (48, 8).
    """

    rollouts: int = 64
    calls: int = 24
    first_prompt: int = 4_000
    growth: int = 400
    generated: int = 200
    experts: tuple[int, int] | None = None

    def rollout(self, number: int) -> Rollout:
        """Make all entries of one rollout, drawn by its number."""
        rng = np.random.default_rng([number, self.calls, self.first_prompt, self.growth, self.generated])
        sequence: list[int] = []
        calls, experts = [], []
        for index in range(self.calls):
            prompt = sequence + _ids(rng, self.growth if index else self.first_prompt)
            generated = _ids(rng, self.generated)
            sequence = prompt + generated
            calls.append(
                ServedCall(
                    model_call_id=f"call-{index + 1}",
                    prompt_token_ids=prompt,
                    generation_token_ids=generated,
                    generation_log_probs=(-rng.exponential(0.5, self.generated)).astype("f4").tolist(),
                    request_items=[],
                    output_items=[_message(rng, self.generated)],
                )
            )
            experts.append(self.experts and route_string(rng, len(sequence), *self.experts))
        return entries_of(f"shape-{number}", calls, routed_experts=experts)

    def __str__(self) -> str:
        """Say in words what it makes."""
        many = "rollouts" if self.rollouts > 1 else "rollout"
        routed = f", routed experts {self.experts[0]} x {self.experts[1]}" if self.experts else ""
        return (
            f"{self.rollouts} {many} of {self.calls} calls: first prompt {self.first_prompt:,} ids, "
            f"{self.growth:,} more each turn, {self.generated:,} generated{routed}"
        )


def parse_experts(text: str) -> tuple[int, int]:
    """Read ``LAYERSxTOPK``.

    Raises:
        ShapeError: anything else.

    """
    layers, by, top_k = text.lower().partition("x")
    if by and layers.isdecimal() and top_k.isdecimal() and int(layers) and int(top_k):
        return int(layers), int(top_k)
    raise ShapeError(f"experts are given as LAYERSxTOPK, as in 48x8, not {text!r}")


def route_string(rng: np.random.Generator, tokens: int, layers: int, top_k: int) -> str:
    """Routed experts in Gym's string form, one byte each."""
    routes = rng.integers(0, EXPERTS, tokens * layers * top_k, dtype="i1")
    return f"nrlre1:int8:{tokens}x{layers}x{top_k}:{base64.b64encode(routes.tobytes()).decode()}"


def _ids(rng: np.random.Generator, count: int) -> list[int]:
    drawn: list[int] = rng.integers(0, VOCABULARY, count).tolist()
    return drawn


def _message(rng: np.random.Generator, tokens: int) -> dict[str, Any]:
    """Text of about as many characters as so many tokens have."""
    drawn = _ALPHABET[rng.integers(0, len(_ALPHABET), tokens * CHARACTERS_PER_TOKEN)]
    text = drawn.tobytes().decode("ascii")
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
