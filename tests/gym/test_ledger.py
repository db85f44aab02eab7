"""The ledger says what Gym's file ledger says, from any process, and hides nothing that was lost."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import json
import logging
import multiprocessing
import subprocess
import sys
import threading
import types
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("nemo_gym.token_id_capture.staging", reason="NeMo Gym stages externally from 0.7 on")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.backends import Place
from support.capture_ledger import (
    Staged,
    calls_in,
    chain,
    failures_in,
    file_ledger,
    record_from_a_process,
    staged,
)
from support.cluster import ClusterGroup
from support.conversations import gym, user
from support.damage import edits_of
from support.documents import DOCS, yaml_with
from support.forgetting import aof_size, come_back_empty, come_back_short, restart
from support.sample_entries import sample_entry
from support.sentinel import SentinelGroup
from support.servers import RealServer
from support.stored_state import read_state

import gym_capture_redis
from gym_capture_redis import (
    RedisCaptureLedger,
    RedisTokenSink,
    RedisTokenSource,
    executor,
    gym_compat,
    scripts,
)
from gym_capture_redis.errors import (
    BackendUnavailableError,
    CallConflictError,
    CaptureError,
    ConfigurationError,
    CorruptRecordError,
    InvalidIdentifierError,
    InvalidRecordError,
    RecordTooLargeError,
    TokenCaptureRetiredError,
    UnsupportedFormatError,
)
from gym_capture_redis.gym import ledger as ledger_module
from gym_capture_redis.gym.ledger_rows import DAMAGED_REASON, LOST_REASON
from gym_capture_redis.keys import ledger_key, rollout_key
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.subject import Subject

SETTLED_S = 0.001
"""Reading waits for nobody who may put something back."""

MIB = 2**20


class Run:
    """Any number of ledgers of one run, as workers have them."""

    def __init__(self, url: str, namespace: str, **settings: Any) -> None:
        self.url = url
        self.settings: dict[str, Any] = {"namespace": namespace, "settle_s": SETTLED_S} | settings
        self._ledgers: list[RedisCaptureLedger] = []

    def ledger(self, **settings: Any) -> RedisCaptureLedger:
        self._ledgers.append(RedisCaptureLedger(self.url, **self.settings | settings))
        return self._ledgers[-1]

    async def close(self) -> None:
        for ledger in self._ledgers:
            await ledger.close()


@pytest.fixture
async def run(place: Place, namespace: str) -> AsyncIterator[Run]:
    run = Run(place.url, namespace, durability=place.durability)
    yield run
    await run.close()


@pytest.fixture
async def valkey_run(valkey9: RealServer, namespace: str) -> AsyncIterator[Run]:
    run = Run(valkey9.url, namespace)
    yield run
    await run.close()


async def record_all(ledger: Any, calls: list[Staged]) -> None:
    for call in calls:
        await ledger.record(call.commit)


async def parent_of(ledger: Any, rollout: str, items: Any) -> str | None:
    match = (await ledger.resolve(rollout, items)).match
    return match.model_call_id if match is not None else None


# The same as Gym's


async def live_through(ledgers: list[Any], theirs: Any) -> None:
    """The whole life of a ledger, by several workers, beside Gym's."""
    one, two = ledgers
    assert await two.manifest("r") == await theirs.manifest("r")
    assert not await two.has_rows("r")
    calls = list(chain("r", 5))
    for number, call in enumerate(calls):
        worker, other = (one, two) if number % 2 else (two, one)
        assert await worker.resolve("r", call.request) == await theirs.resolve("r", call.request)
        await worker.record(call.commit)
        await theirs.record(call.commit)
        assert await other.resolve("r", call.next_request) == await theirs.resolve("r", call.next_request)
        assert await parent_of(other, "r", call.next_request) == call.call
        assert await other.has_rows("r")
    for reason in ("why", "why", "why else"):
        await one.record_failure("r", "lost", reason)
        await theirs.record_failure("r", "lost", reason)
    manifest = await two.manifest("r")
    assert manifest == await theirs.manifest("r")
    assert calls_in(manifest) == [call.call for call in calls]
    assert failures_in(manifest) == [("lost", "why"), ("lost", "why else")]

    exported = json.loads(json.dumps(await one.export_rows("r")))
    assert await two.delete(["r", "unknown", "r"]) == {"removed": ["r"], "absent": ["unknown"]}
    assert not await one.has_rows("r")
    assert await parent_of(one, "r", calls[-1].next_request) is None
    await one.import_rows(exported)
    await two.import_rows(exported)
    assert await one.manifest("r") == manifest
    assert await parent_of(one, "r", calls[-1].next_request) == calls[-1].call

    assert await two.retire(["r", "unknown"]) == {"removed": ["r"], "absent": ["unknown"]}
    with pytest.raises(TokenCaptureRetiredError):
        await one.manifest("r")


async def test_it_lives_as_gyms_file_ledger_does(run: Run, tmp_path: Path) -> None:
    await live_through([run.ledger(), run.ledger()], file_ledger(tmp_path))


async def test_it_does_so_behind_sentinels(
    sentinel_group: SentinelGroup, namespace: str, tmp_path: Path
) -> None:
    run = Run(sentinel_group.url, namespace)
    await live_through([run.ledger(), run.ledger()], file_ledger(tmp_path))
    await run.close()


async def test_it_does_so_in_a_cluster(cluster_group: ClusterGroup, namespace: str, tmp_path: Path) -> None:
    run = Run(cluster_group.url, namespace)
    await live_through([run.ledger(), run.ledger()], file_ledger(tmp_path))
    rollouts = [f"r{number}" for number in range(12)]
    one, two = run.ledger(), run.ledger()
    await asyncio.gather(*(one.record(staged(rollout, "call").commit) for rollout in rollouts))
    assert [calls_in(await two.manifest(rollout)) for rollout in rollouts] == [["call"]] * 12
    await run.close()


