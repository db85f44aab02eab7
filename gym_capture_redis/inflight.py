"""A bound on the bytes that are under way: who finds no room waits, first come, first served."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Self


class Hold:
    """A part of a budget, until the ``with`` block ends. ``waited``: there was no room for it at first."""

    def __init__(self, budget: ByteBudget, nbytes: int, *, waited: bool = False) -> None:
        self._budget = budget
        self.nbytes = nbytes
        self.waited = waited

    def grow(self, nbytes: int) -> None:
        """Hold more than was asked for, without waiting: it is there already, and others wait for it."""
        self._budget.held_bytes += nbytes
        self.nbytes += nbytes

    def end(self) -> None:
        """Make room for others. Idempotent."""
        nbytes, self.nbytes = self.nbytes, 0
        self._budget.release(nbytes)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.end()


class ByteBudget:
    """``max_bytes`` that may be held at once. Belongs to one event loop.

    What is larger than the bound is let in alone, so that nothing waits for ever.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._waiting: OrderedDict[asyncio.Future[None], int] = OrderedDict()

    def try_hold(self, nbytes: int) -> Hold | None:
        """Hold ``nbytes`` if there is room now and nobody waits for it."""
        if self._waiting or not self._fits(nbytes):
            return None
        self.held_bytes += nbytes
        return Hold(self, nbytes)

    async def hold(self, nbytes: int) -> Hold:
        """Hold ``nbytes``, as soon as there is room and nobody has waited for longer."""
        held = self.try_hold(nbytes)
        if held is not None:
            return held
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = nbytes
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.pop(turn, None)
                self._admit()  # it may have stood in the way of smaller ones
            else:
                self.release(nbytes)  # its turn came in the same moment
            raise
        return Hold(self, nbytes, waited=True)

    def release(self, nbytes: int) -> None:
        """Hold ``nbytes`` less, and let in who has waited longest."""
        self.held_bytes -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            turn, nbytes = next(iter(self._waiting.items()))
            if not turn.done():  # else its task was cancelled, and has not been told yet
                if not self._fits(nbytes):
                    return
                self.held_bytes += nbytes
                turn.set_result(None)
            del self._waiting[turn]

    def _fits(self, nbytes: int) -> bool:
        return self.held_bytes == 0 or self.held_bytes + nbytes <= self.max_bytes
