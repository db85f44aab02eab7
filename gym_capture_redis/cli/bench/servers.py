"""The servers that are measured: private ones of the benchmark's own, or the one that the user names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from rich.console import Console

from gym_capture_redis.cli.trial import trial_of
from gym_capture_redis.embedded import AppendFsync, EmbeddedServer
from gym_capture_redis.errors import ConfigurationError
from gym_capture_redis.server_url import ServerUrl

DURABILITY_WORDS = {
    "everysec": "append-only file, fsync every second",
    "always": "append-only file, fsync before every acknowledgement",
}
SCAN_COUNT = 1_000


class Server:
    """One server, and how to ask it about itself."""

    def __init__(self, url: str, *, private: bool) -> None:
        self.url = url
        self.private = private
        self._address = ServerUrl.parse(url)
        self._client = redis.Redis(**self._options(), retry=Retry(NoBackoff(), 0))

    def __str__(self) -> str:
        """Where it is, without credentials."""
        return "a private one" if self.private else str(self._address)

    @property
    def address(self) -> ServerUrl:
        """Where it is."""
        return self._address

    @property
    def client(self) -> redis.Redis:
        """A client for questions and for cleaning up."""
        return self._client

    def new_client(self) -> AsyncRedis:
        """A plain redis-py client, as somebody without this package would use."""
        return AsyncRedis(**self._options(), retry=AsyncRetry(NoBackoff(), 0))

    def info(self) -> dict[str, Any]:
        """All sections of INFO, with the statistics of each command."""
        answer: dict[str, Any] = self._client.info("everything")
        return answer

    @property
    def appendfsync(self) -> str | None:
        """``everysec``, ``always``, …; None where the server forbids CONFIG."""
        try:
            answer: dict[Any, Any] = self._client.config_get("appendfsync")
        except redis.exceptions.ResponseError:
            return None
        return answer.get("appendfsync")

    @property
    def durability(self) -> str:
        """What it does with an acknowledged write, in words."""
        return DURABILITY_WORDS.get(self.appendfsync or "", "append-only file; CONFIG is forbidden")

    def sweep(self, mark: str) -> None:
        """Remove every key with ``mark`` in its name: what an interrupted run left behind."""
        for key in self._client.scan_iter(match=f"*{mark}*", count=SCAN_COUNT):
            self._client.unlink(key)

    def close(self) -> None:
        """Close the connection for questions."""
        self._client.close()

    def _options(self) -> dict[str, Any]:
        url = self._address
        options: dict[str, Any] = {
            "db": url.db,
            "username": url.username,
            "password": url.password.get_secret_value() if url.password else None,
            "protocol": 2,
        }
        if url.scheme == "unix":
            return options | {"unix_socket_path": url.path}
        return options | {"host": url.host, "port": url.port, "ssl": url.scheme == "tls"}


@dataclass(frozen=True)
class Servers:
    """``main`` is measured; ``fsync`` is one that fsyncs every write, or None where there is none."""

    main: Server
    fsync: Server | None


@contextlib.contextmanager
def servers_for(console: Console, url: str | None, directory: Path, mark: str) -> Iterator[Servers]:
    """The server of ``url``, which is left without a key that has ``mark`` in its name; or private ones.

    Raises:
        CaptureError: the server cannot be used, or none can be started.

    """
    with contextlib.ExitStack() as stack:
        if url is None:
            main = stack.enter_context(private_server(directory / "everysec"))
            fsync = stack.enter_context(private_server(directory / "always", appendfsync="always"))
            yield Servers(main, fsync)
            return
        named = stack.enter_context(_named_server(url))
        stack.callback(named.close)
        asyncio.run(_try_out(console, named, mark))
        try:
            yield Servers(named, named if named.appendfsync == "always" else None)
        except BaseException:
            # Whoever was interrupted may not have removed all of it.
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                named.sweep(mark)
            raise


@contextlib.contextmanager
def private_server(directory: Path, *, appendfsync: AppendFsync = "everysec") -> Iterator[Server]:
    """Run a server for as long as the context lasts; its append-only file is never rewritten."""
    with EmbeddedServer(
        directory, appendfsync=appendfsync, extra_config={"auto-aof-rewrite-percentage": "0"}
    ) as embedded:
        server = Server(embedded.url, private=True)
        try:
            yield server
        finally:
            server.close()


@contextlib.contextmanager
def _named_server(url: str) -> Iterator[Server]:
    address = ServerUrl.parse(url)
    if address.scheme == "fakeredis":
        raise ConfigurationError(
            "fakeredis lives in one process, and what it does in it is not worth measuring"
        )
    if address.scheme == "embedded":
        with EmbeddedServer(address.path or None) as embedded:
            yield Server(embedded.url, private=False)
    else:
        yield Server(url, private=False)


async def _try_out(console: Console, server: Server, mark: str) -> None:
    """Fail early, and in one line, where the server cannot be used. Touches no data.

    Raises:
        CaptureError: why not.

    """
    async with trial_of(console, server.url, namespace=mark, durability="aof") as trial:
        await trial.write()