ROOT = staged("r", "root")
CHILD = staged("r", "child", parent=ROOT)
POOL = {
    "root": ROOT,
    "root with another digest": staged("r", "root", digest="0" * 64),
    "root of another context": staged("r", "other root", request=[user("another")], text="root answers"),
    "root again": staged("r", "root again", text="root answers"),
    "child": CHILD,
    "child with another chain": Staged(
        CHILD.request, CHILD.answer, CHILD.commit.model_copy(update={"staging_chain": ("r/child",)})
    ),
    "child admitted later": staged("r", "child", parent=ROOT, admitted_at=1.0),
    "child never admitted": staged("r", "child", parent=ROOT, admitted_at=None),
    "grandchild": staged("r", "grandchild", parent=CHILD),
    "of an older algorithm": staged("r", "old", request=[user("old")], fingerprint_version=1),
    "without fingerprints": staged("r", "bare", request=[user("bare")], fingerprint_version=0),
    "with fingerprints": staged("r", "full", output_fingerprint="a" * 64, continuation_fingerprint="b" * 64),
}
REQUESTS = {name: call.next_request for name, call in POOL.items()} | {
    "no history": [user("anew")],
    "nothing": [],
    "rewritten": [user("rewritten"), *ROOT.answer, user("go on")],
    "cut short": ROOT.answer,
}

operation = st.one_of(
    st.tuples(st.just("record"), st.sampled_from(sorted(POOL))),
    st.tuples(st.just("record"), st.sampled_from(sorted(POOL))),
    st.tuples(
        st.just("record_failure"),
        st.sampled_from(["root", "child", "never heard of", "é\n"]),
        st.sampled_from(["why", "why not", "line\nbreak", "ü"]),
    ),
    st.tuples(st.just("resolve"), st.sampled_from(sorted(REQUESTS))),
    st.tuples(st.just("manifest")),
    st.tuples(st.just("has_rows")),
)


async def outcome(ledger: Any, name: str, *args: str) -> Any:
    """What an operation gives: a value, or which kind of error."""
    try:
        if name == "record":
            return await ledger.record(POOL[args[0]].commit)
        if name == "resolve":
            return await ledger.resolve("r", REQUESTS[args[0]])
        return await getattr(ledger, name)("r", *args)
    except ValueError:
        return ValueError


@given(st.lists(st.tuples(st.integers(0, 1), operation), max_size=14))
@settings(max_examples=40)
def test_any_operations_of_two_workers_give_what_gyms_file_ledger_gives(
    valkey9: RealServer, operations: list[tuple[int, tuple[str, ...]]]
) -> None:
    async def main() -> None:
        run = Run(valkey9.url, f"test-{uuid.uuid4().hex[:12]}")
        ours = [run.ledger(), run.ledger()]
        with TemporaryDirectory() as root:
            theirs = [file_ledger(Path(root)), file_ledger(Path(root))]
            for worker, (name, *args) in operations:
                expected = await outcome(theirs[worker], name, *args)
                assert await outcome(ours[worker], name, *args) == expected, (name, args)
            for name in ("manifest", "has_rows"):
                assert await outcome(ours[0], name) == await outcome(theirs[0], name)
            for request in REQUESTS:
                assert await outcome(ours[1], "resolve", request) == await outcome(
                    theirs[1], "resolve", request
                )
        await ours[0].delete(["r"])
        await run.close()

    asyncio.run(main())


async def test_a_conflicting_repeat_is_refused_and_changes_nothing(run: Run) -> None:
    ledger = run.ledger()
    (call,) = chain("r", 1)
    await ledger.record(call.commit)
    before = await ledger.manifest("r")
    record = call.commit.record
    others: dict[str, Any] = {
        "digest": "0" * 64,
        "weight_version": 4,
        "response_id": "other",
        "admitted_at": 1_700_000_000.126,
        "output_fingerprint": "1" * 64,
        "staging_key": "other",
    }
    commits = [
        call.commit.model_copy(update={"record": record.model_copy(update={name: value})})
        for name, value in others.items()
    ]
    commits += [
        call.commit.model_copy(update={"record": record.model_copy(update={"delta_len": 11, "cum_len": 11})}),
        call.commit.model_copy(update={"staging_chain": ("r/other", "r/call-0")}),
        call.commit.model_copy(update={"request_items": [user("other")]}),
        call.commit.model_copy(update={"response_items": []}),
    ]
    for commit in commits:
        with pytest.raises(CallConflictError, match=r"conflicting row.*call 'call-0' of rollout r"):
            await run.ledger().record(commit)
    await ledger.record(call.commit)
    assert await ledger.manifest("r") == before


async def test_what_is_never_valid_is_refused_before_the_network() -> None:
    ledger = RedisCaptureLedger("redis://nowhere.invalid/0")
    (call,) = chain("r", 1)
    record = call.commit.record
    for update in ({"response_id": ""}, {"cum_len": 99}, {"admitted_at": float("nan")}, {"mode": "token_in"}):
        wrong = call.commit.model_copy(update={"record": record.model_copy(update=update)})
        with pytest.raises(InvalidRecordError):
            await ledger.record(wrong)
    for items in ({"request_items": ["text"]}, {"response_items": [{"role": "assistant", "content": 5}]}):
        with pytest.raises(InvalidRecordError):
            await ledger.record(call.commit.model_copy(update=items))
    with pytest.raises(RecordTooLargeError):
        await ledger.record(call.commit.model_copy(update={"staging_chain": ("x" * 5 * MIB,)}))
    with pytest.raises(InvalidRecordError):
        await ledger.record(object())
    for rollout in ("a/b", ""):
        for read in (ledger.manifest, ledger.has_rows, ledger.export_rows):
            with pytest.raises(InvalidIdentifierError):
                await read(rollout)
        with pytest.raises(InvalidIdentifierError):
            await ledger.resolve(rollout, [])
        with pytest.raises(InvalidIdentifierError):
            await ledger.record_failure(rollout, "call", "why")
        with pytest.raises(InvalidIdentifierError):
            await ledger.retire(["good", rollout])
    for call_id, reason in (
        ("", "why"),
        ("call", ""),
        ("call", "x" * 70_000),
        ("call", "\ud800"),
        ("x" * 2000, "x"),
    ):
        with pytest.raises(InvalidIdentifierError):
            await ledger.record_failure("r", call_id, reason)
    with pytest.raises(TypeError):
        await ledger.delete("r")


