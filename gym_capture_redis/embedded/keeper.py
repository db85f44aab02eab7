"""The keeper of one embedded server: its parent process, which ends it when nobody uses it any more.

``embedded.py`` runs this file by its path, so it imports nothing but a little of the standard library
and starts in a few hundredths of a second. Called as ``keeper.py FD``, with the request as
JSON on standard input; ``FD`` is one end of a socket pair, the first user's connection.

Every connection to the keeper is a user. The kernel closes it when the user's process ends, however it
ends, and keeps it open in a forked child; so the keeper never asks who is alive, and no user has to
say goodbye. With the last connection gone, it stops the server and exits.

The keeper holds an exclusive ``flock`` on ``server.lock``, and the server inherits it. The lock is
therefore free exactly when neither runs: two servers never write to one directory.

What the keeper sends, one JSON object per line:

    ``{"keeper": pid, "server": pid, "began_empty": bool}``
                        to every new connection: it is counted; the server began without data, or with some
    ``{"busy": true}``  to the first one only: the lock is held, this keeper gives up
    ``{"error": text}`` to the first one only: the server could not be started
    ``{"users": n}``    to a connection that sent ``w``: it only watches, and n users remain

and the end of the stream when the keeper is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOCK_NAME = "server.lock"
LOG_NAME = "server.log"
DATA_NAME = "appendonlydir"
# What the running server was started with; left behind only by a server that was not stopped in order.
STATE_NAME = "server.json"

MAX_LOG_BYTES = 1 << 20
# A server that needs longer has long written its data (only an fsync can take this long), so killing
# it loses nothing.
STOP_TIMEOUT_S = 10.0
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Replace the state file in one step. Raises OSError."""
    draft = directory / f"{STATE_NAME}.{os.urandom(8).hex()}"
    try:
        draft.write_text(json.dumps(state), encoding="utf-8")
        draft.replace(directory / STATE_NAME)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def take_lock(directory: Path) -> int | None:
    """The descriptor of the directory's lock, now held, or None when a keeper or server holds it."""
    lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
}
"""For a server with glibc's allocator: what a large value leaves is kept for the next one. To have the kernel
clear new pages for each takes longer than to store it."""


