"""What the tests of the commands share."""

from __future__ import annotations

import pytest

from gym_capture_redis import RedisTokenSink


@pytest.fixture
async def used_embedded_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an embedded server that holds data and does not run."""
    url = f"embedded:{tmp_path_factory.mktemp('t')}"
    async with RedisTokenSink(url, namespace="before") as sink:
        await sink.begin_call("rollout", "call")
    return url
