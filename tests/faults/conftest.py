"""What all fault tests share: processes that write, a ledger, and a server that may be hurt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ledger import Ledger
from support.servers import RealServer
from support.writers import WriterProcess


@pytest.fixture(scope="session")
def crew() -> Iterator[list[WriterProcess]]:
    """Two processes that nobody kills."""
    with WriterProcess("a") as first, WriterProcess("b") as second:
        yield [first, second]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    kept = Ledger(tmp_path / "ledger")
    yield kept
    kept.close()


@pytest.fixture
def server(real_server: RealServer) -> Iterator[RealServer]:
    """A server of the test's own, of each kind in turn."""
    with RealServer(real_server.binary) as own:
        yield own


@pytest.fixture
def one_server(valkey9: RealServer) -> Iterator[RealServer]:
    """The same, of one kind, where kinds make no difference."""
    with RealServer(valkey9.binary) as own:
        yield own