class Keeper:
    """One server, its users, and those who watch it end. Single-threaded, driven by events."""

    def __init__(self, request: dict[str, Any], first_user: socket.socket, lock: int) -> None:
        self._directory = Path(request["directory"])
        self._keeper_socket = Path(request["keeper_socket"])
        self._server_socket = Path(request["server_socket"])
        self._lock = lock
        self._users: set[socket.socket] = set()
        self._told_to_stop = False
        self._selector = selectors.DefaultSelector()
        self._catch_signals()
        # Listening comes before the server: one that answers while no keeper listens is an orphan.
        self._listener = self._listen()
        write_state(self._directory, request["state"])
        self._began_empty = not (self._directory / DATA_NAME).exists()
        self._server = self._spawn_server(request["binary"], request["config"])
        self._welcome(first_user)

    def run(self) -> None:
        """Return when the server has ended: by itself, by a signal to the keeper, or for want of users."""
        while self._server.poll() is None and not self._told_to_stop and self._in_use():
            for key, _ in self._selector.select():
                key.data(key.fileobj)
        self._finish()

    # -- the server ------------------------------------------------------------------------------

    def _spawn_server(self, binary: str, config: str) -> subprocess.Popen[bytes]:
        self._server_socket.unlink(missing_ok=True)
        # A file without a name: a setting may be a secret, and a pipe could fill up.
        with tempfile.TemporaryFile(dir=self._directory) as stdin:
            stdin.write(config.encode())
            stdin.seek(0)
            return subprocess.Popen(  # noqa: S603 - the binary that find_server_binary chose
                [binary, "-"],
                stdin=stdin,
                pass_fds=[self._lock],
                env=_ALLOCATOR | os.environ,
                preexec_fn=_die_with_parent(),  # noqa: PLW1509 - this process has one thread
            )

    def _finish(self) -> None:
        in_order = not self._users and self._server.poll() is None
        self._listener.close()
        self._keeper_socket.unlink(missing_ok=True)
        if self._server.poll() is None:
            self._server.terminate()
            try:
                self._server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
        status = self._server.wait()
        self._server_socket.unlink(missing_ok=True)
        if in_order:
            (self._directory / STATE_NAME).unlink(missing_ok=True)
        else:
            _log(f"keeper: the server ended with status {status}")
        os.close(self._lock)

    # -- its users -------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        self._keeper_socket.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        listener.bind(str(self._keeper_socket))
        listener.listen(1024)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # BlockingIOError: nobody else waits
            while True:
                self._welcome(listener.accept()[0])

    def _welcome(self, user: socket.socket) -> None:
        user.setblocking(False)
        self._users.add(user)
        self._selector.register(user, selectors.EVENT_READ, self._hear)
        _send(user, {"keeper": os.getpid(), "server": self._server.pid, "began_empty": self._began_empty})

    def _in_use(self) -> bool:
        if not self._users:
            self._accept(self._listener)  # somebody may have connected since the last event
        return bool(self._users)

    def _hear(self, connection: socket.socket) -> None:
        if connection.fileno() < 0:
            return  # dropped earlier in the same round of events
        try:
            heard = connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if not heard:
            self._drop(connection)
        elif heard == b"w":
            self._watch(connection)

    def _watch(self, watcher: socket.socket) -> None:
        """Tell ``watcher``, which no longer counts, how many users there are at this moment."""
        self._users.discard(watcher)
        self._accept(self._listener)
        for user in [user for user in self._users if ended(user)]:
            self._drop(user)
        if not self._users:
            self._listener.close()  # the watcher hears that this is the end; who comes now must wait for it
        _send(watcher, {"users": len(self._users)})

    def _drop(self, connection: socket.socket) -> None:
        self._users.discard(connection)
        self._selector.unregister(connection)
        connection.close()

    # -- signals ---------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        """Turn signals into events. SIGCHLD says that the server has ended, the others to end it."""
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the mask of whoever started us is inherited
        heard, told = socket.socketpair()
        heard.setblocking(False)
        told.setblocking(False)
        self._wakeup = told  # keeps it open
        signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        self._selector.register(heard, selectors.EVENT_READ, lambda ear: ear.recv(4096))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._told_to_stop = True


def _die_with_parent() -> Any:
    """What the server's process runs before it becomes the server, so that it ends with its keeper.

    SIGTERM and not SIGKILL: under ``everysec`` a server may have answered what it has yet to write.
    Where the kernel has no such thing, the next start stops the orphan.
    """
    keeper = os.getpid()
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl

    def run() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else a signal before exec would be swallowed
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)

    return run


def ended(connection: socket.socket) -> bool:
    """Whether the other side of a non-blocking connection has closed it."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever does not listen any more need not know
        connection.sendall(json.dumps(message).encode() + b"\n")


def _log(message: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, message.encode() + b"\n")


def _detach(directory: Path) -> None:
    """Leave the session, terminal and limit of open files (one per user) of whoever started us."""
    os.setsid()
    os.umask(0o077)
    os.chdir(directory)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _open_log(directory: Path) -> None:
    """Send what this process and the server print to the log, whose predecessor is kept when it is long."""
    path = directory / LOG_NAME
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_suffix(".log.1"))
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def main() -> None:
    """Detach, take the lock, keep the server. The caller's child exits at once; its child is the keeper."""
    first_user = socket.socket(fileno=int(sys.argv[1]))
    request = json.load(sys.stdin)
    if os.fork():
        os._exit(0)
    directory = Path(request["directory"])
    try:
        _detach(directory)
        lock = take_lock(directory)
        if lock is None:
            _send(first_user, {"busy": True})
            return
        _open_log(directory)
        keeper = Keeper(request, first_user, lock)
    except OSError as error:
        _send(first_user, {"error": str(error)})
        return
    keeper.run()


if __name__ == "__main__":
    main()
