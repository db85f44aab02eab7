"""Servers shared by all tests of a process, one of each kind; every test takes a namespace of its own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from support.backends import EVERY_KIND, Place, place_of
from support.cluster import ClusterGroup
from support.names_given import with_names_as_given
from support.sentinel import SentinelGroup
from support.servers import BINARIES, RealServer

REAL_SERVERS = tuple(BINARIES)

settings.register_profile(
    "patient",
    deadline=None,  # how long an example takes says what else the machine does
    suppress_health_check=[HealthCheck.too_slow],
    # Explaining a failure traces every line: minutes, for little.
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("patient")


def binary_of(name: str) -> Path:
    binary = BINARIES[name]()
    if binary is None:
        if os.environ.get("REQUIRE_REAL_SERVERS"):
            pytest.fail(f"{name} is required here, and its server was not found")
        pytest.skip(f"{name}: no server binary on this machine (redis7 needs Debian's redis-server)")
    return binary


def running_server(name: str) -> Iterator[RealServer]:
    with RealServer(binary_of(name)) as server:
        yield server


@pytest.fixture(scope="session")
def valkey9() -> Iterator[RealServer]:
    yield from running_server("valkey9")


@pytest.fixture(scope="session")
def redis7() -> Iterator[RealServer]:
    yield from running_server("redis7")


@pytest.fixture(params=REAL_SERVERS)
def real_server(request: pytest.FixtureRequest) -> RealServer:
    """Each kind of real server in turn."""
    server: RealServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def server(real_server: RealServer) -> Iterator[RealServer]:
    """A server of the test's own, of each kind in turn: to be configured, killed, robbed of its data."""
    with RealServer(real_server.binary) as own:
        yield own


@pytest.fixture
def one_server(valkey9: RealServer) -> Iterator[RealServer]:
    """The same, of one kind, where kinds make no difference."""
    with RealServer(valkey9.binary) as own:
        yield own


@pytest.fixture(params=EVERY_KIND)
def place(request: pytest.FixtureRequest, namespace: str) -> Iterator[Place]:
    """Each kind of server in turn, the fake one too, with a client that looks at it."""
    with place_of(request, namespace) as found:
        yield found


@pytest.fixture
def names_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts and snapshots are called what a test calls them, without the time behind."""
    with_names_as_given(monkeypatch)


@pytest.fixture(scope="session", params=REAL_SERVERS)
def sentinel_group(request: pytest.FixtureRequest) -> Iterator[SentinelGroup]:
    """A primary, a replica and three Sentinels; who kills one of them revives it."""
    with SentinelGroup(binary_of(request.param)) as group:
        yield group


@pytest.fixture(scope="session", params=REAL_SERVERS)
def cluster_group(request: pytest.FixtureRequest) -> Iterator[ClusterGroup]:
    """Three primaries with a replica each; who kills one of them revives it."""
    with ClusterGroup(binary_of(request.param), replicas=True) as group:
        yield group


@pytest.fixture
def namespace() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"
