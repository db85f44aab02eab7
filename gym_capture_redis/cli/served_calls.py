"""Real model calls of recorded agent runs, as a model server answers them.

The file in ``data/`` holds 8 rollouts with 187 calls, of each only what is new: the prompt of call k is
prompt(k-1) + generation(k-1) + suffix(k), and its request items are items(k-1) + output_items(k-1) +
suffix items(k). Expanded they carry 3.27 million token ids. Where they come from: ``NOTICE``.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

MODEL = "recorded-agent"
"""The model's name in every response; the recordings do not tell it."""

DATA_FILE = "agent_rollouts.jsonl.gz"


@dataclass(frozen=True)
class ServedCall:
    """One model call with its full prompt of P ids, and G generated ids with as many log probabilities."""

    model_call_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    request_items: list[dict[str, Any]]
    output_items: list[dict[str, Any]]

    @property
    def token_item_index(self) -> int:
        """Which output item carries the arrays: the last, as in Gym's own model servers."""
        return len(self.output_items) - 1

    @property
    def token_count(self) -> int:
        """Ids of prompt and generation."""
        return len(self.prompt_token_ids) + len(self.generation_token_ids)

    def response(self, response_id: str, *, with_token_ids: bool = True) -> dict[str, Any]:
        """The response in Responses format; the arrays are on one output item, or on none."""
        output = [dict(item) for item in self.output_items]
        if with_token_ids:
            output[self.token_item_index] |= {
                "prompt_token_ids": self.prompt_token_ids,
                "generation_token_ids": self.generation_token_ids,
                "generation_log_probs": self.generation_log_probs,
            }
        return {
            "id": response_id,
            "object": "response",
            "model": MODEL,
            "status": "completed",
            "output": output,
            "usage": {
                "input_tokens": len(self.prompt_token_ids),
                "output_tokens": len(self.generation_token_ids),
                "total_tokens": self.token_count,
            },
        }


@dataclass
class RecordedRollout:
    """One recorded rollout. Its calls share one sequence of ids and are cut out of it when asked for."""

    rollout_id: str
    _recorded: list[dict[str, Any]] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    _items: list[dict[str, Any]] = field(default_factory=list)
    _prompt_ends: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def parse(cls, row: dict[str, Any]) -> RecordedRollout:
        """Take one line of the file."""
        rollout = cls(row["rollout_id"])
        for call in row["calls"]:
            rollout._append(call)
        return rollout

    @property
    def call_count(self) -> int:
        """How many model calls the rollout has."""
        return len(self._recorded)

    def call(self, index: int) -> ServedCall:
        """Expand call number ``index``; the lists are the caller's, the dicts in them are shared."""
        recorded, (ids_end, items_end) = self._recorded[index], self._prompt_ends[index]
        return ServedCall(
            model_call_id=recorded["model_call_id"],
            prompt_token_ids=self._ids[:ids_end],
            generation_token_ids=list(recorded["generation_token_ids"]),
            generation_log_probs=list(recorded["generation_log_probs"]),
            request_items=self._items[:items_end],
            output_items=list(recorded["output_items"]),
        )

    def token_count(self, index: int) -> int:
        """Ids of prompt and generation of call number ``index``, without expanding it."""
        return self._prompt_ends[index][0] + len(self._recorded[index]["generation_token_ids"])

    def _append(self, call: dict[str, Any]) -> None:
        self._ids += call["prompt_suffix_token_ids"]
        self._items += call["request_suffix_items"]
        self._prompt_ends.append((len(self._ids), len(self._items)))
        self._ids += call["generation_token_ids"]
        self._items += call["output_items"]
        self._recorded.append(call)


def load_rollouts() -> tuple[RecordedRollout, ...]:
    """Read the recorded rollouts that come with the package, in the order of the file."""
    packed = (resources.files("gym_capture_redis.cli") / "data" / DATA_FILE).read_bytes()
    return tuple(RecordedRollout.parse(json.loads(line)) for line in gzip.decompress(packed).splitlines())
