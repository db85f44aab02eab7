"""Ending attempts without asking for a snapshot: retiring them, or deleting them with their fence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from gym_capture_redis import scripts
from gym_capture_redis.executor import Executor
from gym_capture_redis.keys import new_name
from gym_capture_redis.subject import Subject

_ENDED_AT_ONCE = 256
"""Rollouts of a batch that are retired or deleted at the same time."""

_EndAttempt = Callable[[bytes, Subject, float], Awaitable[bool]]


class Ender:
    """Retires and deletes what is under some keys, by rollout id. Which attempt is meant is asked first."""

    def __init__(self, executor: Executor, *, tombstone_ttl_s: int) -> None:
        self._executor = executor
        self._tombstone_ttl_s = tombstone_ttl_s

    async def retire(self, keys: Mapping[str, bytes]) -> dict[str, list[str]]:
        """Replace each by a tombstone, the unknown ones too. Returns which ids held anything."""
        return await self._end(keys, self._retire)

    async def delete(self, keys: Mapping[str, bytes]) -> dict[str, list[str]]:
        """Remove each, with its tombstone. Returns which ids held anything."""
        return await self._end(keys, self._delete)

    async def _end(self, keys: Mapping[str, bytes], end_attempt: _EndAttempt) -> dict[str, list[str]]:
        deadline = self._executor.deadline()
        ended: dict[str, list[str]] = {"removed": [], "absent": []}
        errors: list[BaseException] = []
        # All of them go on when one fails, and the error raised is that one, not a group of them.
        items = list(keys.items())
        for start in range(0, len(items), _ENDED_AT_ONCE):
            window = items[start : start + _ENDED_AT_ONCE]
            outcomes = await asyncio.gather(
                *(end_attempt(key, Subject(rollout_id), deadline) for rollout_id, key in window),
                return_exceptions=True,
            )
            for (rollout_id, _), outcome in zip(window, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    errors.append(outcome)
                else:
                    ended["removed" if outcome else "absent"].append(rollout_id)
        if errors:
            raise errors[0]
        return ended

    async def _retire(self, key: bytes, subject: Subject, deadline: float) -> bool:
        tombstone = new_name()
        while True:
            there = await self._executor.run(scripts.peek(key), subject, deadline=deadline)
            call = scripts.retire(
                key,
                incarnation=there.incarnation,
                new_incarnation=tombstone,
                tombstone_ttl_s=self._tombstone_ttl_s,
            )
            reply = await self._executor.run(call, subject, deadline=deadline)
            if reply.code == "OK":
                return scripts.held(there) or scripts.held(reply)

    async def _delete(self, key: bytes, subject: Subject, deadline: float) -> bool:
        while True:
            there = await self._executor.run(scripts.peek(key), subject, deadline=deadline)
            call = scripts.delete(key, incarnation=there.incarnation)
            reply = await self._executor.run(call, subject, deadline=deadline)
            if reply.code == "OK" or there.code == "ABSENT":  # what came in between is another attempt
                return scripts.held(there) or scripts.held(reply)
