"""Talking over unix sockets: with the keeper in lines of JSON, with the server in one-line commands."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO

from gym_capture_redis.embedded.directory import Place

POLL_S = 0.01


def remaining(deadline: float) -> float:
    """Seconds until the deadline; never zero, which would mean not to wait at all."""
    return max(deadline - time.monotonic(), 0.001)


def connect(path: Path, deadline: float) -> socket.socket | None:
    """A connection to the socket at ``path``; None when nobody listens there. Raises TimeoutError."""
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(remaining(deadline))
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


def ask(server_socket: Path, command: str, timeout_s: float = 1.0) -> bytes:
    """Send a command whose reply is one line; return the line without its end. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(timeout_s)
        client.connect(str(server_socket))
        client.sendall(command.encode() + b"\r\n")
        with client.makefile("rb") as lines:
            return lines.readline().rstrip()


def stop_orphan(place: Place, deadline: float) -> None:
    """Ask the server to end, data saved, if it has no keeper or one that is already stopping it.

    A keeper listens before it starts its server. So the order matters: first reach a server, then find
    that no keeper listens; the other way round, both could just have been started.
    """
    with socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
        server.settimeout(remaining(deadline))
        server.connect(str(place.server_socket))
        keeper = connect(place.keeper_socket, deadline)
        if keeper is not None:
            keeper.close()
            return
        server.sendall(b"SHUTDOWN NOSAVE\r\n")
        server.recv(1)


def hear(lines: BinaryIO) -> dict[str, Any] | None:
    """The keeper's next message; None when it is gone."""
    try:
        line = lines.readline()
    except TimeoutError:
        raise TimeoutError("its keeper does not answer in time") from None
    except ConnectionError:
        return None
    message: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return message


def wait_if_last(watcher: socket.socket, deadline: float) -> None:
    """Wait for the end of the keeper if no user is left. Raises OSError."""
    with watcher.makefile("rb") as lines:
        if hear(lines) is None:
            return
        watcher.sendall(b"w")
        answer = hear(lines)
        if answer is not None and answer["users"] == 0:
            watcher.settimeout(remaining(deadline))
            lines.read()
