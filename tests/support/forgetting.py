"""Ways for a server to come back without some of what it acknowledged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from support.polling import wait_until
from support.servers import RealServer

_PATIENCE_S = 30.0


def data_of(server: RealServer) -> Path:
    return server.directory / "appendonlydir"


def newest_file(server: RealServer) -> Path:
    return max(data_of(server).glob("*.incr.aof"))


def wait_until_written(server: RealServer) -> None:
    """Wait until the file holds all that was acknowledged: a slow fsync holds up the writing as well."""
    with server.client() as client:

        def all_is_written() -> bool:
            persistence: Any = client.info("persistence")
            return bool(persistence["aof_buffer_length"] == 0)

        wait_until(all_is_written, "the file holds all", timeout_s=_PATIENCE_S)


def aof_size(server: RealServer) -> int:
    """How long the file is that holds all until now."""
    wait_until_written(server)
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
    """Come back and lose nothing."""
    wait_until_written(server)
    server.kill()
    server.start()
