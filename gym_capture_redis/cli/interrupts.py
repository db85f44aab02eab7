"""Ctrl-C and the worker processes of a command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let processes inherit that Ctrl-C is not for them: it goes to the whole group, and we end them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
