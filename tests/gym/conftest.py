"""What tests of NeMo Gym's stores share."""

from __future__ import annotations

import pytest

from gym_capture_redis import sink as sink_module


@pytest.fixture
def no_other_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks of earlier tests, as far as they still exist, are not seen."""
    monkeypatch.setattr(sink_module, "_SINKS", [])
