"""Where a test that runs on several kinds of servers finds the one it is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis
from support.servers import RealServer

from gym_capture_redis import wire
from gym_capture_redis.settings import Durability

EVERY_KIND = ("valkey9", "redis7", "fakeredis")
"""Fixtures of real servers, and the fake one."""


@dataclass(frozen=True)
class Place:
    """A server, what it can promise, and a client that sees the same."""

    url: str
    durability: Durability
    redis: redis.Redis


@contextlib.contextmanager
def place_of(request: pytest.FixtureRequest, namespace: str) -> Iterator[Place]:
    """The server that the fixture's parameter names; a fake one of its own for each namespace."""
    if request.param == "fakeredis":
        from fakeredis import FakeRedis, FakeServer

        server = wire._FAKE_SERVERS.setdefault(namespace, FakeServer())
        with FakeRedis(server=server) as client:
            yield Place(f"fakeredis://{namespace}", "memory", client)
    else:
        real: RealServer = request.getfixturevalue(request.param)
        with real.client() as client:
            yield Place(real.url, "aof", client)
