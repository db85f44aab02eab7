"""What sink and ledger share: they notice that a server forgot what it had acknowledged to them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from gym_capture_redis import scripts
from gym_capture_redis.attempts import AttemptMemory
from gym_capture_redis.endpoint import Endpoint
from gym_capture_redis.executor import Executor
from gym_capture_redis.healing import Healer
from gym_capture_redis.keys import new_mark_id, new_name, rollout_key
from gym_capture_redis.settings import WriterSettings
from gym_capture_redis.subject import Subject

logger = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=WriterSettings)


class Writer(Endpoint[SettingsT]):
    """Base of ``RedisTokenSink`` and ``RedisCaptureLedger``. ``key``: as of ``Healer``."""

    def __init__(self, settings: SettingsT, *, key: Callable[[str, str], bytes] = rollout_key) -> None:
        self._attempts = AttemptMemory()
        fake = settings.url.scheme == "fakeredis"  # a server of this process, which ends with it
        healer = None if fake else Healer(settings, self._attempts, key=key)
        super().__init__(settings, healer, key=key)

    async def _note(
        self, executor: Executor, subject: Subject, reply: scripts.Reply, kind: bytes, deadline: float
    ) -> None:
        """Remember how far the rollout is, and mark it if the server lacks steps that were acknowledged here.

        ``kind`` is how the trace of the step begins.
        """
        if self._attempts.has_lost(subject.rollout_id, reply):
            logger.error(
                "Rollout %s: another Redis server answers than before, and lacks steps that were "
                "acknowledged; the rollout is marked incomplete.",
                subject.rollout_id,
            )
            call = scripts.mark(
                self._key(subject.rollout_id),
                "",
                new_incarnation=new_name(),
                incarnation=reply.incarnation,
                reason="lost",
                mark_id=new_mark_id(),
            )
            await executor.run(call, subject, deadline=deadline, urgent=True, sent=True)
        self._attempts.note(subject.rollout_id, reply, kind + (subject.model_call_id or "").encode())
