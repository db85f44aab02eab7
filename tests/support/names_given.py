"""Attempts and snapshots under the names that a test gives them, rather than those with the time behind."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from gym_capture_redis.scripts import Dialect, Step

_TIMED = b"return string.format('%s-%x%05x', name, now[1], now[2])"


def with_names_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have scripts give the names as they got them, so that a test can know them beforehand."""
    written: Any = Step.source
    named: Any = Step.sha1

    def source(step: Step, dialect: Dialect, *, healing: bool = False) -> bytes:
        script: bytes = written.__wrapped__(step, dialect, healing=healing)
        assert script.count(_TIMED) == (b"timed(" in script), "scripts that name nothing do without"
        return script.replace(_TIMED, b"return name")

    monkeypatch.setattr(Step, "source", cache(source))
    monkeypatch.setattr(Step, "sha1", cache(named.__wrapped__))
