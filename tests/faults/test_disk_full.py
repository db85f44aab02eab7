"""The disk of the append-only file is full: writes are refused and tried again until there is room."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ledger import Kind, Ledger
from support.polling import wait_until
from support.servers import RealServer
from support.trainers import read_and_judge
from support.writers import Work, WriterProcess, all_work

SETTINGS: dict[str, Any] = {"namespace": "run", "timeout_s": 60.0}
PATIENCE_S = 60.0
DISK_BYTES = 2**24
LEFT_BYTES = 2**20
"""What the file of other programs leaves free; less than what is written."""

ROLLOUTS = tuple(f"r{number}" for number in range(4))
WRITERS = 4
CALLS = 16
BALLAST_BYTES = 2**14


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here to make a small disk with")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


async def test_writes_to_a_full_disk_are_tried_again_and_nothing_is_lost_when_there_is_room(
    real_server: RealServer, crew: list[WriterProcess], ledger: Ledger, disk: Path
) -> None:
    with RealServer(real_server.binary, dir=str(disk)) as server:
        others = disk / "others"
        fill(others, LEFT_BYTES)
        work = Work(server.url, ledger.path, ROLLOUTS, WRITERS, CALLS, BALLAST_BYTES, settings=SETTINGS)
        writing = asyncio.create_task(all_work(crew, work))
        await asyncio.to_thread(
            wait_until, lambda: not can_write(server), "the disk was full", timeout_s=PATIENCE_S
        )
        others.unlink()
        await writing
        assert not ledger.count(Kind.FAILED)
        await asyncio.to_thread(wait_until, lambda: can_write(server), "it was written", timeout_s=PATIENCE_S)
        await asyncio.to_thread(restart, server)
        snapshots = await read_and_judge(
            server.url, ledger, ROLLOUTS, server_kept_all=True, settings=SETTINGS
        )
    assert not any(snapshot.incomplete for snapshot in snapshots.values())


def fill(path: Path, left_bytes: int) -> None:
    room = os.statvfs(path.parent)
    path.write_bytes(bytes(room.f_bavail * room.f_frsize - left_bytes))


def can_write(server: RealServer) -> bool:
    with server.client() as client:
        info: Any = client.info("persistence")
    return bool(info["aof_last_write_status"] == "ok")


def restart(server: RealServer) -> None:
    server.wait_until_written()
    server.kill()
    server.start()
