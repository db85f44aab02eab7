"""``EmbeddedServer``: one user of a directory's server; starts a keeper where none runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args
from urllib.parse import quote

from gym_capture_redis.embedded import keeper
from gym_capture_redis.embedded.binary import find_server_binary
from gym_capture_redis.embedded.directory import (
    Place,
    default_directory,
    is_held,
    last_words,
    locate,
    prepare_directory,
    read_state,
)
from gym_capture_redis.embedded.talk import POLL_S, ask, connect, hear, remaining, stop_orphan, wait_if_last
from gym_capture_redis.errors import ConfigurationError

AppendFsync = Literal["everysec", "always"]

MAX_TIMEOUT_S = 86_400

# What makes the server private, shared and durable is not for a caller to change.
RESERVED_SETTINGS = frozenset(
    {
        *("port", "tls-port", "bind", "unixsocket", "unixsocketperm", "unixsocketgroup"),
        *("requirepass", "aclfile", "user", "include"),
        *("daemonize", "supervised", "pidfile", "logfile", "dir"),
        *("appendonly", "appendfsync"),
    }
)


class EmbeddedServer:
    """One user of the server of ``directory``, which is shared with everyone who names that directory.

    ``directory``: for the data, the log and the sockets; created if absent; ``default_directory()`` if None.
    ``appendfsync``: ``always`` also raises a server that already runs; nobody lowers it while it is used.
    ``timeout_s``: how long ``start`` and ``stop`` may each take, in seconds.
    ``extra_config``: further lines of ``redis.conf``, name to value. They apply when this call starts the
    server; a server that runs already must have been started with the same ones.
    ``binary``: the program to start; ``find_server_binary()`` if None. A server that runs already is used
    whatever it is.

    An object may be used from several threads. A child made by fork is a user of its own, and its ``stop``
    lets go for itself only. Constructing one touches nothing; ``ConfigurationError`` if a value is wrong.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        appendfsync: AppendFsync = "everysec",
        timeout_s: float = 20.0,
        extra_config: Mapping[str, str] | None = None,
        binary: Path | None = None,
    ) -> None:
        if appendfsync not in get_args(AppendFsync):
            raise ConfigurationError(f"appendfsync must be everysec or always, not {appendfsync!r}.")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ConfigurationError(
                f"timeout_s must be a number of seconds above 0, up to {MAX_TIMEOUT_S}, not {timeout_s!r}."
            )
        # Absolute from now on: the process may change its directory between two starts.
        self._named_directory = None if directory is None else Path(directory).expanduser().absolute()
        self._appendfsync = appendfsync
        self._timeout_s = timeout_s
        self._extra_config = _checked_settings(extra_config or {})
        self._binary = binary and binary.absolute()
        self._place: Place | None = None
        self._connection: _Connection | None = None
        self._lock = threading.Lock()
        _instances.add(self)

    @property
    def socket_path(self) -> Path:
        """The server's unix socket. Known from the first ``start`` on; ConfigurationError before it."""
        if self._place is None:
            raise ConfigurationError("The embedded server has no socket before start() was called.")
        return self._place.server_socket

    @property
    def url(self) -> str:
        """``unix://`` and the percent-encoded ``socket_path``. ConfigurationError before ``start``."""
        return f"unix://{quote(os.fsencode(self.socket_path))}"

    @property
    def began_empty(self) -> bool:
        """Whether the server that this object uses was started without any data: it has forgotten nothing."""
        return self._connection is not None and self._connection.began_empty

    def start(self) -> None:
        """Return when the server answers and stays up for this object, starting it if it does not run.

        Blocking. May be repeated: an object that is started checks its server, and gets a new one where
        the old one was killed. Raises ConfigurationError when the directory or the server program cannot
        be used, when the server ends at once (its last words are quoted), and when it does not answer
        within ``timeout_s``. An object that was not started before is not started then.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            try:
                self._start(deadline)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise ConfigurationError(
                    f"The embedded server of {self._named_directory or 'the default directory'} could not be "
                    f"started or joined: {error}"
                ) from error

    def stop(self) -> None:
        """Let go of the server. Idempotent, blocking, never raises for want of a server.

        The last user's ``stop`` returns when the server is stopped and its directory at rest, or after
        ``timeout_s`` while it is still stopping.
        """
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is None or self._place is None:
                return
            deadline = time.monotonic() + self._timeout_s
            watcher = None
            with contextlib.suppress(OSError):
                watcher = connect(self._place.keeper_socket, deadline)
            connection.close()
            if watcher is not None:
                with watcher, contextlib.suppress(OSError):
                    wait_if_last(watcher, deadline)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._connection is None else "started"
        return f"<{type(self).__name__} {str(self._named_directory or 'default')!r} {state}>"

    def _start(self, deadline: float) -> None:
        path = default_directory() if self._named_directory is None else self._named_directory
        try:
            directory = prepare_directory(path)
        except OSError as error:
            raise ConfigurationError(
                f"The embedded server cannot keep its data in {path}: the directory could not be made or "
                f"opened ({error.strerror})."
            ) from error
        held, self._connection = self._connection, None
        connection = held
        try:
            while connection is None or not connection.server_answers(deadline):
                if connection is not None:
                    connection.close()
                    connection.blame_if_spawned()
                connection = self._join_or_spawn(directory, deadline)
            self._agree_on_settings(connection.place)
        except BaseException:
            if connection is not None and connection is not held:
                connection.close()
            elif connection is not None and not connection.ended():
                self._connection = held  # a check that failed is no reason to let go
            raise
        connection.log_offset = None
        self._connection, self._place = connection, connection.place

    def _join_or_spawn(self, directory: Path, deadline: float) -> _Connection:
        """A connection to the directory's keeper: the one that runs, or a new one."""
        while True:
            place = locate(directory)
            joined = connect(place.keeper_socket, deadline)
            if joined is not None:
                connection = _greeted(joined, place)
            elif not is_held(directory):
                connection = self._spawn(place, deadline)
            else:
                connection = None
                stop_orphan(place, deadline)
            if connection is not None:
                return connection
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another server still holds it after {self._timeout_s:g} s, and cannot be joined: it is "
                    "slow to stop, or runs on another machine"
                )
            time.sleep(POLL_S)

    def _spawn(self, place: Place, deadline: float) -> _Connection | None:
        """Start a keeper, whose first user is the connection returned; None where another was faster."""
        request = json.dumps(
            {
                "directory": str(place.directory),
                "keeper_socket": str(place.keeper_socket),
                "server_socket": str(place.server_socket),
                "binary": str(self._binary or find_server_binary().absolute()),
                **self._settings_for(place),
            }
        )
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                offset = _run_keeper(place.directory, theirs, request, remaining(deadline))
            ours.settimeout(remaining(deadline))
        except BaseException:
            ours.close()
            raise
        return _greeted(ours, place, log_offset=offset)

    def _settings_for(self, place: Place) -> dict[str, Any]:
        """The server's ``redis.conf`` and the state that tells others how it was started."""
        appendfsync = self._appendfsync
        left_behind = read_state(place.directory)
        if left_behind.get("appendfsync") == "always":
            # The last server was killed under its users, and one of them may still count on this.
            appendfsync = "always"
        lines = [
            "port 0",
            f"unixsocket {_quoted(place.server_socket)}",
            "unixsocketperm 700",
            f"dir {_quoted(place.directory)}",
            "daemonize no",
            "appendonly yes",
            f"appendfsync {appendfsync}",
            'save ""',
            "maxmemory-policy noeviction",
            *(f"{name} {value}" for name, value in self._extra_config.items()),
        ]
        state = {"appendfsync": appendfsync, "extra_config": self._extra_config, "sockets": place.elsewhere}
        return {"config": "\n".join(lines) + "\n", "state": state}

    def _agree_on_settings(self, place: Place) -> None:
        """See that the server, whoever started it, does what this user asked for."""
        state = read_state(place.directory)
        running = state.get("extra_config", {})
        for name, value in self._extra_config.items():
            if running.get(name) != value:
                raise ConfigurationError(
                    f"The server of {place.directory} already runs, with another {name}. Stop its users "
                    "first, or name another directory."
                )
        if self._appendfsync == "always" and state.get("appendfsync") != "always":
            reply = ask(place.server_socket, "CONFIG SET appendfsync always")
            if reply != b"+OK":
                raise ConfigurationError(
                    f"The server of {place.directory} refused appendfsync always: {reply.decode()}"
                )
            keeper.write_state(place.directory, {**state, "appendfsync": "always"})


