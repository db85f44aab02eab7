"""What an executor decides before it does any I/O."""

from __future__ import annotations

import pytest

from gym_capture_redis.executor import watch_s
from gym_capture_redis.settings import SinkSettings


@pytest.mark.parametrize(
    ("settle_s", "every_s"), [(60.0, 1.0), (2.0, 1.0), (1.0, 0.5), (0.2, 0.1), (0.001, 0.1)]
)
def test_servers_are_watched_often_enough_to_be_put_back_before_rollouts_are_frozen(
    settle_s: float, every_s: float
) -> None:
    assert watch_s(settle_s) == every_s


def test_by_default_servers_are_watched_once_a_second() -> None:
    assert watch_s(SinkSettings.build("redis://server", "run", {}).settle_s) == 1.0
