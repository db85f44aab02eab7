"""Notices that a source finds nothing: an empty rollout looks whole, and many in a row are no accident."""

from __future__ import annotations

import logging

from gym_capture_redis.protocols import TokenCaptureSnapshot

logger = logging.getLogger(__name__)

WARN_AFTER = 16
"""Rollouts in a row without a call: an agent may fail before its first one, but hardly so often."""


class EmptyRollouts:
    """Looks at what one source freezes, and warns once. ``source`` is how the source is called in the log."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._in_a_row: set[str] = set()
        self._has_warned = False

    def note(self, snapshot: TokenCaptureSnapshot) -> None:
        """Take note of one more snapshot."""
        if snapshot.entries or snapshot.reasons or snapshot.refusals:
            self._in_a_row.clear()
            return
        if self._has_warned:
            return
        self._in_a_row.add(snapshot.rollout_id)
        if len(self._in_a_row) == WARN_AFTER:
            self._has_warned = True
            logger.warning(
                "%s: the newest %d rollouts that were frozen, %s among them, never had a model call. Either "
                "the sinks write to another server or namespace, or nothing is captured: requests reach the "
                "model server without their rollout's prefix, or capturing is not switched on for the agent. "
                "There is nothing to train on in them.",
                self._source,
                WARN_AFTER,
                snapshot.rollout_id,
            )