_instances: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: a lock that another thread held at that moment would stay locked for ever."""
    for instance in _instances:
        instance._lock = threading.Lock()  # noqa: SLF001 - part of the class


os.register_at_fork(after_in_child=_renew_locks)


@dataclass
class _Connection:
    """What makes its holder a user. ``log_offset``: where in the log the server spawned with it begins."""

    socket: socket.socket
    place: Place
    keeper_pid: int
    server_pid: int
    log_offset: int | None
    began_empty: bool

    def close(self) -> None:
        self.socket.close()

    def ended(self) -> bool:
        """Whether the keeper is gone, and its server with it."""
        return keeper.ended(self.socket)

    def server_answers(self, deadline: float) -> bool:
        """Wait for the server's first answer; False when it ended. Raises TimeoutError."""
        reply = b""
        while not self.ended():
            with contextlib.suppress(OSError):
                reply = ask(self.place.server_socket, "PING")
                # Any other refusal (a full disk, a script that runs) comes from a server that is up.
                if reply and not reply.startswith(b"-LOADING"):
                    return True
            if time.monotonic() > deadline:
                said = f" but {reply.decode(errors='replace')!r}" if reply else ""
                raise TimeoutError(
                    f"its server does not answer in time{said}.{last_words(self.place.directory)}"
                )
            time.sleep(POLL_S)
        return False

    def blame_if_spawned(self) -> None:
        """Raise ConfigurationError, with what its log says, when the server that ended was our own."""
        if self.log_offset is not None:
            raise _ended_at_once(self.place.directory, self.log_offset)


