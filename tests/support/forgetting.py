"""Ways for a server to come back without some of what it acknowledged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from support.servers import RealServer


def data_of(server: RealServer) -> Path:
    return server.directory / "appendonlydir"


def newest_file(server: RealServer) -> Path:
    return max(data_of(server).glob("*.incr.aof"))


def aof_size(server: RealServer) -> int:
    """How much is in the file: what was acknowledged was written before, though perhaps not to the disk."""
    return newest_file(server).stat().st_size


def come_back_short(server: RealServer, size: int) -> None:
    """Lose what was written since the file had this size, as when the machine loses power."""
    server.kill()
    os.truncate(newest_file(server), size)
    server.start()


def come_back_empty(server: RealServer) -> None:
    server.kill()
    shutil.rmtree(data_of(server), ignore_errors=True)
    server.start()


def restart(server: RealServer) -> None:
    server.kill()
    server.start()
