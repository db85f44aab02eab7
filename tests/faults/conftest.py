"""What all fault tests share: processes that write, a ledger, and a server that may be hurt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ledger import Ledger
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
