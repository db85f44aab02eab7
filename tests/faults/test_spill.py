"""A mark is never lost: what Redis cannot take is spilled, and made once when Redis is back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.proxies import StallingProxy
from support.sample_entries import sample_entry
from support.servers import RealServer
from support.spilling import (
    AWAY_S,
    PATIENCE_S,
    is_locked,
    replay,
    replay_and_die,
    replay_in_time,
    spill,
    spill_and_die,
    spill_from_a_forked_child,
    spilled,
    start,
    until,
    until_none_is_spilled,
)

from gym_capture_redis.errors import (
    BackendUnavailableError,
    CorruptRecordError,
    InvalidIdentifierError,
    TokenCaptureRetiredError,
)
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.marks import read_lines
from gym_capture_redis.protocols import IncompleteCode, TokenCaptureSnapshot
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource
from gym_capture_redis.spill import SpillDirectory, TargetLock

DEFAULTS: dict[str, Any] = {"timeout_s": AWAY_S, "namespace": "run"}
MARKED = [(IncompleteCode.MARKED, "lost")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spill"


class Gate(StallingProxy):
    """A way to a server that goes on running while the way is shut."""

    is_shut = False

    def shut(self) -> None:
        self.is_shut = True
        for task in self._tasks:
            task.cancel()

    def open(self) -> None:
        self.is_shut = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_shut:
            writer.transport.abort()
        else:
            await super().serve(reader, writer)


@pytest.fixture
async def gate(valkey9: RealServer) -> AsyncIterator[Gate]:
    async with Gate(valkey9.socket_path) as made:
        yield made


def make_sink(url: str, directory: Path | None, **settings: Any) -> RedisTokenSink:
    return RedisTokenSink(url, spill_dir=directory, **DEFAULTS | settings)


def lose_patience(sink: RedisTokenSink) -> None:
    """From now on its calls end soon; what came before may take as long as a busy machine takes."""
    sink._executors.get()._timeout_s = AWAY_S


async def freeze(url: str, rollout: str = "r", namespace: str = "run") -> TokenCaptureSnapshot:
    async with RedisTokenSource(url, namespace=namespace, timeout_s=PATIENCE_S) as source:
        return await source.freeze(rollout)


def reasons(snapshot: TokenCaptureSnapshot) -> list[tuple[str, str]]:
    return [(reason.code, reason.model_call_id) for reason in snapshot.reasons]


async def came_back(server: RealServer) -> None:
    await asyncio.to_thread(server.start)


# Spilled, and made when the server is back


async def test_a_mark_that_met_no_server_is_made_by_the_same_sink_when_it_is_back(
    server: RealServer, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_sink(server.url, directory, timeout_s=PATIENCE_S) as sink:
        await sink.begin_call("r", "first")
        await sink.put(sample_entry("r", "first"))
    server.wait_until_written()
    server.kill()
    async with make_sink(server.url, directory) as sink:
        await sink.mark_incomplete("r", "lost")
        assert len(spilled(directory)) == 1
        assert any("Rollout r, model call 'lost'" in record.getMessage() for record in caplog.records)
        await came_back(server)
        await until_none_is_spilled(directory)
    assert reasons(await freeze(server.url)) == MARKED


async def test_a_mark_of_a_killed_process_is_made_by_the_next_one(
    server: RealServer, directory: Path
) -> None:
    server.kill()
    rollouts = [f"r{number}" for number in range(40)]
    with start(spill_and_die, server.url, directory, *rollouts) as worker:
        assert await asyncio.to_thread(worker.wait, PATIENCE_S) == -signal.SIGKILL
    (file,) = spilled(directory)
    assert len(read_lines(file.read_bytes())) == 40
    await came_back(server)
    await replay(server.url, directory, namespace="run")
    for rollout in rollouts:
        assert reasons(await freeze(server.url, rollout)) == MARKED


async def test_a_mark_that_the_server_made_unseen_moves_the_version_once(
    server: RealServer, directory: Path
) -> None:
    async with make_sink(server.url, directory, timeout_s=PATIENCE_S) as sink:
        await sink.begin_call("r", "lost")
        lose_patience(sink)
        server.pause()
        try:
            await sink.mark_incomplete("r", "lost")  # it is in the server's socket as well
        finally:
            server.resume()
        await until_none_is_spilled(directory)
    with server.client() as client:
        state: Any = client.hget(rollout_key("run", "r").decode(), "s")
    assert state.split()[3] == b"1"


async def test_a_mark_after_the_freeze_moves_the_version_once(gate: Gate, directory: Path) -> None:
    rollout = uuid.uuid4().hex
    async with make_sink(gate.url, directory, timeout_s=PATIENCE_S) as sink:
        await sink.mark_incomplete(rollout, "lost")
        before = await freeze(gate.url, rollout)
        lose_patience(sink)
        gate.shut()
        await sink.mark_incomplete(rollout, "lost")
        gate.open()
        await until_none_is_spilled(directory)
    after = await freeze(gate.url, rollout)
    assert (after.version, after.snapshot_id) == (before.version + 1, before.snapshot_id)
    assert reasons(after) == MARKED


# Exactly once in effect


async def test_two_processes_that_replay_at_once_move_each_version_once(
    server: RealServer, directory: Path
) -> None:
    server.kill()
    rollouts = [f"r{number}" for number in range(60)]
    for half in (rollouts[:30], rollouts[30:]):
        await spill(server.url, directory, *half, namespace="run")
    await came_back(server)
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(start(replay_in_time, server.url, directory)) for _ in range(2)]
        for worker in workers:
            assert worker.stdout is not None
            assert await asyncio.to_thread(worker.stdout.readline) == "ready\n"
        outcomes = [asyncio.to_thread(worker.communicate, "go\n", PATIENCE_S) for worker in workers]
        await asyncio.gather(*outcomes)
        assert [worker.returncode for worker in workers] == [0, 0]
    for rollout in rollouts:
        snapshot = await freeze(server.url, rollout)
        assert (reasons(snapshot), snapshot.version) == (MARKED, 2)  # the mark, and the freeze


async def test_even_without_the_lock_each_mark_is_made_once(
    server: RealServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.kill()
    rollouts = [f"r{number}" for number in range(30)]
    await spill(server.url, directory, *rollouts, namespace="run")
    await came_back(server)
    monkeypatch.setattr(TargetLock, "take", lambda _: True)
    await asyncio.gather(*(replay(server.url, directory, namespace="run") for _ in range(3)))
    for rollout in rollouts:
        assert (await freeze(server.url, rollout)).version == 2


async def test_a_process_killed_between_the_mark_and_its_removal_leaves_nothing_to_be_made_twice(
    server: RealServer, directory: Path
) -> None:
    server.kill()
    await spill(server.url, directory, "r", namespace="run")
    await came_back(server)
    with start(replay_and_die, server.url, directory) as worker:
        assert await asyncio.to_thread(worker.wait, PATIENCE_S) == -signal.SIGKILL
    assert len(spilled(directory)) == 1
    before = await freeze(server.url)
    await replay(server.url, directory, namespace="run")
    assert (reasons(before), await freeze(server.url)) == (MARKED, before)


# Only where it belongs


async def test_marks_of_another_namespace_or_server_are_left_alone(
    server: RealServer, directory: Path
) -> None:
    server.kill()
    await spill(server.url, directory, "r", namespace="other")
    await spill(server.tcp_url, directory, "r", namespace="run")
    await spill(f"{server.url}?db=1", directory, "r", namespace="run")
    await spill(server.url, directory, "r", namespace="run")
    others = {file.name: file.read_bytes() for file in spilled(directory) if b'"db": 1' in file.read_bytes()}
    assert (len(spilled(directory)), len(others)) == (4, 1)
    await came_back(server)
    async with make_sink(server.url, directory, timeout_s=PATIENCE_S) as sink:
        await sink.begin_call("another", "call")
        await until(lambda: len(spilled(directory)) < 4)
    assert len(spilled(directory)) == 3
    assert {file.name: file.read_bytes() for file in spilled(directory) if file.name in others} == others
    assert reasons(await freeze(server.url)) == MARKED
    assert not (await freeze(server.url, namespace="other")).incomplete
    assert not (await freeze(f"{server.url}?db=1")).incomplete
    await replay(server.url, directory.parent / "empty", namespace="other")  # nothing to wait for there
    assert len(spilled(directory)) == 3


async def test_a_rollout_retired_meanwhile_is_noted_and_not_touched(
    gate: Gate, valkey9: RealServer, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = uuid.uuid4().hex
    caplog.set_level(logging.INFO)
    async with (
        make_sink(gate.url, directory, timeout_s=PATIENCE_S) as sink,
        RedisTokenSource(valkey9.url, namespace="run") as source,
    ):
        await sink.begin_call(rollout, "lost")
        lose_patience(sink)
        gate.shut()
        await sink.mark_incomplete(rollout, "lost")
        await source.retire([rollout])
        gate.open()
        await until_none_is_spilled(directory)
        with pytest.raises(TokenCaptureRetiredError):
            await source.freeze(rollout)
    assert any(f"Rollout {rollout} was retired" in record.getMessage() for record in caplog.records)


async def test_an_id_used_again_is_noted_and_not_touched(
    gate: Gate, valkey9: RealServer, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = uuid.uuid4().hex
    caplog.set_level(logging.INFO)
    async with (
        make_sink(gate.url, directory, timeout_s=PATIENCE_S) as sink,
        RedisTokenSink(valkey9.url, namespace="run") as other,
        RedisTokenSource(valkey9.url, namespace="run") as source,
    ):
        await sink.begin_call(rollout, "lost")
        lose_patience(sink)
        gate.shut()
        await sink.mark_incomplete(rollout, "lost")
        await source.delete([rollout])
        await other.begin_call(rollout, "kept")
        await other.put(sample_entry(rollout, "kept"))
        gate.open()
        await until_none_is_spilled(directory)
        snapshot = await source.freeze(rollout)
    assert (snapshot.incomplete, len(snapshot.entries), snapshot.version) == (False, 1, 2)
    assert any("used again" in record.getMessage() for record in caplog.records)


async def test_a_server_that_forgot_the_attempt_is_told_of_the_lost_call_all_the_same(
    server: RealServer, directory: Path
) -> None:
    async with make_sink(server.url, directory, timeout_s=PATIENCE_S) as sink:
        await sink.begin_call("r", "lost")
        lose_patience(sink)
        server.kill()
        await sink.mark_incomplete("r", "lost")
    for file in (server.directory / "appendonlydir").iterdir():
        file.unlink()
    await came_back(server)
    async with make_sink(server.url, None, timeout_s=PATIENCE_S) as other:
        await other.begin_call("r", "kept")
        await other.put(sample_entry("r", "kept"))
    await replay(server.url, directory, namespace="run")
    assert reasons(await freeze(server.url)) == MARKED


async def test_a_worker_that_went_on_to_the_next_attempt_marks_that_one(gate: Gate, directory: Path) -> None:
    rollout = uuid.uuid4().hex
    async with (
        make_sink(gate.url, directory, timeout_s=PATIENCE_S) as sink,
        RedisTokenSource(gate.url, namespace="run") as source,
    ):
        await sink.begin_call(rollout, "lost")
        await source.delete([rollout])
        await sink.begin_call(rollout, "kept")
        await sink.put(sample_entry(rollout, "kept"))
        lose_patience(sink)
        gate.shut()
        await sink.mark_incomplete(rollout, "lost")
        gate.open()
        await until_none_is_spilled(directory)
    assert reasons(await freeze(gate.url, rollout)) == MARKED


# Damage


async def test_a_torn_last_line_is_dropped_and_all_before_it_are_made(
    server: RealServer, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    await spill(server.url, directory, "r", namespace="run")
    await spill(server.url, directory, "torn", namespace="run")
    whole, torn = sorted(spilled(directory), key=lambda file: b'"torn"' in file.read_bytes())
    whole.write_bytes(whole.read_bytes() + torn.read_bytes()[:-10])
    torn.unlink()
    await came_back(server)
    await replay(server.url, directory, namespace="run")
    assert reasons(await freeze(server.url)) == MARKED
    assert any("never finished" in record.getMessage() for record in caplog.records)
    assert [file.name for file in directory.iterdir()] == []  # noqa: ASYNC240


async def test_a_rollout_that_cannot_be_marked_keeps_no_other_from_being_marked(
    gate: Gate, valkey9: RealServer, directory: Path
) -> None:
    damaged, good = (uuid.uuid4().hex for _ in range(2))
    with valkey9.client() as client:
        client.set(rollout_key("run", damaged).decode(), "a string")
        async with make_sink(gate.url, directory, timeout_s=PATIENCE_S) as sink:
            await sink.mark_incomplete(damaged, "lost")
            gate.shut()
            await spill(gate.url, directory, good, namespace="run")
            gate.open()
            await until(lambda: len(spilled(directory)) == 1)
            assert reasons(await freeze(gate.url, good)) == MARKED
            client.unlink(rollout_key("run", damaged).decode())
            await until_none_is_spilled(directory)
    assert reasons(await freeze(gate.url, damaged)) == MARKED


# What cannot be spilled


async def test_without_a_directory_a_mark_that_fails_is_an_error_with_the_rollouts_id(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.shut()
    async with make_sink(gate.url, None) as sink:
        with pytest.raises(BackendUnavailableError):
            await sink.mark_incomplete("some-rollout", "lost")
    (record,) = caplog.records
    assert (record.levelno, "Rollout some-rollout" in record.getMessage()) == (logging.ERROR, True)


async def test_a_directory_that_cannot_be_used_is_told_at_once_and_a_mark_fails_with_its_own_error(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(__file__)
    async with make_sink(gate.url, directory, timeout_s=PATIENCE_S) as sink:
        await sink.begin_call(uuid.uuid4().hex, "call")
        await until(lambda: "NotADirectoryError" in caplog.text)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(f"The spill directory {directory} cannot be used")
    gate.shut()
    async with make_sink(gate.url, directory) as sink:
        with pytest.raises(BackendUnavailableError):
            await sink.mark_incomplete("some-rollout", "lost")
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "Rollout some-rollout" in errors[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path)]
    try:
        subprocess.run(mounting, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a small tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True)


async def test_a_full_disk_is_an_error_and_what_was_spilled_before_is_made(
    gate: Gate, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = small_disk / "spill"
    first, second = (uuid.uuid4().hex for _ in range(2))
    gate.shut()
    async with make_sink(gate.url, directory) as sink:
        await sink.mark_incomplete(first, "lost")
        with (small_disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(b"b")
        (file,) = spilled(directory)
        # More than fits into the rest of the file's last page. Those that come together share a fate.
        marks = [sink.mark_incomplete(second, f"{number}{'c' * 1000}") for number in range(8)]
        outcomes = await asyncio.gather(*marks, return_exceptions=True)
        failed = [outcome for outcome in outcomes if outcome is not None]
        assert failed
        assert all(isinstance(outcome, BackendUnavailableError) for outcome in failed)
        lines = read_lines(file.read_bytes())
        assert (len(lines), [line for line in lines if line.problem]) == (1 + 8 - len(failed), [])
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == len(failed)
        assert all(f"Rollout {second}" in error and "No space left" in error for error in errors)
        gate.open()
        await until_none_is_spilled(directory)
    assert reasons(await freeze(gate.url, first)) == MARKED


@pytest.mark.parametrize(("rollout", "call"), [("a/b", "call"), ("rollout", "\ud800")])
async def test_a_malformed_id_is_refused_and_not_spilled(
    gate: Gate, directory: Path, rollout: str, call: str
) -> None:
    async with make_sink(gate.url, directory) as sink:
        with pytest.raises(InvalidIdentifierError):
            await sink.mark_incomplete(rollout, call)
    assert spilled(directory) == []


async def test_a_retired_rollout_is_refused_and_not_spilled(gate: Gate, directory: Path) -> None:
    rollout = uuid.uuid4().hex
    async with (
        make_sink(gate.url, directory, timeout_s=PATIENCE_S) as sink,
        RedisTokenSource(gate.url, namespace="run") as source,
    ):
        await source.retire([rollout])
        with pytest.raises(TokenCaptureRetiredError):
            await sink.mark_incomplete(rollout, "lost")
    assert spilled(directory) == []


async def test_a_final_error_is_spilled_as_well(valkey9: RealServer, directory: Path) -> None:
    rollout = uuid.uuid4().hex
    with valkey9.client() as client:
        client.set(rollout_key("run", rollout).decode(), "a string")
    async with make_sink(valkey9.url, None) as sink:
        with pytest.raises(CorruptRecordError):
            await sink.mark_incomplete(rollout, "lost")
    await spill(valkey9.url, directory, rollout, namespace="run")
    assert len(spilled(directory)) == 1


# Callers that leave, clients that close


async def test_a_mark_whose_caller_leaves_is_spilled(gate: Gate, directory: Path) -> None:
    rollout = uuid.uuid4().hex
    gate.shut()
    async with make_sink(gate.url, directory, timeout_s=PATIENCE_S) as sink:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await sink.mark_incomplete(rollout, "lost")
        assert len(spilled(directory)) == 1
        gate.open()
        await until_none_is_spilled(directory)
    assert reasons(await freeze(gate.url, rollout)) == MARKED


async def test_a_mark_whose_caller_leaves_while_it_is_spilled_is_made(
    gate: Gate, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = uuid.uuid4().hex
    appending, go_on = threading.Event(), threading.Event()
    append = SpillDirectory.append

    def slow(self: SpillDirectory, marks: Any) -> None:
        appending.set()
        go_on.wait(PATIENCE_S)
        append(self, marks)

    monkeypatch.setattr(SpillDirectory, "append", slow)
    gate.shut()
    async with make_sink(gate.url, directory) as sink:
        marking = asyncio.create_task(sink.mark_incomplete(rollout, "lost"))
        assert await asyncio.to_thread(appending.wait, PATIENCE_S)
        marking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await marking
        gate.open()
        go_on.set()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(BackendUnavailableError):
                    if reasons(await freeze(gate.url, rollout)) == MARKED:
                        break
                await asyncio.sleep(0.005)


async def test_marks_that_wait_when_the_client_is_closed_are_spilled(gate: Gate, directory: Path) -> None:
    rollouts = [uuid.uuid4().hex for _ in range(5)]
    gate.shut()
    sink = make_sink(gate.url, directory, timeout_s=PATIENCE_S)
    marks = [asyncio.create_task(sink.mark_incomplete(rollout, "lost")) for rollout in rollouts]
    await asyncio.sleep(0)
    await sink.close()
    await asyncio.gather(*marks)
    gate.open()
    await replay(gate.url, directory, namespace="run")
    for rollout in rollouts:
        assert reasons(await freeze(gate.url, rollout)) == MARKED


async def test_closing_while_marks_are_made_lets_the_next_one_make_them(
    server: RealServer, directory: Path
) -> None:
    server.kill()
    await spill(server.url, directory, "r", namespace="run")
    await came_back(server)
    server.pause()
    try:
        sink = make_sink(server.url, directory, timeout_s=PATIENCE_S)
        marking = asyncio.create_task(sink.mark_incomplete("other", "lost"))
        await until(lambda: is_locked(directory))
        async with asyncio.timeout(PATIENCE_S):
            await sink.close()
            await marking
    finally:
        server.resume()
    assert len(spilled(directory)) == 2
    await replay(server.url, directory, namespace="run")
    assert reasons(await freeze(server.url)) == MARKED
    assert reasons(await freeze(server.url, "other")) == MARKED


# Loops, threads, processes


def test_one_sink_in_two_event_loops_spills_into_one_file_and_makes_all_marks(
    server: RealServer, directory: Path
) -> None:
    server.kill()
    sink = make_sink(server.url, directory)
    met = threading.Barrier(3)

    async def work(worker: str) -> None:
        await asyncio.gather(*(sink.mark_incomplete(f"{worker}.{number}", "lost") for number in range(20)))
        await asyncio.to_thread(met.wait, PATIENCE_S)
        await asyncio.to_thread(met.wait, PATIENCE_S)
        await until_none_is_spilled(directory)
        await sink.close()

    with ThreadPoolExecutor(2) as threads:
        working = [threads.submit(asyncio.run, work(worker)) for worker in "ab"]
        met.wait(PATIENCE_S)
        assert len(spilled(directory)) == 1
        server.start()
        met.wait(PATIENCE_S)
        for done in working:
            done.result()
    for rollout in (f"{worker}.{number}" for worker in "ab" for number in range(20)):
        snapshot = asyncio.run(freeze(server.url, rollout))
        assert (reasons(snapshot), snapshot.version) == (MARKED, 2)


async def test_a_busy_default_thread_pool_is_not_in_the_way(gate: Gate, directory: Path) -> None:
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(1)
    loop.set_default_executor(pool)
    busy = loop.run_in_executor(None, go_on.wait, PATIENCE_S)
    gate.shut()
    async with make_sink(gate.url, directory) as sink:
        await sink.mark_incomplete(uuid.uuid4().hex, "lost")
        assert len(spilled(directory)) == 1
        gate.open()
        await until_none_is_spilled(directory)
    assert not busy.done()
    go_on.set()
    await busy


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
async def test_a_forked_child_spills_into_a_file_of_its_own(server: RealServer, directory: Path) -> None:
    server.kill()
    with start(spill_from_a_forked_child, server.url, directory) as worker:
        said, _ = await asyncio.to_thread(worker.communicate, None, PATIENCE_S)
    assert (said, worker.returncode) == ("child exit 0\n", 0)
    found = [
        {line.mark.rollout_id.partition(".")[0] for line in read_lines(file.read_bytes()) if line.mark}
        for file in spilled(directory)
    ]
    assert sorted(found, key=len) == [{"child"}, {"before", "parent"}]
    await came_back(server)
    await replay(server.url, directory, namespace="run")
    for rollout in (f"{who}.{number}" for who in ("before", "parent", "child") for number in range(20)):
        assert reasons(await freeze(server.url, rollout)) == MARKED
