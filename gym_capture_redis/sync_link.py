"""redis-py's synchronous connections, verified every time they connect, in calls that end at a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.connection import (
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.retry import Retry

from gym_capture_redis.scripts import Argument, Dialect
from gym_capture_redis.searches import ASK_TIMEOUT_S, Question, Search
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ServerSettings
from gym_capture_redis.wire import (
    QUESTIONS,
    Pipeline,
    Terms,
    agree,
    fake_server,
    options_of,
    pack_command,
    read_facts,
    user_of,
)

_LARGEST_SEND_BYTES = 2**18

T = TypeVar("T")


class SyncLink:
    """One connection to a server, given by address or path of its socket. For one thread at a time.

    Deadlines are in ``time.monotonic``. ``run_id`` and ``dialect`` are as ``connection.Link`` has them.
    """

    def __init__(self, settings: ServerSettings, server: Address | str) -> None:
        self._settings = settings
        self._server = server
        self._terms = Terms("", Dialect(flagged=settings.url.scheme != "fakeredis"))
        self._line: _Line | None = None

    @property
    def run_id(self) -> str:
        """Run id of the server process."""
        return self._terms.run_id

    @property
    def dialect(self) -> Dialect:
        """How scripts are written for it."""
        return self._terms.dialect

    def connect(self, deadline: float) -> None:
        """Connect, greet and verify the server.

        Raises:
            redis.exceptions.RedisError, OSError: it is away, starting, no primary, or too slow.
            DurabilityError, ConfigurationError: it was refused.

        """
        settings = self._settings
        if settings.url.scheme == "fakeredis":
            self._line = _Line(_fake_connection(settings))
            return
        self._line = _Line(_new_connection(settings, self._server, db=settings.url.db, **user_of(settings)))
        try:
            self._line.open(deadline)
            facts = read_facts(self._server, *[self._line.ask(words) for words in QUESTIONS])
            self._terms = agree(facts, settings, self._server)
        except BaseException:
            self.close()
            raise

    def pipeline(
        self, commands: Sequence[tuple[Argument, ...]], *, deadline: float, confirm_s: float | None = None
    ) -> tuple[list[Any], bool]:
        """Send all commands at once and return the replies in order, error replies as exceptions.

        With ``confirm_s`` it waits for so long until they are as durable as promised; says whether they are.
        After any exception the link must be closed: replies may still be under way, and what was sent may
        still be executed.

        Raises:
            redis.exceptions.RedisError, OSError: the connection failed, is out of step or too slow; none of
                the replies is known.

        """
        if self._line is None:
            raise redis_errors.ConnectionError("the connection was closed")
        pipeline = Pipeline(commands, self._terms, confirm_s)
        self._line.deadline = deadline
        return pipeline.read(self._line.exchange(pipeline.packed, pipeline.count))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        line, self._line = self._line, None
        if line is not None:
            line.close()


class _Line:
    """A connection of redis-py, each of whose reads and writes ends at ``deadline``."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.deadline = 0.0

    def open(self, deadline: float) -> None:
        self.deadline = deadline
        left_s = _left_s(deadline)
        self._connection.socket_connect_timeout = self._connection.socket_timeout = left_s
        self._connection.redis_connect_func = self._greet
        self._connection.connect()

    def ask(self, words: Sequence[str]) -> Any:
        """The reply to one command; an error reply as an exception that is not raised."""
        (reply,) = self.exchange([pack_command(words)], 1)
        return reply

    def exchange(self, packed: Sequence[bytes], count: int) -> list[Any]:
        self._connection.send_packed_command(packed, check_health=False)
        return [self._reply() for _ in range(count)]

    def close(self) -> None:
        self._connection.disconnect()

    def _greet(self, connection: Any) -> None:
        # Its own time-outs begin anew with every byte that comes.
        connection._sock = _TimedSocket(connection._sock, self)  # noqa: SLF001
        try:
            connection.on_connect()
        except BaseException:
            connection.disconnect()  # redis-py cleans up after its own errors only
            raise

    def _reply(self) -> Any:
        try:
            return self._connection.read_response()
        except redis_errors.ResponseError as error:
            return error


class _TimedSocket:
    """A socket whose operations all end at the deadline of its line, however little comes at a time."""

    def __init__(self, sock: Any, line: _Line) -> None:
        self._sock = sock
        self._line = line

    def recv(self, *args: Any) -> Any:
        return self._timed().recv(*args)

    def recv_into(self, *args: Any) -> Any:
        return self._timed().recv_into(*args)

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._timed().send(view[:_LARGEST_SEND_BYTES]) :]

    def _timed(self) -> Any:
        self._sock.settimeout(_left_s(self._line.deadline))
        return self._sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def follow(search: Search[T], settings: ServerSettings, deadline: float) -> T:
    """Ask what ``search`` wants to know, one server after the other, and return what it found.

    Raises:
        redis.exceptions.RedisError: it found nothing, was refused for good, or there was no time left.

    """
    question = next(search)
    while True:
        answer: Any
        try:
            answer = _ask(settings, question, min(deadline, time.monotonic() + ASK_TIMEOUT_S))
        except (redis_errors.RedisError, OSError) as error:
            answer = error
        try:
            question = search.send(answer)
        except StopIteration as found:
            result: T = found.value
            return result


def within(deadline: float, work: Callable[[], T], *, undo: Callable[[T], None]) -> T:
    """Do work that may hang where nothing bounds it, as when a name is looked up, on a thread of its own.

    What comes too late is undone there.

    Raises:
        redis.exceptions.TimeoutError: it did not end in time.
        Exception: whatever the work raised.

    """
    return _Bounded(work, undo).result(deadline)


class _Bounded(Generic[T]):
    """Work on a thread of its own, of which somebody takes the result, or nobody."""

    def __init__(self, work: Callable[[], T], undo: Callable[[T], None]) -> None:
        self._work, self._undo = work, undo
        self._done = threading.Event()
        self._ended = threading.Lock()
        self._abandoned = False
        self._results: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="gym-capture-redis connecting", daemon=True).start()

    def result(self, deadline: float) -> T:
        try:
            self._done.wait(max(0.0, deadline - time.monotonic()))
        finally:
            with self._ended:
                self._abandoned = not self._done.is_set()
        if self._abandoned:
            raise redis_errors.TimeoutError("no connection in time")
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            self._error = error
        with self._ended:
            self._done.set()
            if self._abandoned and self._results:
                self._undo(self._results[0])


def _ask(settings: ServerSettings, question: Question, deadline: float) -> Any:
    """The reply of a server to one command, over a connection of its own; an error reply is raised."""
    line = _Line(
        _new_connection(settings, question.server, username=question.username, password=question.password)
    )
    try:
        line.open(deadline)
        reply = line.ask(question.words)
    finally:
        line.close()
    if isinstance(reply, Exception):
        raise reply
    return reply


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise redis_errors.TimeoutError("no reply in time")
    return left_s


def _new_connection(settings: ServerSettings, server: Address | str, **options: Any) -> Any:
    options |= options_of(settings, server) | {
        "retry": Retry(NoBackoff(), 0)  # the one retry loop is ours and has a deadline
    }
    kind: Any = UnixDomainSocketConnection
    if not isinstance(server, str):
        kind = SSLConnection if settings.url.scheme == "tls" else Connection
    return kind(**options)


def _fake_connection(settings: ServerSettings) -> Any:
    server = fake_server(settings)
    from fakeredis import FakeRedis

    pool: Any = FakeRedis(server=server).connection_pool
    return pool.make_connection()
