"""The files of a spill directory: private, appended durably, and emptied without losing a line."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import stat
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_capture_redis.errors import ConfigurationError
from gym_capture_redis.marks import Mark, Target
from gym_capture_redis.settings import SinkSettings
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.spill import _HELD, Spill, SpillDirectory

HERE = Target("redis://server:6379/0", 0, "run")
PATIENCE_S = 30.0


def mark(number: int, target: Target = HERE) -> Mark:
    return Mark(target, "rollout", f"call-{number}", "", "", 1_000 + number, f"{number:016x}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "above" / "spill"


@pytest.fixture
def spill(path: Path) -> SpillDirectory:
    return SpillDirectory(path)


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def only_file(path: Path) -> Path:
    (file,) = path.iterdir()
    return file


@contextmanager
def files_no_longer_than(nbytes: int) -> Iterator[None]:
    """What a full disk does, for this process: a write ends short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Appending


def test_directory_and_files_are_private(spill: SpillDirectory, path: Path) -> None:
    spill.append([mark(1)])
    modes = [stat.S_IMODE(place.stat().st_mode) for place in (path.parent, path, only_file(path))]
    assert modes == [0o700, 0o700, 0o600]
    assert only_file(path).name.startswith(f"{os.getpid()}-")


def test_file_and_directories_are_fsynced(
    spill: SpillDirectory, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    spill.append([mark(1)])
    file = str(only_file(path))
    assert synced == [str(path.parent.parent), str(path.parent), file, str(path)]
    synced.clear()
    spill.append([mark(2), mark(3)])
    assert synced == [file]


def test_marks_of_one_process_share_a_file_in_their_order(spill: SpillDirectory, path: Path) -> None:
    for number in (1, 2, 3):
        spill.append([mark(number)])
    assert only_file(path).read_bytes() == b"".join(mark(number).line() for number in (1, 2, 3))


def test_an_append_that_finds_the_disk_full_leaves_no_half_line(spill: SpillDirectory, path: Path) -> None:
    spill.append([mark(1)])
    file = only_file(path)
    with files_no_longer_than(file.stat().st_size + 20), pytest.raises(OSError, match="large") as caught:
        spill.append([mark(2)])
    assert caught.value.errno == errno.EFBIG
    assert file.read_bytes() == mark(1).line()


def test_an_append_after_a_torn_line_begins_a_line_of_its_own(spill: SpillDirectory, path: Path) -> None:
    spill.append([mark(1)])
    with only_file(path).open("ab") as file:
        file.write(b'{"format": 1, "ro')
    spill.append([mark(2)])
    (waiting,) = spill.scan(HERE)
    assert waiting.marks == [mark(1), mark(2)]


def test_an_append_waits_for_nobody_who_has_the_file_locked(spill: SpillDirectory, path: Path) -> None:
    spill.append([mark(1)])
    first = only_file(path)
    with first.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        spill.append([mark(2)])
    assert first.read_bytes() == mark(1).line()
    assert {content for name, content in files(path).items() if name != first.name} == {mark(2).line()}


def test_an_append_never_follows_a_link(spill: SpillDirectory, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    path.mkdir(parents=True)
    (path / spill._own_name).symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        spill.append([mark(1)])
    assert target.read_bytes() == b""


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="link"):
        SpillDirectory(tmp_path / "link").append([mark(1)])
    assert list((tmp_path / "real").iterdir()) == []


def test_where_locks_do_not_work_marks_are_kept_all_the_same(
    spill: SpillDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    spill.append([mark(1)])
    spill.append([mark(2)])
    with pytest.raises(OSError, match="No locks available"):
        spill.lock_for(HERE).take()
    assert [file.marks for file in spill.scan(HERE)] == [[mark(1), mark(2)]]


# Reading


def test_files_are_read_the_oldest_marks_first(path: Path) -> None:
    for numbers in ((5, 6), (1, 9), (3,)):
        SpillDirectory(path).append(map(mark, numbers))
    found = [[int(entry.mark_id, 16) for entry in file.marks] for file in SpillDirectory(path).scan(HERE)]
    assert found == [[1, 9], [3], [5, 6]]


def test_links_pipes_and_files_of_other_users_are_passed_over(
    spill: SpillDirectory, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill.append([mark(1)])
    outside = tmp_path / "outside"
    outside.write_bytes(mark(2).line())
    (path / "link.marks").symlink_to(outside)
    os.mkfifo(path / "pipe.marks")
    (path / "folder.marks").mkdir()
    assert [file.marks for file in spill.scan(HERE)] == [[mark(1)]]
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert spill.scan(HERE) == []


# Taking lines out


def test_what_is_made_goes_and_an_empty_file_goes_with_it(spill: SpillDirectory, path: Path) -> None:
    spill.append([mark(1), mark(2)])
    name = only_file(path).name
    assert spill.settle(name, [mark(1).mark_id])
    assert files(path) == {name: mark(2).line()}
    assert stat.S_IMODE(only_file(path).stat().st_mode) == 0o600
    assert spill.settle(name, [mark(2).mark_id])
    assert files(path) == {}
    assert spill.settle(name, [])
    spill.append([mark(3)])
    assert [file.marks for file in spill.scan(HERE)] == [[mark(3)]]


def test_a_file_is_not_rewritten_when_nothing_changes(spill: SpillDirectory, path: Path) -> None:
    spill.append([mark(1)])
    before = only_file(path).stat()
    assert spill.settle(only_file(path).name, [mark(2).mark_id])
    after = only_file(path).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_file_in_use_is_left_alone(spill: SpillDirectory, path: Path) -> None:
    spill.append([mark(1)])
    with only_file(path).open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert not spill.settle(only_file(path).name, [mark(1).mark_id])
    assert only_file(path).read_bytes() == mark(1).line()


def test_marks_of_others_stay_as_they_are(spill: SpillDirectory, path: Path) -> None:
    other = mark(2, HERE._replace(namespace="other"))
    spill.append([mark(1), other])
    assert spill.settle(only_file(path).name, [mark(1).mark_id])
    assert only_file(path).read_bytes() == other.line()


def test_a_torn_last_line_is_dropped_and_said(
    spill: SpillDirectory, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spill.append([mark(1)])
    with only_file(path).open("ab") as file:
        file.write(mark(2).line()[:60])
    assert spill.settle(only_file(path).name, [])
    assert only_file(path).read_bytes() == mark(1).line()
    (record,) = caplog.records
    assert (record.levelno, "never finished" in record.getMessage()) == (logging.WARNING, True)


def test_a_damaged_line_is_set_aside_and_said(
    spill: SpillDirectory, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spill.append([mark(1), mark(2)])
    file = only_file(path)
    damaged = file.read_bytes().replace(b"call-1", b"call-7")
    file.write_bytes(damaged)
    assert [waiting.marks for waiting in spill.scan(HERE)] == [[mark(2)]]
    assert spill.settle(file.name, [mark(2).mark_id])
    aside = only_file(path)
    assert (aside.suffix, aside.read_bytes()) == (".damaged", damaged.splitlines(keepends=True)[0])
    (record,) = caplog.records
    assert (record.levelno, aside.name in record.getMessage()) == (logging.ERROR, True)


def test_a_file_with_nothing_but_damage_is_found_as_well(spill: SpillDirectory, path: Path) -> None:
    path.mkdir(parents=True)
    (path / "1-a.marks").write_bytes(b"damage\n")
    assert [(file.name, file.marks) for file in spill.scan(HERE)] == [("1-a.marks", [])]


def test_a_disk_that_is_full_keeps_every_line_but_lets_a_finished_file_go(
    spill: SpillDirectory, path: Path
) -> None:
    spill.append([mark(1), mark(2)])
    name, content = only_file(path).name, only_file(path).read_bytes()
    with files_no_longer_than(20):
        with pytest.raises(OSError, match="large"):
            spill.settle(name, [mark(1).mark_id])
        assert (path / name).read_bytes() == content
        assert spill.settle(name, [mark(1).mark_id, mark(2).mark_id])
    assert [file.name for file in path.iterdir() if file.suffix == ".marks"] == []


# The lock of a target


def test_one_holds_the_lock_of_a_target_at_a_time(spill: SpillDirectory, path: Path) -> None:
    first, second, other = (
        spill.lock_for(target) for target in (HERE, HERE, HERE._replace(namespace="other"))
    )
    assert (first.take(), second.take(), other.take()) == (True, False, True)
    first.release()
    first.release()
    assert second.take()
    second.release()
    other.release()
    assert (files(path), _HELD) == ({}, set())


def test_a_forked_child_holds_no_lock_of_its_parent(spill: SpillDirectory) -> None:
    lock = spill.lock_for(HERE)
    assert lock.take()
    ready_read, ready_write = os.pipe()
    end_read, end_write = os.pipe()
    child = os.fork()
    if not child:
        os.close(end_write)
        os.write(ready_write, b"r")
        os.read(end_read, 1)
        os._exit(0)
    os.read(ready_read, 1)
    os.close(lock._file or -1)  # as when the parent is killed: nothing is unlocked by hand
    _HELD.clear()
    again = spill.lock_for(HERE)
    try:
        assert again.take()
        again.release()
    finally:
        for end in (ready_read, ready_write, end_read, end_write):
            os.close(end)
        os.waitpid(child, 0)


# The threads


def test_marks_that_come_together_share_an_fsync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = Spill(path)
    assert spill.add(mark(0)).result(PATIENCE_S)
    appends: list[int] = []
    append = SpillDirectory.append

    def spy(self: SpillDirectory, marks: Any) -> None:
        batch = list(marks)
        appends.append(len(batch))
        append(self, batch)

    monkeypatch.setattr(SpillDirectory, "append", spy)
    # What came while the thread was busy.
    spill._writing.waiting.extend((mark(number), Future()) for number in range(1, 100))
    assert spill.add(mark(100)).result(PATIENCE_S)
    assert appends == [100]
    assert len(only_file(path).read_bytes().splitlines()) == 101


def test_what_cannot_be_written_is_an_error_with_the_rollouts_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert not Spill(tmp_path / "file").add(mark(1)).result(PATIENCE_S)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert all(word in record.getMessage() for word in ("rollout", "call-1", "Not a directory"))


# The setting


def test_constructing_a_sink_touches_no_file(path: Path) -> None:
    RedisTokenSink("redis://server", spill_dir=path)
    assert not path.parent.exists()


def test_a_relative_path_is_meant_as_it_is_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = SinkSettings.build("redis://server", "run", {"spill_dir": "spill"})
    assert settings.spill_dir == tmp_path / "spill"


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_in_the_home_directory_is_meant_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[str | Path]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = SinkSettings.build("redis://server", "run", {"spill_dir": kind("~/spill")})
    assert settings.spill_dir == tmp_path / "spill"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "the path of a directory, not ''"),
        (b"spill", "the path of a directory, not of type bytes"),
        ("a\0b", r"the path of a directory, not 'a\x00b'"),
        (7, "the path of a directory, not 7"),
        (["spill"], "the path of a directory, not of type list"),
        ("~no-such-user/spill", "in a home directory that is known, not '~no-such-user/spill'"),
    ],
)
def test_what_is_no_path_is_refused_in_plain_words(value: object, said: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        SinkSettings.build("redis://server", "run", {"spill_dir": value})
    assert str(refusal.value) == f"RedisTokenSink: setting 'spill_dir' is refused: it must be {said}"
