"""What a step is about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subject:
    """What a step is about, for messages."""

    rollout_id: str
    model_call_id: str | None = None

    def __str__(self) -> str:
        """In words."""
        call = f"call {self.model_call_id!r} of " if self.model_call_id is not None else ""
        return f"{call}rollout {self.rollout_id}"
