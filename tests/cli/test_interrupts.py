"""Ctrl-C while worker processes are started: it is not for them, and it is not lost."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

pytest.importorskip("typer")

from gym_capture_redis.cli.interrupts import interrupts_held


def send_self_an_interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_comes_after_the_start_and_is_not_for_the_process() -> None:
    process = multiprocessing.get_context("spawn").Process(target=send_self_an_interrupt)

    def start() -> None:
        with interrupts_held():
            process.start()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        start()
    process.join(60)

    assert process.exitcode == 0
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
