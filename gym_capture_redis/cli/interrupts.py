"""Ctrl-C, SIGTERM and the worker processes of a command."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Let processes inherit that Ctrl-C is not for them: it goes to the whole group, and we end them.

    One that comes meanwhile is for us, afterwards.
    """
    resource_tracker.ensure_running()  # starting it with the first process would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cancelled_by_signals(say_stopping: Callable[[], None]) -> None:
    """Let Ctrl-C and SIGTERM cancel the running task; that may take a moment, and is said at once."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def stop() -> None:
        say_stopping()
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
