"""``redis-benchmark`` or ``valkey-benchmark``, where one is on the PATH: the limit that a C client finds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil

from gym_capture_redis.cli.bench.servers import Server

PROGRAMS = ("redis-benchmark", "valkey-benchmark")
HOW_TO_GET = "apt install redis-tools or valkey-tools"
CONNECTIONS = 64
KEYSPACE = 10_000


class ServerBenchmarkError(Exception):
    """The program did not say what it measured."""


def find_program(server: Server) -> tuple[str | None, str]:
    """The program to run; if None, the reason why not."""
    if server.address.password is not None or server.address.scheme == "tls":
        return None, "a password or TLS would have to be given to it on its command line"
    for name in PROGRAMS:
        found = shutil.which(name)
        if found:
            return found, ""
    return None, f"neither {' nor '.join(PROGRAMS)} is on the PATH ({HOW_TO_GET})"


async def hset_rate(program: str, server: Server, *, mark: str, nbytes: int, requests: int) -> float:
    """Requests per second of ``HSET``, a field of ``nbytes`` each, over 64 connections.

    Raises:
        ServerBenchmarkError: it failed, or printed something else.

    """
    url = server.address
    where = ["-s", url.path] if url.scheme == "unix" else ["-h", url.host, "-p", str(url.port)]
    sizes = ["-c", str(CONNECTIONS), "-n", str(requests), "-r", str(KEYSPACE), "--dbnum", str(url.db)]
    key = f"{mark}-server-benchmark"
    process = await asyncio.create_subprocess_exec(
        program,
        *where,
        *sizes,
        *("--csv", "-x", "HSET", key, "__rand_int__"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        printed, _ = await process.communicate(os.urandom(nbytes))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        server.client.unlink(key)
    # "test","rps","avg_latency_ms",… : the test's name is the command, the payload in it.
    rates = re.findall(rb'",?"([0-9]+\.[0-9]+)","[0-9.]+","[0-9.]+",', printed)
    if not rates:
        raise ServerBenchmarkError(f"{program} did not say how many requests it made in a second")
    return float(rates[-1])
