"""Sends the long parts of a record ahead of it, each as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gym_capture_redis.block_cache import BlockCache
from gym_capture_redis.scripts import Call, Reply, stage

Run = Callable[[Call], Coroutine[Any, Any, Reply]]
"""Sends one step and waits for its reply."""


class PartSender:
    """The parts of one record on their way to one attempt of its rollout. Belongs to one event loop."""

    def __init__(self, run: Run, blocks: BlockCache, key: bytes, rollout_id: str, incarnation: str) -> None:
        self._run = run
        self._blocks = blocks
        self._key = key
        self._rollout_id = rollout_id
        self._incarnation = incarnation
        self._loop = asyncio.get_running_loop()
        self._sending: dict[bytes, asyncio.Task[Reply]] = {}
        self._left = False
        self.has_begun = False
        """Whether any was sent."""

    def begin(self, parts: Sequence[tuple[bytes, bytes]]) -> None:
        """Send those of the parts, given as name and content, that are not known to be stored."""
        for name, part in self._blocks.unknown(self._rollout_id, self._incarnation, parts):
            if name not in self._sending and not self._left:
                call = stage(self._key, name, part, incarnation=self._incarnation)
                self._sending[name] = self._loop.create_task(self._run(call))
                self.has_begun = True

    def begin_soon(self, name: bytes, part: bytes) -> None:
        """The same for one part, from another thread."""
        self._loop.call_soon_threadsafe(self.begin, [(name, part)])

    async def end(self) -> Reply | None:
        """Wait until all are stored. Returns a refusal, if there is one.

        Raises:
            CaptureError: why one could not be stored.

        """
        names = list(self._sending)
        replies = await asyncio.gather(*self._sending.values(), return_exceptions=True)
        self._sending.clear()
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
            if reply.code not in ("OK", "SAME"):
                return reply
        self._blocks.learn(self._rollout_id, self._incarnation, names)
        return None

    async def leave(self) -> None:
        """Send no more: there will be no record that needs them."""
        self._left = True
        for task in self._sending.values():
            task.cancel()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)
