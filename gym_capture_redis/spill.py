"""The spill directory: where marks wait that could not be made in Redis. Blocking file I/O, no network.

Each process appends to a file of its own, ``<pid>-<random>.marks``, and whoever makes the marks takes their
lines out of it. Both hold the file's lock for that moment only, so that neither waits for the network of the
other. Links are never followed, and files of other users are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gym_capture_redis.marks import Line, Mark, Target, marks_for, read_lines, what_stays

logger = logging.getLogger(__name__)

_FILE_FLAGS = os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not make us wait
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MARKS, _DAMAGED, _REWRITTEN, _LOCK = ".marks", ".damaged", ".rewritten", ".lock"
_MOST_TRIES = 8
_LONGEST_QUOTE = 200
_INHERITED: list[_Writing] = []


class Waiting(NamedTuple):
    """A file that holds something for a target: its marks in order, or only lines that nobody can read."""

    name: str
    marks: list[Mark]


class SpillDirectory:
    """The files. Every method may raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own_name = _new_name()

    def prepare(self) -> None:
        """Create the directory if it is not there."""
        with self._opened():
            pass

    def append(self, marks: Iterable[Mark]) -> None:
        """Write the marks to this process's file; on return they survive the machine."""
        lines = b"".join(mark.line() for mark in marks)
        with self._opened() as directory:
            file = self._own_file(directory)
            try:
                size = os.fstat(file).st_size
                try:
                    _write(file, lines if _ends_a_line(file, size) else b"\n" + lines)
                    os.fsync(file)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.ftruncate(file, size)
                    raise
                if size == 0:
                    os.fsync(directory)
            finally:
                _unlock(file)

    def scan(self, target: Target) -> list[Waiting]:
        """The files that hold something for ``target``, the oldest marks first."""
        found = []
        with self._opened() as directory:
            for name in os.listdir(directory):  # noqa: PTH208 - by its descriptor
                if name.endswith(_MARKS):
                    lines = self._read(directory, name)
                    marks = marks_for(target, lines)
                    if marks or any(line.problem for line in lines):
                        found.append(Waiting(name, marks))
        return sorted(found, key=lambda file: (file.marks[0].at_ms if file.marks else 0, file.name))

    def settle(self, name: str, made: Iterable[str]) -> bool:
        """Take the marks with these ids out of a file, and what nobody can read.

        False: it is in use just now, and nothing was done.
        """
        with self._opened() as directory:
            try:
                file = os.open(name, _FILE_FLAGS & ~os.O_CREAT, dir_fd=directory)
            except FileNotFoundError:
                return True
            try:
                if not _lock(file) or not _is_at(file, name, directory):
                    return False
                content = _content(file)
                lines = read_lines(content)
                self._set_aside(directory, name, lines)
                left = what_stays(lines, made)
                if left == content:
                    return True
                if left:
                    _replace(directory, name, left)
                else:
                    os.unlink(name, dir_fd=directory)
                os.fsync(directory)
                return True
            finally:
                _unlock(file)

    def lock_for(self, target: Target) -> TargetLock:
        """The right to make the marks of ``target``, which one holds at a time."""
        return TargetLock(self, target)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        _make_directory(self._path)
        directory = os.open(self._path, _DIRECTORY_FLAGS)
        try:
            yield directory
        finally:
            os.close(directory)

    def _own_file(self, directory: int) -> int:
        """This process's file, open and locked; a new one rather than waiting for who reads the old one."""
        for _ in range(_MOST_TRIES):
            file = os.open(self._own_name, _FILE_FLAGS, 0o600, dir_fd=directory)
            try:
                if _lock(file) and _is_at(file, self._own_name, directory):
                    return file
            except OSError:
                return file  # no locks here: then nobody takes lines out either (see TargetLock)
            _unlock(file)
            self._own_name = _new_name()
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self._path))

    def _read(self, directory: int, name: str) -> list[Line]:
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return []
            file = os.open(name, _READ_FLAGS, dir_fd=directory)
        except FileNotFoundError:
            return []  # all of it was made meanwhile
        try:
            return read_lines(_content(file))
        finally:
            os.close(file)

    def _set_aside(self, directory: int, name: str, lines: list[Line]) -> None:
        damaged = b"".join(line.text + b"\n" for line in lines if line.problem == "damaged")
        if damaged:
            aside = name.removesuffix(_MARKS) + _DAMAGED
            file = os.open(aside, _FILE_FLAGS, 0o600, dir_fd=directory)
            try:
                _write(file, damaged)
                os.fsync(file)
            finally:
                os.close(file)
            logger.error(
                "Damaged lines of the spill file %s are in %s now; each was a mark of a rollout.",
                self._path / name,
                self._path / aside,
            )
        for line in lines:
            if line.problem == "torn":
                logger.warning(
                    "The last line of the spill file %s was never finished, and is dropped: %r",
                    self._path / name,
                    line.text[:_LONGEST_QUOTE],
                )