async def test_what_is_stored_is_what_the_page_on_the_wire_format_says(
    run: Run, place: Place, namespace: str
) -> None:
    ledger = run.ledger()
    first, second = chain("r", 2)
    await ledger.record(first.commit)
    await ledger.record_failure("r", "é", "why")
    await ledger.record(second.commit)
    await ledger.record_failure("r", "é", "line\nü")
    fields: Any = place.redis.hgetall(f"gymcap:{{{namespace}/r}}:ledger")
    state = read_state(place.redis, f"gymcap:{{{namespace}/r}}:ledger".encode())
    assert {name: state[name] for name in ("status", "seq", "records", "failures")} == {
        "status": b"open",
        "seq": b"4",
        "records": b"2",
        "failures": b"1",
    }
    assert len(fields) == 1 + 4 + 2 + 1
    failed = "x:é".encode()
    assert [fields[b"o:%d" % seq] for seq in range(1, 5)] == [
        b"0:r:call-0",
        b"0:" + failed,
        b"0:r:call-1",
        b"0:" + failed,
    ]
    assert fields[failed] == b'"why"\n"line\\n\\u00fc"'
    check, text = fields[b"r:call-1"][:16], fields[b"r:call-1"][16:]
    assert check == hashlib.blake2b(b'["r","call-1"]' + text, digest_size=16).digest()
    row = json.loads(text)
    assert text == json.dumps(row, sort_keys=True, separators=(",", ":")).encode()
    spoken = [*second.request, *second.answer]
    assert row == {
        "v": 1,
        "record": second.commit.record.model_dump(mode="json"),
        "staging_chain": ["r/call-0", "r/call-1"],
        "fingerprint": gym("fingerprint", "assistant_fingerprint")(spoken),
        "context_len": 3,
        "context_digest": gym("fingerprint", "conversation_digest")(second.request),
    }


async def dispatched(
    ledger: Any, call: str, items: Any, *, sink: Any = None, external_staging: bool = True
) -> Any:
    """What Gym's model server knows of a call of ``r`` when it sends it to the engine."""
    context = gym("sink", "CaptureContext")(
        rollout_id="r",
        model_call_id=call,
        token_sink=sink,
        lineage_store=ledger,
        external_staging=external_staging,
    )
    token = gym("sink", "set_token_sink")(context)
    try:
        await gym("sink", "resolve_parent")(items)
        await gym("sink", "register_call_intent")()
    finally:
        gym("sink", "reset_token_sink")(token)
    return context


async def admitted(ledger: Any, call: str, items: Any) -> Any:
    """What Gym's capture lets a worker do with a request, by what this ledger says."""
    return (await dispatched(ledger, call, items)).capture_admission


async def test_gym_admits_calls_by_it(run: Run) -> None:
    ledger = run.ledger()
    first, second = chain("r", 2)
    seeded = [user("task"), *second.answer, user("go on")]
    root = await admitted(ledger, "call-0", first.request)
    assert (root.mode, root.parent_call_id) == ("text", None)
    assert (await admitted(ledger, "call-0", seeded)).mode == "text", "nothing was captured before it"
    await ledger.record(first.commit)
    child = await admitted(run.ledger(), "call-1", second.request)
    assert (child.mode, child.parent_call_id, child.prev_len) == ("token_in", "call-0", 10)
    assert (child.staging_chain, child.parent_chain_hash) == (
        ["r/call-0"],
        first.commit.record.chain_hash,
    )
    assert not failures_in(await ledger.manifest("r"))
    assert await admitted(run.ledger(), "call-2", seeded) is None
    assert failures_in(await ledger.manifest("r")) == [("call-2", "unresolved_parent")]
    await ledger.retire(["r"])
    with pytest.raises(RuntimeError, match="lineage resolution failed"):
        await admitted(ledger, "call-3", second.request)


# What it costs


class Watched:
    """Notes the steps of a ledger, and what they were answered."""

    def __init__(self, ledger: RedisCaptureLedger) -> None:
        self.replies: list[tuple[Call, Reply]] = []
        executor = ledger._executors.get()
        run = executor.run

        async def watched(call: Call, subject: Subject, **kwargs: Any) -> Reply:
            reply = await run(call, subject, **kwargs)
            self.replies.append((call, reply))
            return reply

        executor.run = watched  # type: ignore[method-assign]

    def moved(self) -> tuple[int, int]:
        """How many round trips and rows since the last time."""
        taken, self.replies = self.replies, []
        return len(taken), sum(len(reply.rest[2]) for call, reply in taken if call.step is Step.ROWS)


async def test_a_worker_that_knows_the_rollout_moves_only_new_rows(valkey_run: Run) -> None:
    writer, reader = valkey_run.ledger(), valkey_run.ledger()
    watched = Watched(reader)
    calls = list(chain("r", 40))
    for call in calls:
        await writer.record(call.commit)
        assert await parent_of(reader, "r", call.next_request) == call.call
        assert watched.moved() == (1, 1)
    assert await parent_of(reader, "r", calls[7].next_request) == "call-7"
    assert watched.moved() == (1, 0)
    assert not await parent_of(reader, "r", [user("x"), *calls[7].answer])
    assert await reader.has_rows("r")
    assert watched.moved() == (2, 0)
    cold = valkey_run.ledger()
    watched = Watched(cold)
    assert await parent_of(cold, "r", calls[-1].next_request) == "call-39"
    assert watched.moved() == (1, 40)


