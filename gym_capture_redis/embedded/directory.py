"""The data directory of an embedded server: private, locked by who runs there, and where its sockets are."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_capture_redis.embedded import keeper
from gym_capture_redis.embedded.binary import INSTALL_HINT
from gym_capture_redis.errors import ConfigurationError

# sun_path holds 104 bytes on macOS and 108 on Linux, its final zero included.
MAX_SOCKET_PATH_BYTES = 100
LOG_TAIL_LINES = 12


@dataclass(frozen=True)
class Place:
    """A data directory and where its sockets are; ``elsewhere`` is their common stem, if not in it."""

    directory: Path
    server_socket: Path
    keeper_socket: Path
    elsewhere: str | None = None


def default_directory() -> Path:
    """Where the data lives when no directory is named: the platform's place for a user's data.

    Raises ConfigurationError where ``platformdirs`` is not installed.
    """
    try:
        import platformdirs
    except ImportError:
        raise ConfigurationError(
            f"Name a directory for the embedded server, or install platformdirs with: {INSTALL_HINT}"
        ) from None
    return platformdirs.user_data_path("gym-capture-redis", appauthor=False)


def prepare_directory(path: Path) -> Path:
    """The real path of a directory that exists, is ours, private and writable.

    Raises ConfigurationError or OSError. A directory that is open to others is made private if it is
    empty or already an embedded server's; one that holds something else is not ours to change.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    directory = path.resolve()
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"The embedded server needs a directory, and {directory} is none.")
    if os.geteuid() not in (0, status.st_uid):
        raise ConfigurationError(f"The directory {directory} belongs to another user.")
    lock = directory / keeper.LOCK_NAME
    if status.st_mode & 0o077:
        if not lock.exists() and any(directory.iterdir()):
            raise ConfigurationError(
                f"The directory {directory} is open to other users and holds other files. Name one for the "
                f"embedded server alone, or close it: chmod 700 {directory}"
            )
        directory.chmod(0o700)
    os.close(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600))
    return directory


def locate(directory: Path) -> Place:
    """Where the directory's sockets are, or are to be.

    In it, unless its path is too long for a socket's address: then in a short private directory, which a
    process with another TMPDIR finds in the state of the running server.
    """
    recorded = read_state(directory).get("sockets")
    if recorded is not None and _is_private(Path(recorded).parent):
        stem = Path(recorded)
    elif _fits(directory / "server.sock"):
        return Place(directory, directory / "server.sock", directory / "keeper.sock")
    else:
        stem = _short_directory() / hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    place = Place(directory, stem.with_suffix(".sock"), stem.with_suffix(".keep"), elsewhere=str(stem))
    if not _fits(place.server_socket):
        raise ConfigurationError(
            f"Both {directory} and {stem.parent} are too long for a unix socket "
            f"({MAX_SOCKET_PATH_BYTES} bytes). Name a shorter directory, or set TMPDIR to one."
        )
    return place


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES


def _short_directory() -> Path:
    path = Path(tempfile.gettempdir()) / f"gymcap-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_private(path):
        raise ConfigurationError(
            f"{path} should be a directory that only you can open, and is not. Remove it, set TMPDIR, or "
            "name a data directory with a shorter path."
        )
    return path


def _is_private(path: Path) -> bool:
    """Whether it is a directory, not a link, of this user, and closed to all others."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def is_held(directory: Path) -> bool:
    """Whether a keeper or a server holds the directory's lock."""
    lock = os.open(directory / keeper.LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Not by closing alone: a thread that forks at this moment copies the descriptor.
        fcntl.flock(lock, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def read_state(directory: Path) -> dict[str, Any]:
    """What the running, or killed, server was started with; empty where there is none."""
    try:
        state = json.loads((directory / keeper.STATE_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def last_words(directory: Path, offset: int = 0) -> str:
    """The end of the log, from ``offset`` bytes on, as the last part of an error message."""
    log = directory / keeper.LOG_NAME
    try:
        written = log.read_bytes()
    except OSError:
        written = b""
    fresh = written[offset:] if offset <= len(written) else written  # it may have been replaced
    lines = fresh.decode("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:]
    quoted = "".join(f"\n    {line}" for line in [f"The end of {log}:", *lines]) if lines else ""
    full = " Its disk is full." if shutil.disk_usage(directory).free == 0 else ""  # for a log as well
    return full + quoted