class TargetLock:
    """Held while the marks of one target are made. Goes with its process; no forked child inherits it."""

    def __init__(self, spill: SpillDirectory, target: Target) -> None:
        self._spill = spill
        self._name = hashlib.blake2b(repr(target).encode(), digest_size=8).hexdigest() + _LOCK
        self._file: int | None = None

    def take(self) -> bool:
        """Whether it could be taken at once. OSError: the file system has no locks."""
        with self._spill._opened() as directory:  # noqa: SLF001 - its own directory
            file = os.open(self._name, _FILE_FLAGS, 0o600, dir_fd=directory)
            try:
                if _lock(file) and _is_at(file, self._name, directory):
                    self._file = file
                    _HELD.add(file)
            finally:
                if self._file is None:
                    _unlock(file)
        return self._file is not None

    def release(self) -> None:
        """Let it go. Idempotent."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with self._spill._opened() as directory:  # noqa: SLF001
                os.unlink(self._name, dir_fd=directory)
        finally:
            _HELD.discard(file)
            _unlock(file)


class _Writing:
    """What the threads of one process share."""

    def __init__(self, path: Path) -> None:
        self.pid = os.getpid()
        self.directory = SpillDirectory(path)
        self.guard = threading.Lock()
        self.waiting: list[tuple[Mark, Future[bool]]] = []
        self.appending = ThreadPoolExecutor(1, thread_name_prefix="gym-capture-redis spill")
        self.settling = ThreadPoolExecutor(1, thread_name_prefix="gym-capture-redis replay")


class Spill:
    """A spill directory and the threads for it: no event loop waits, and no busy thread pool is in the way.

    Opens and starts nothing until used. Threads of a process share it; a forked child gets files of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = _Writing(path)

    @property
    def directory(self) -> SpillDirectory:
        """The files, as this process sees them."""
        return self._here().directory

    @property
    def threads(self) -> ThreadPoolExecutor:
        """One thread for all that takes marks out of the directory, apart from the one that appends."""
        return self._here().settling

    def add(self, mark: Mark) -> Future[bool]:
        """Begin to append a mark. Ends with whether it is on disk; if not, that was logged.

        Goes on if its caller leaves, and even if the interpreter is about to end. Marks that come together
        share an fsync.
        """
        here = self._here()
        kept: Future[bool] = Future()
        kept.set_running_or_notify_cancel()  # from here on nobody can cancel it
        with here.guard:
            here.waiting.append((mark, kept))
        here.appending.submit(_append_all, here)
        return kept

    def _here(self) -> _Writing:
        if self._writing.pid != os.getpid():
            _INHERITED.append(self._writing)  # the parent's threads are not here, and its locks may be taken
            self._writing = _Writing(self.path)
        return self._writing


def _append_all(here: _Writing) -> None:
    with here.guard:
        batch, here.waiting = here.waiting, []
    if not batch:
        return
    try:
        here.directory.append(mark for mark, _ in batch)
    except Exception as error:  # noqa: BLE001 - whatever it is, the callers must be told
        for mark, kept in batch:
            log_lost(mark, error)
            kept.set_result(False)
        return
    for _, kept in batch:
        kept.set_result(True)


def log_lost(mark: Mark, why: object) -> None:
    """Say that a mark is neither in Redis nor in a spill file."""
    logger.error(
        "Rollout %s, model call %r: lost, and could be marked neither in Redis nor in a spill file (%s). "
        "Without an open intent of the call the rollout may look complete: do not train on it.",
        mark.rollout_id,
        mark.model_call_id,
        why,
    )


_HELD: set[int] = set()
"""Descriptors of the target locks that this process holds."""


def _leave_to_parent() -> None:
    while _HELD:
        with contextlib.suppress(OSError):
            os.close(_HELD.pop())


os.register_at_fork(after_in_child=_leave_to_parent)


def _new_name() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}{_MARKS}"


def _make_directory(path: Path) -> None:
    """Create the directory, and those above it, durably."""
    if path.exists():
        return
    _make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _lock(file: int) -> bool:
    """Whether the file could be locked at once. OSError: locks do not work here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(file: int) -> None:
    """Unlock and close. Not by closing alone: a thread that forks at this moment copies the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _is_at(file: int, name: str, directory: int) -> bool:
    """Whether the open file still has this name: it may have been replaced before it was locked."""
    try:
        there = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(file))


def _ends_a_line(file: int, size: int) -> bool:
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"


def _content(file: int) -> bytes:
    with open(file, "rb", closefd=False) as reader:
        return reader.read()


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _replace(directory: int, name: str, content: bytes) -> None:
    """Give the file other content in one step. Its lock is held, so nobody else writes the draft."""
    draft = name + _REWRITTEN
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(draft, flags, 0o600, dir_fd=directory)
    try:
        _write(file, content)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