async def test_a_long_ledger_is_read_in_pages(valkey_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_PAGE_BYTES", 5_000)
    monkeypatch.setattr(ledger_module, "_NEWS_BYTES", 5_000)
    ledger = valkey_run.ledger()
    calls = list(chain("r", 20))
    for call in calls:
        await ledger.record(call.commit)
        await ledger.record_failure("r", "lost", f"after {call.call}")
    cold = valkey_run.ledger()
    watched = Watched(cold)
    assert await parent_of(cold, "r", calls[3].next_request) == "call-3"
    trips, rows = watched.moved()
    assert trips > 3
    assert rows == 40
    manifest = await cold.manifest("r")
    assert calls_in(manifest) == [call.call for call in calls]
    assert failures_in(manifest) == [("lost", f"after {call.call}") for call in calls]


async def test_what_is_remembered_is_bounded(valkey_run: Run) -> None:
    ledger = valkey_run.ledger(max_cached_rollouts=2)
    for number in range(5):
        call = staged(f"r{number}", "call")
        await ledger.record(call.commit)
        assert await parent_of(ledger, f"r{number}", call.next_request) == "call"
    assert list(ledger._known) == ["r3", "r4"]


# Retirement and attempts


async def test_after_retirement_reads_raise_and_late_writes_are_dropped_with_a_warning(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    worker, trainer = run.ledger(), run.ledger()
    first, second = chain("r", 2)
    await worker.record(first.commit)
    await trainer.retire(["r"])
    for ledger in (worker, trainer, run.ledger()):
        for read in (ledger.manifest, ledger.has_rows, ledger.export_rows):
            with pytest.raises(TokenCaptureRetiredError, match="rollout r"):
                await read("r")
        for items in (first.request, second.request):
            with pytest.raises(TokenCaptureRetiredError, match="rollout r"):
                await ledger.resolve("r", items)
        caplog.clear()
        await ledger.record(second.commit)
        await ledger.record(first.commit)
        await ledger.record_failure("r", "call-2", "why")
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(said) == 3
        for message, key in zip(said, ("r/call-1", "r/call-0", "r/call-2"), strict=True):
            assert f"'{key}'" in message
            assert "rollout r" in message.lower()
    assert await trainer.retire(["r"]) == {"removed": [], "absent": ["r"]}
    assert await trainer.delete(["r"]) == {"removed": [], "absent": ["r"]}
    assert not await worker.has_rows("r")


async def test_a_rollout_that_was_never_heard_of_is_fenced_too_and_a_tombstone_expires(
    run: Run, place: Place, namespace: str
) -> None:
    ledger = run.ledger(tombstone_ttl_s=60)
    await ledger.retire(["r"])
    await ledger.record(staged("r", "call").commit)
    with pytest.raises(TokenCaptureRetiredError):
        await ledger.has_rows("r")
    left_s: Any = place.redis.ttl(ledger_key(namespace, "r"))
    assert 0 < left_s <= 60


async def test_the_next_attempt_under_an_id_knows_nothing_of_the_last(run: Run) -> None:
    one, two = run.ledger(), run.ledger()
    for attempt in ("a", "b"):
        calls = list(chain("r", 3, attempt))
        await record_all(one, calls)
        assert await parent_of(two, "r", calls[-1].next_request) == f"{attempt}-2"
        assert calls_in(await two.manifest("r")) == [call.call for call in calls]
        await two.delete(["r"])
        assert await parent_of(one, "r", calls[-1].next_request) is None


async def test_a_copy_that_arrives_after_the_attempt_touches_no_other(run: Run) -> None:
    ledger = run.ledger()
    watched = Watched(ledger)
    await ledger.record(staged("r", "first").commit)
    await ledger.record(staged("r", "second", request=[user("second")]).commit)
    copies = [call for call, _ in watched.replies if call.step is Step.RECORD]
    assert len(copies) == 2
    await ledger.delete(["r"])
    for begun_again in (False, True):
        if begun_again:
            await ledger.record(staged("r", "third").commit)
        for copy in copies:
            executor = ledger._executors.get()
            reply = await executor.run(copy, Subject("r"), deadline=executor.deadline())
            assert reply.code == "CHANGED"
        assert calls_in(await ledger.manifest("r")) == ["third"] * begun_again


def test_a_failure_that_is_sent_again_brings_another_name() -> None:
    sent = scripts.fail(b"key", "call", b'"why"', new_incarnation="a" * 32, incarnation="")
    repeated = scripts.again(sent)
    assert repeated.args[0] != sent.args[0]
    assert repeated.args[1:] == sent.args[1:]


# Beside sinks


async def test_a_ledger_and_a_sink_in_one_namespace_never_meet(
    run: Run, place: Place, namespace: str
) -> None:
    ledger = run.ledger()
    options: Any = {"namespace": namespace, "durability": place.durability}
    sink = RedisTokenSink(place.url, **options)
    source = RedisTokenSource(place.url, **options, settle_s=SETTLED_S)
    await sink.put(sample_entry("r", "entry"))
    await ledger.record(staged("r", "row").commit)
    await sink.mark_incomplete("r", "entry")
    assert calls_in(await ledger.manifest("r")) == ["row"]
    assert failures_in(await ledger.manifest("r")) == []
    snapshot = await source.freeze("r")
    assert [entry.model_call_id for entry in snapshot.entries] == ["entry"]
    await source.retire(["r"])
    assert await ledger.has_rows("r")
    await source.delete(["r"])
    await ledger.retire(["r"])
    assert not (await source.freeze("r")).entries
    assert ledger_key(namespace, "r").startswith(rollout_key(namespace, "r"))
    await sink.close()
    await source.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [message for message in told if "a sink of this process is told too" in message]


@pytest.fixture
async def beside(
    valkey_run: Run, no_other_sinks: None
) -> AsyncIterator[tuple[RedisTokenSink, RedisTokenSource]]:
    """A sink of another namespace than the ledgers', and what reads there."""
    del no_other_sinks
    sink = RedisTokenSink(valkey_run.url, namespace="beside")
    source = RedisTokenSource(valkey_run.url, namespace="beside", settle_s=SETTLED_S)
    await source.delete(["r", "other"])
    yield sink, source
    await sink.close()
    await source.close()


async def test_a_sink_beside_external_staging_is_noticed_since_gym_announces_every_call_to_it(
    valkey_run: Run, beside: tuple[RedisTokenSink, RedisTokenSource], caplog: pytest.LogCaptureFixture
) -> None:
    sink, source = beside
    block = {
        "enabled": True,
        "sink": "gym_capture_redis:RedisTokenSink",
        "lineage_store": "gym_capture_redis:RedisCaptureLedger",
        "external_staging": True,
        "rebuild_response": False,
    }
    gym("config", "TokenIdCaptureConfig").model_validate({"token_id_capture": block})  # it finds no fault
    ledger = valkey_run.ledger()
    first, second = chain("r", 2)
    for turn in (first, second):
        context = await dispatched(ledger, turn.call, turn.request, sink=sink)
        assert context.capture_admission is not None
        assert len(warnings_of(caplog)) == (turn is second), "at the first call that was made, and once"
        await ledger.record(turn.commit)
    await ledger.record_failure("r", "call-2", "gone")
    (warning,) = warnings_of(caplog)
    assert repr(ledger) in warning
    assert "'beside'" in warning
    assert "leave out token_id_capture.sink" in warning
    assert calls_in(await ledger.manifest("r")) == ["call-0", "call-1"]
    snapshot = await source.freeze("r")
    assert (snapshot.incomplete, snapshot.entries) == (True, ())


async def test_a_ledger_in_place_of_a_lineage_store_is_noticed_since_it_finds_no_parent(
    valkey_run: Run, beside: tuple[RedisTokenSink, RedisTokenSource], caplog: pytest.LogCaptureFixture
) -> None:
    sink, _ = beside
    ledger = valkey_run.ledger()
    first, second, third = chain("r", 3)
    await dispatched(ledger, first.call, first.request, sink=sink, external_staging=False)
    assert not warnings_of(caplog)
    for turn in (second, third):
        context = await dispatched(ledger, turn.call, turn.request, sink=sink, external_staging=False)
        assert context.parent_resolution.reason == "no_match"
    (warning,) = warnings_of(caplog)
    assert "make RedisLineageStore the lineage_store" in warning


@pytest.mark.parametrize("write", ["record", "record_failure"])
async def test_the_first_row_of_a_worker_shows_it_too(
    valkey_run: Run,
    beside: tuple[RedisTokenSink, RedisTokenSource],
    caplog: pytest.LogCaptureFixture,
    write: str,
) -> None:
    sink, _ = beside
    ledger = valkey_run.ledger()
    call = staged("r", "call-0")
    await dispatched(ledger, call.call, call.request, sink=sink)
    if write == "record":
        await ledger.record(call.commit)
    else:
        await ledger.record_failure("r", call.call, "gone")
    assert len(warnings_of(caplog)) == 1


async def test_a_sink_for_other_rollouts_or_for_what_only_the_framework_asks_is_nothing_wrong(
    valkey_run: Run, beside: tuple[RedisTokenSink, RedisTokenSource], caplog: pytest.LogCaptureFixture
) -> None:
    sink, _ = beside
    ledger = valkey_run.ledger()
    (call,) = chain("r", 1)
    await sink.begin_call("other", call.call)
    await dispatched(ledger, call.call, call.request)
    await ledger.record(call.commit)
    assert (await ledger.resolve("r", call.next_request)).match is not None
    await sink.begin_call("r", call.call)
    exported = await ledger.export_rows("r")
    await ledger.import_rows(exported)
    assert calls_in(await ledger.manifest("r")) == [call.call]
    assert await ledger.has_rows("r")
    await ledger.retire(["r"])
    await ledger.delete(["r"])
    assert not warnings_of(caplog)


def test_a_ledger_is_no_sink_and_gym_says_so() -> None:
    ledger: Any = RedisCaptureLedger("redis://nowhere.invalid/0")
    assert not isinstance(ledger, gym("protocols", "TokenSink"))
    for install in (gym("protocols", "install_token_sink"), gym_capture_redis.install_token_sink):
        with pytest.raises(TypeError, match="lacks required methods: put, mark_incomplete"):
            install(ledger)


def test_a_lineage_store_is_no_ledger_which_gym_asks_for_with_external_staging() -> None:
    store = gym_capture_redis.RedisLineageStore("redis://nowhere.invalid/0")
    assert not isinstance(store, gym("protocols", "CaptureLedger"))


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="Gym builds the classes of its YAML on Python 3.12 and newer"
)
def test_gyms_configuration_refuses_it_as_a_sink_by_name() -> None:
    block = {"enabled": True, "sink": "gym_capture_redis:RedisCaptureLedger", "lineage_store": "x:y"}
    config = gym("config", "TokenIdCaptureConfig").model_validate({"token_id_capture": block})
    with pytest.raises(ValueError, match="does not satisfy TokenSink: mark_incomplete, put"):
        config.build_sink()


# Checkpoints


async def test_a_checkpoint_goes_to_another_server_and_is_put_there_once(
    valkey_run: Run, redis7: RealServer, namespace: str
) -> None:
    ours = valkey_run.ledger()
    calls = list(chain("r", 3))
    await record_all(ours, calls)
    await ours.record_failure("r", "call-1", "too late")
    await ours.record_failure("r", "gone", "why")
    exported = await ours.export_rows("r")
    assert json.loads(json.dumps(exported)) == exported
    there = Run(redis7.url, namespace)
    theirs = there.ledger()
    await theirs.record(calls[0].commit)
    for _ in range(2):
        await theirs.import_rows(exported)
        assert await theirs.manifest("r") == await ours.manifest("r")
    assert (await theirs.export_rows("r"))["rows"][:3] == exported["rows"][:3]
    await there.close()


@pytest.mark.parametrize("there", ["another row", "a failure"])
async def test_a_checkpoint_that_contradicts_what_is_there_is_refused_whole(run: Run, there: str) -> None:
    ours, theirs = run.ledger(), run.ledger(namespace="elsewhere")
    calls = list(chain("r", 3))
    await record_all(ours, calls)
    if there == "another row":
        await theirs.record(staged("r", "call-2", text="another", request=[user("x")]).commit)
    else:
        await theirs.record_failure("r", "call-2", "why")
    before = await theirs.manifest("r")
    with pytest.raises(CallConflictError, match="call 'call-2' of rollout r"):
        await theirs.import_rows(await ours.export_rows("r"))
    assert await theirs.manifest("r") == before
    await theirs.delete(["r"])


async def test_no_checkpoint_is_read_for_another_thing(run: Run) -> None:
    ledger = run.ledger()
    await record_all(ledger, list(chain("r", 2)))
    good = await ledger.export_rows("r")
    await ledger.delete(["r"])
    row = good["rows"][1]
    wrong: list[tuple[Any, type[Exception]]] = [
        (None, InvalidRecordError),
        ({}, InvalidRecordError),
        (good | {"format": 2}, UnsupportedFormatError),
        (good | {"rollout_id": "a/b"}, InvalidIdentifierError),
        (good | {"rows": [*good["rows"], {}]}, InvalidRecordError),
        (good | {"rows": [row | {"context_len": -1}]}, InvalidRecordError),
        (good | {"rows": [row | {"record": row["record"] | {"cum_len": 5}}]}, InvalidRecordError),
        (good | {"rows": [{"model_call_id": "x", "failure_reason": ""}]}, InvalidIdentifierError),
    ]
    for data, error in wrong:
        with pytest.raises(error):
            await ledger.import_rows(data)
        assert not await ledger.has_rows("r")
    await ledger.retire(["r"])
    with pytest.raises(TokenCaptureRetiredError):
        await ledger.import_rows(good)


# Several of them


async def test_workers_that_write_at_once_lose_nothing_and_agree(valkey_run: Run) -> None:
    ledgers = [valkey_run.ledger() for _ in range(4)]
    conversations = [list(chain("r", 8, f"w{number}")) for number in range(8)]

    async def one(number: int) -> None:
        for call in conversations[number]:
            await ledgers[number % 4].record(call.commit)
            assert await parent_of(ledgers[(number + 1) % 4], "r", call.next_request) == call.call

    await asyncio.gather(*(one(number) for number in range(8)))
    manifests = [await ledger.manifest("r") for ledger in ledgers]
    assert manifests[1:] == manifests[:-1]
    written = calls_in(manifests[0])
    assert sorted(written) == sorted(call.call for calls in conversations for call in calls)
    for calls in conversations:
        names = [call.call for call in calls]
        assert [name for name in written if name in names] == names, "commit order"


async def test_of_two_rows_for_one_call_at_once_one_is_refused(valkey_run: Run) -> None:
    for number in range(10):
        rollout = f"r{number}"
        rivals = [staged(rollout, "call", text=text) for text in "ab"]
        ledgers = [valkey_run.ledger(), valkey_run.ledger()]
        ended = await asyncio.gather(
            *(ledger.record(rival.commit) for ledger, rival in zip(ledgers, rivals, strict=True)),
            return_exceptions=True,
        )
        assert sorted(type(end).__name__ for end in ended) == ["CallConflictError", "NoneType"]
        winner = rivals[ended.index(None)]
        assert await parent_of(ledgers[0], rollout, winner.next_request) == "call"


def test_one_ledger_serves_threads_each_with_a_loop_of_its_own(valkey9: RealServer, namespace: str) -> None:
    ledger = RedisCaptureLedger(valkey9.url, namespace=namespace, settle_s=SETTLED_S)

    async def work(number: int) -> None:
        for call in chain("r", 6, f"t{number}"):
            await ledger.record(call.commit)
            assert await parent_of(ledger, "r", call.next_request) == call.call
        await ledger.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda number: asyncio.run(work(number)), range(6)))
    assert len(calls_in(asyncio.run(ledger.manifest("r")))) == 36


