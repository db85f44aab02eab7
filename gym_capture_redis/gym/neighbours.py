"""What the sinks in the process of a lineage store or ledger tell of a configuration that cannot work.

Gym takes both from the same few lines of YAML, and lets combinations pass that lose everything quietly.
"""

from __future__ import annotations

import logging

from gym_capture_redis.marks import Target
from gym_capture_redis.sink import RedisTokenSink, sinks_of_process

logger = logging.getLogger(__name__)

_ELSEWHERE = (
    "%r looks for parents where no sink of this process writes: one writes to %s, namespace %r. "
    "Give both the same url and namespace, or nearly every rollout will be masked."
)
_BOTH = (
    "%r is asked about a rollout of which a sink of this process is told too; that one writes to %s, "
    "namespace %r. With external_staging leave out token_id_capture.sink: it never gets a record, and every "
    "rollout stays in it, incomplete. Without, make RedisLineageStore the lineage_store: a ledger gets no "
    "rows then, and every rollout of more than one call is masked."
)


class Neighbours:
    """The sinks beside ``store``, which may be constructed before it or after. It warns once."""

    def __init__(self, store: object) -> None:
        self._store = store
        self._is_done = False

    def should_write_to(self, target: Target) -> None:
        """Warn at the first call if there are sinks, and none writes there.

        An empty place looks like a rollout that begins. A store without any sink beside it may be right:
        an inference worker may write what it looks for.
        """
        if self._is_done:
            return
        self._is_done = True
        sinks = sinks_of_process()
        if sinks and all(sink.target != target for sink in sinks):
            self._warn(_ELSEWHERE, sinks[0])

    def should_not_know(self, rollout_id: str) -> None:
        """Warn at the first rollout that one of them knows, wherever it writes.

        A sink for other rollouts may be right: that of an engine in the same process, say.
        """
        if self._is_done:
            return
        for sink in sinks_of_process():
            if sink.knows(rollout_id):
                self._is_done = True
                self._warn(_BOTH, sink)
                return

    def _warn(self, message: str, sink: RedisTokenSink) -> None:
        logger.warning(message, self._store, sink.target.server, sink.target.namespace)
