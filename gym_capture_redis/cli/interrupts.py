"""Ctrl-C, SIGTERM and the worker processes of a command."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let processes inherit that Ctrl-C is not for them: it goes to the whole group, and we end them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def cancelled_by_signals(say_stopping: Callable[[], None]) -> None:
    """Let Ctrl-C and SIGTERM cancel the running task; that may take a moment, and is said at once."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def stop() -> None:
        say_stopping()
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
