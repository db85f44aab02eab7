"""Facts about machine and software, without which no figure means anything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import gym_capture_redis
from gym_capture_redis.cli.bench.servers import Server

DISTRIBUTIONS = (
    *("redis", "hiredis", "pydantic", "msgpack", "numpy", "xxhash", "pybase64"),
    *("nemo-gym", "ray", "TransferQueue"),
)
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


def machine_facts(server: Server, directory: Path) -> dict[str, str]:
    """Everything by name, in the order in which it is shown."""
    info = server.info()
    program = "Valkey" if "valkey_version" in info else "Redis"
    facts = {
        "gym-capture-redis": gym_capture_redis.__version__,
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "server": f"{program} {info.get('valkey_version', info['redis_version'])}: {server}",
        "durability": server.durability,
        "filesystem": filesystem_of(directory) if server.private else "of the server's machine: unknown",
    }
    return facts | _versions()


def filesystem_of(directory: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Type of the filesystem that holds the directory, or ``unknown``."""
    try:
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return "unknown"
    best, kind = "", "unknown"
    for line in lines:
        _, mounted_on, found, *_ = line.split()
        if directory.resolve().is_relative_to(mounted_on) and len(mounted_on) >= len(best):
            best, kind = mounted_on, found
    return kind


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