def test_spawned_processes_build_their_ledgers_and_write_one_rollout(
    valkey9: RealServer, namespace: str
) -> None:
    make = functools.partial(RedisCaptureLedger, valkey9.url, namespace=namespace, settle_s=SETTLED_S)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        work = [(make, "r", f"p{number}", 5) for number in range(4)]
        pids = pool.starmap(record_from_a_process, work, chunksize=1)
    assert pids
    manifest = asyncio.run(make().manifest("r"))
    expected = ["shared", *(f"p{number}-{turn}" for number in range(4) for turn in range(5))]
    assert sorted(calls_in(manifest)) == sorted(expected)
    assert sorted(failures_in(manifest)) == [(f"p{number}-lost", "gone") for number in range(4)]


# Servers that are away, full, or forget


async def test_every_call_ends_by_its_deadline_when_the_server_is_silent(
    one_server: RealServer, namespace: str
) -> None:
    run = Run(one_server.url, namespace)
    first, second = chain("r", 2)
    ledger = run.ledger(timeout_s=0.5)
    await ledger.record(first.commit)
    exported = await ledger.export_rows("r")
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: ledger.resolve("r", second.request),
        lambda: ledger.record(second.commit),
        lambda: ledger.record_failure("r", "x", "why"),
        lambda: ledger.manifest("r"),
        lambda: ledger.has_rows("r"),
        lambda: ledger.retire(["r"]),
        lambda: ledger.delete(["r"]),
        lambda: ledger.import_rows(exported),
    ]
    one_server.pause()
    try:
        for call in calls:
            async with asyncio.timeout(15):
                with pytest.raises(BackendUnavailableError, match=r"within 0\.5 s.*rollout r"):
                    await call()
    finally:
        one_server.resume()
    await run.close()


