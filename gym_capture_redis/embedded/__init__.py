"""A private real server for newcomers, tests and demos: no installation, no port, no daemon to stop.

::

    with EmbeddedServer("runs/today") as server:
        client = redis.Redis.from_url(server.url)

All processes of a machine that name the same directory share one server. It listens on a unix socket
that only its owner can open, appends every write to a file in the directory, and is stopped when the
last process has let go of it or has died. The data is there again at the next start.

How it is kept alive, and ended, is told in ``keeper.py``; ``server.py`` starts a keeper where none runs, and
holds one connection to it per started ``EmbeddedServer``.
"""

from gym_capture_redis.embedded.binary import find_server_binary
from gym_capture_redis.embedded.directory import default_directory
from gym_capture_redis.embedded.server import AppendFsync, EmbeddedServer

__all__ = ["AppendFsync", "EmbeddedServer", "default_directory", "find_server_binary"]