def _run_keeper(directory: Path, first_user: socket.socket, request: str, timeout_s: float) -> int:
    """Start a keeper and leave it to itself. Return the length of the log before it, in bytes.

    It becomes no child of ours, so neither its zombie nor the end of our process tree is shared with it.
    """
    if not sys.executable:
        raise ConfigurationError("The embedded server needs sys.executable, a Python to run its keeper.")
    log = os.open(directory / keeper.LOG_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        length = os.fstat(log).st_size
        # -S -s -P: neither the environment's packages nor this package's own directory.
        subprocess.run(  # noqa: S603 - this Python, our file
            [sys.executable, "-S", "-s", "-P", keeper.__file__, str(first_user.fileno())],
            input=request.encode(),
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[first_user.fileno()],
            timeout=timeout_s,
            check=False,
        )
    finally:
        os.close(log)
    return length


def _greeted(connected: socket.socket, place: Place, log_offset: int | None = None) -> _Connection | None:
    """Read the keeper's greeting. None when it is not, or no longer, the keeper of this directory.

    Raises ConfigurationError when a keeper of our own (one with a ``log_offset``) could not start.
    """
    try:
        with connected.makefile("rb") as lines:
            greeting = hear(lines)
        connected.setblocking(False)
    except BaseException:
        connected.close()
        raise
    if greeting is not None and "server" in greeting:
        return _Connection(
            connected, place, greeting["keeper"], greeting["server"], log_offset, greeting["began_empty"]
        )
    connected.close()
    if greeting is None and log_offset is not None:
        raise _ended_at_once(place.directory, log_offset)
    if greeting is not None and "error" in greeting:
        raise ConfigurationError(
            f"The embedded server cannot start in {place.directory}: {greeting['error']}"
        )
    return None


def _ended_at_once(directory: Path, log_offset: int) -> ConfigurationError:
    return ConfigurationError(
        f"The embedded server of {directory} ended before it answered.{last_words(directory, log_offset)}"
    )


def _checked_settings(extra_config: Mapping[str, str]) -> dict[str, str]:
    """A copy. ConfigurationError for a name that is reserved or no name, or a value of several lines."""
    for name, value in extra_config.items():
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
            raise ConfigurationError(f"extra_config: {name!r} is not the name of a setting (in lower case).")
        if not isinstance(value, str) or not re.fullmatch(r"[^\r\n\0]*", value):
            raise ConfigurationError(f"extra_config: the value of {name} is not a string of one line.")
        if name in RESERVED_SETTINGS:
            raise ConfigurationError(f"extra_config: the embedded server sets {name} itself.")
    return dict(extra_config)


def _quoted(path: Path) -> str:
    """A path as one word of ``redis.conf``, whatever bytes it is made of."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in os.fsencode(path)) + '"'