@pytest.mark.parametrize("what", ["a row", "a failure"])
async def test_a_caller_that_leaves_does_not_stop_what_is_written(
    one_server: RealServer, namespace: str, what: str
) -> None:
    run = Run(one_server.url, namespace)
    ledger = run.ledger()
    first, second = chain("r", 2)
    await ledger.record(first.commit)
    one_server.pause()
    step = ledger.record(second.commit) if what == "a row" else ledger.record_failure("r", "call-1", "why")
    caller = asyncio.create_task(step)
    await asyncio.sleep(0)
    assert not caller.done()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    one_server.resume()
    await ledger.close()
    manifest = await run.ledger().manifest("r")
    assert [*calls_in(manifest), *failures_in(manifest)] == [
        "call-0",
        "call-1" if what == "a row" else ("call-1", "why"),
    ]
    await run.close()


async def test_what_fails_after_its_caller_has_left_is_logged(
    one_server: RealServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(one_server.url, namespace)
    ledger = run.ledger(timeout_s=0.3)
    await ledger.has_rows("r")
    one_server.pause()
    try:
        caller = asyncio.create_task(ledger.record_failure("r", "call", "why"))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(*ledger._writing, return_exceptions=True)
    finally:
        one_server.resume()
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "caller had left was not written" in message
    assert "call 'call' of rollout r" in message
    await run.close()


async def test_what_this_process_deleted_is_not_taken_for_lost(one_server: RealServer) -> None:
    run = Run(one_server.url, "run")
    ledger = run.ledger()
    await record_all(ledger, list(chain("r", 2)))
    await asyncio.sleep(2 * SETTLED_S)
    await ledger.delete(["r"])
    await asyncio.to_thread(restart, one_server)
    assert not await ledger.has_rows("r")
    assert not failures_in(await ledger.manifest("r"))
    await run.close()


async def test_at_the_memory_limit_rows_are_refused_and_failures_are_not(
    server: RealServer, namespace: str
) -> None:
    run = Run(server.url, namespace)
    ledger = run.ledger()
    first, second = chain("r", 2)
    await ledger.record(first.commit)
    before = await ledger.manifest("r")
    with server.client() as client:
        client.config_set("maxmemory", 1)
        for commit in (second.commit, staged("new", "call").commit):
            with pytest.raises(BackendUnavailableError, match=r"out of memory.*nothing was stored"):
                await ledger.record(commit)
        assert await ledger.manifest("r") == before
        assert await parent_of(ledger, "r", first.next_request) == "call-0"
        await ledger.record_failure("r", "call-1", "no room")
        await ledger.record_failure("new", "call", "no room")
        assert await ledger.retire(["new"]) == {"removed": ["new"], "absent": []}
        client.config_set("maxmemory", 0)
    manifest = await ledger.manifest("r")
    assert calls_in(manifest) == ["call-0"]
    assert failures_in(manifest) == [("call-1", "no room")]
    await run.close()


async def test_rows_that_the_server_forgot_are_put_back_in_their_order(server: RealServer) -> None:
    run = Run(server.url, "run", settle_s=2.0)
    ledger = run.ledger()
    calls = list(chain("r", 4))
    await record_all(ledger, calls[:2])
    size = aof_size(server)
    await record_all(ledger, calls[2:])
    await ledger.record_failure("r", "lost", "why")
    before = await ledger.manifest("r")
    await asyncio.to_thread(come_back_short, server, size)
    # An idle worker puts them back while whoever reads waits.
    assert await run.ledger().manifest("r") == before
    assert calls_in(before) == [call.call for call in calls]
    await run.close()


async def test_a_failover_behind_sentinels_loses_no_row_that_its_replica_has(
    sentinel_group: SentinelGroup, namespace: str
) -> None:
    run = Run(sentinel_group.url, namespace, replicas=1)
    one, two = run.ledger(), run.ledger()
    calls = list(chain("r", 4))
    await record_all(one, calls[:2])
    assert await parent_of(two, "r", calls[1].next_request) == "call-1"
    await asyncio.to_thread(sentinel_group.switch_over)
    await two.record(calls[2].commit)
    assert await parent_of(one, "r", calls[2].next_request) == "call-2"
    await one.record(calls[3].commit)
    manifest = await run.ledger().manifest("r")
    assert calls_in(manifest) == [call.call for call in calls]
    assert not failures_in(manifest)
    await run.close()


async def test_a_restart_that_loses_nothing_changes_nothing(server: RealServer) -> None:
    run = Run(server.url, "run")
    ledger = run.ledger()
    calls = list(chain("r", 4))
    await record_all(ledger, calls[:3])
    await ledger.record_failure("r", "lost", "why")
    before = await ledger.manifest("r")
    await asyncio.to_thread(restart, server)
    assert await ledger.manifest("r") == before
    await ledger.record(calls[3].commit)
    assert await parent_of(ledger, "r", calls[3].next_request) == "call-3"
    assert failures_in(await ledger.manifest("r")) == [("lost", "why")]
    await run.close()


@pytest.mark.parametrize("long_ago", [False, True])
@pytest.mark.parametrize("then", ["record", "record_failure", "manifest", "has_rows", "resolve"])
async def test_a_server_that_comes_back_empty_makes_nothing_look_whole_or_new(
    one_server: RealServer, then: str, *, long_ago: bool
) -> None:
    run = Run(one_server.url, "run")
    ledger = run.ledger()
    first, second, third = chain("r", 3)
    await record_all(ledger, [first, second])
    if long_ago:
        await asyncio.sleep(2 * SETTLED_S)
        await ledger.has_rows("other")  # an answer that is later than settle_s
    await asyncio.to_thread(come_back_empty, one_server)
    steps: dict[str, Callable[[], Awaitable[Any]]] = {
        "record": lambda: ledger.record(third.commit),
        "record_failure": lambda: ledger.record_failure("r", "x", "why"),
        "manifest": lambda: ledger.manifest("r"),
        "has_rows": lambda: ledger.has_rows("r"),
        "resolve": lambda: ledger.resolve("r", third.request),
    }
    told = await steps[then]()
    if then == "has_rows":
        assert told, "or Gym would take a continuation for a root"
    assert LOST_REASON in {reason for _, reason in failures_in(await run.ledger().manifest("r"))}
    assert await run.ledger().has_rows("r")
    await run.close()


async def test_a_row_that_comes_after_the_loss_of_all_others_does_not_expire(one_server: RealServer) -> None:
    """The mark of what was lost stays for a day only, until somebody speaks of the rollout."""
    run = Run(one_server.url, "run")
    ledger = run.ledger()
    first, second = chain("r", 2)
    await ledger.record(first.commit)
    await asyncio.to_thread(come_back_empty, one_server)
    await ledger.has_rows("r")
    with one_server.client() as client:
        key = ledger_key("run", "r").decode()
        assert client.ttl(key) > 0
        await ledger.record(second.commit)
        assert client.ttl(key) == -1
    await run.close()


async def test_rows_that_nobody_keeps_are_noticed_by_their_numbers(server: RealServer) -> None:
    run = Run(server.url, "run", max_recent_bytes=0)
    ledger = run.ledger()
    calls = list(chain("r", 4))
    await ledger.record(calls[0].commit)
    size = aof_size(server)
    await record_all(ledger, calls[1:3])
    assert await parent_of(ledger, "r", calls[1].next_request) == "call-1"
    await asyncio.to_thread(come_back_short, server, size)
    await ledger.record(calls[3].commit)
    manifest = await run.ledger().manifest("r")
    assert calls_in(manifest) == ["call-0", "call-3"]
    assert failures_in(manifest) == [("row-2", LOST_REASON), ("row-3", LOST_REASON)]
    assert await parent_of(ledger, "r", calls[1].next_request) is None
    await run.close()


async def test_a_worker_whose_number_went_to_another_says_so(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first worker would claim its number if it noticed before the other one comes.
    monkeypatch.setattr(executor, "watch_s", lambda _: 3600.0)
    run = Run(server.url, "run", max_recent_bytes=0)
    one, two = run.ledger(), run.ledger()
    calls = list(chain("r", 3))
    await one.record(calls[0].commit)
    size = aof_size(server)
    await one.record(calls[1].commit)
    await asyncio.to_thread(come_back_short, server, size)
    await two.record(calls[2].commit)
    assert not failures_in(await two.manifest("r"))
    manifest = await one.manifest("r")
    assert calls_in(manifest) == ["call-0", "call-2"]
    assert failures_in(manifest) == [("unknown", LOST_REASON)]
    await run.close()


async def test_a_worker_that_has_only_read_says_what_is_missing(server: RealServer) -> None:
    run = Run(server.url, "run", max_recent_bytes=0)
    writer, reader = run.ledger(), run.ledger()
    calls = list(chain("r", 2))
    await writer.record(calls[0].commit)
    size = aof_size(server)
    await writer.record(calls[1].commit)
    assert len(calls_in(await reader.manifest("r"))) == 2
    await writer.close()
    await asyncio.to_thread(come_back_short, server, size)
    assert LOST_REASON in {reason for _, reason in failures_in(await reader.manifest("r"))}
    await run.close()


# Damage


async def test_no_damage_to_a_field_makes_another_ledger_of_it(valkey9: RealServer, namespace: str) -> None:
    run = Run(valkey9.url, namespace)
    ledger = run.ledger()
    calls = list(chain("r", 2))
    await ledger.record(calls[0].commit)
    await ledger.record_failure("r", "lost", "why")
    await ledger.record(calls[1].commit)
    key = ledger_key(namespace, "r")
    whole = await ledger.manifest("r")
    with valkey9.client() as client:
        fields: Any = client.hgetall(key)
        for field, value in fields.items():
            for edit in edits_of(field, value):
                edit.apply(client, key)
                assert await is_noticed_or_harmless(run, whole), edit
                client.delete(key)
                client.hset(key, mapping=fields)
    assert await ledger.manifest("r") == whole
    await run.close()


async def is_noticed_or_harmless(run: Run, whole: dict[str, Any]) -> bool:
    """Whether a damaged ledger is refused, has failures that say so, or says the same as before."""
    cold = run.ledger()
    try:
        manifest = await cold.manifest("r")
    except CaptureError:
        return True
    finally:
        await cold.close()
    if manifest == whole:
        return True
    assert all(record in whole["records"] for record in manifest["records"])
    return bool(manifest["failures"])


async def test_a_damaged_row_is_a_failure_and_no_parent(run: Run, place: Place, namespace: str) -> None:
    first, second = chain("r", 2)
    await record_all(run.ledger(), [first, second])
    key = ledger_key(namespace, "r")
    stored: Any = place.redis.hget(key, "r:call-0")
    for damaged in (b"", stored[:-1], stored[:20] + b"x" + stored[21:], b"garbage", None):
        if damaged is None:
            place.redis.hdel(key, "r:call-0")
        else:
            place.redis.hset(key, "r:call-0", damaged)
        cold = run.ledger()
        manifest = await cold.manifest("r")
        assert calls_in(manifest) == ["call-1"]
        assert ("call-0", DAMAGED_REASON) in failures_in(manifest)
        with pytest.raises(CorruptRecordError, match="call 'call-0' of rollout r"):
            await cold.resolve("r", first.next_request)


async def test_another_programs_value_and_a_newer_format_are_refused(
    run: Run, place: Place, namespace: str
) -> None:
    key = ledger_key(namespace, "r")
    ledger = run.ledger()
    place.redis.set(key, "theirs")
    for step in (ledger.record(staged("r", "call").commit), ledger.manifest("r"), ledger.retire(["r"])):
        with pytest.raises(CorruptRecordError):
            await step
    assert place.redis.get(key) == b"theirs"
    place.redis.delete(key)
    place.redis.hset(key, "s", "12 in another form")
    with pytest.raises(UnsupportedFormatError):
        await ledger.record_failure("r", "call", "why")


# Construction


def test_constructing_it_opens_nothing_and_needs_no_loop(namespace: str) -> None:
    threads = threading.active_count()
    settings: dict[str, Any] = {"tls": types.MappingProxyType({"check_hostname": False}), "password": "pw"}
    ledger = RedisCaptureLedger("rediss://nowhere.invalid/0", namespace=namespace, **settings)
    assert threading.active_count() == threads
    assert ledger.is_process_shared()
    assert repr(ledger) == f"RedisCaptureLedger('rediss://nowhere.invalid:6379/0', namespace='{namespace}')"
    for protocol in ("CaptureLedger", "LineageResolver"):
        assert isinstance(ledger, gym_compat.required_attribute("protocols", protocol))
    assert not {"__len__", "__bool__"} & set(dir(ledger))
    asyncio.run(ledger.close())
    asyncio.run(ledger.close())


def test_the_yaml_of_the_documents_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="NeMo Gym reads YAML with it")
    monkeypatch.setenv("REDIS_PASSWORD", "secret")
    block = yaml_with("RedisCaptureLedger", DOCS / "nemo-gym.md")
    config = gym("config", "TokenIdCaptureConfig").model_validate(omegaconf.OmegaConf.create(block))
    capture = config.token_id_capture
    assert capture.external_staging
    if sys.version_info >= (3, 12):
        ledger = config.build_lineage_store()
    else:  # Gym builds it on newer Pythons only
        module, _, name = capture.lineage_store.partition(":")
        ledger = getattr(importlib.import_module(module), name)(**capture.lineage_store_kwargs)
    assert isinstance(ledger, RedisCaptureLedger)
    assert ledger._settings.namespace == "run-17"
    assert ledger._settings.password is not None
    assert ledger._settings.password.get_secret_value() == "secret"


def test_its_settings_may_be_omegaconfs() -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="NeMo Gym reads YAML with it")
    kwargs = omegaconf.OmegaConf.create({"url": "rediss://host/0", "tls": {"check_hostname": False}})
    built = RedisCaptureLedger(**kwargs)._settings.tls
    assert built is not None
    assert not built.check_hostname


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (
            {"spill_dir": "x"},
            ConfigurationError,
            "'spill_dir' is not a setting; the settings are.*tombstone_ttl_s",
        ),
        ({"max_cached_rollouts": 0}, ConfigurationError, "setting 'max_cached_rollouts' is refused"),
        ({"tombstone_ttl_s": 5}, ConfigurationError, "setting 'tombstone_ttl_s' is refused"),
        ({"namespace": "a/b"}, InvalidIdentifierError, "namespace 'a/b' is refused"),
        ({"url": 5}, ConfigurationError, "url must be a string"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        RedisCaptureLedger(**settings)


WITHOUT_GYM = """
import sys
sys.modules["nemo_gym"] = None
import gym_capture_redis
from gym_capture_redis import *
try:
    gym_capture_redis.RedisCaptureLedger
except ImportError as error:
    print(error)
"""


def test_without_gym_the_import_says_what_to_install() -> None:
    child = subprocess.run([sys.executable, "-c", WITHOUT_GYM], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("NeMo Gym is not installed; this part of gym-capture-redis needs `pip")


def test_a_read_changes_nothing(cluster_group: ClusterGroup, namespace: str) -> None:
    """In a Cluster as well, where a script sees one slot only."""

    async def main() -> None:
        run = Run(cluster_group.url, namespace)
        (call,) = chain("r", 1)
        await run.ledger().record(call.commit)
        key = ledger_key(namespace, "r")
        with cluster_group.node_of(key).client() as client:
            before: Any = client.hgetall(key)
            assert await parent_of(run.ledger(), "r", call.next_request) == "call-0"
            assert calls_in(await run.ledger().manifest("r")) == ["call-0"]
            assert await run.ledger().has_rows("r")
            assert client.hgetall(key) == before
        await run.close()

    asyncio.run(main())
