"""Long routed experts travel in parts: exact, each part once, and never a guess where one is missing."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import pytest
import redis
from support.backends import EVERY_KIND, place_of
from support.sample_entries import exact_dump, sample_entry
from support.sequences import random_ids
from support.stored_state import hash_fields, read_state

from gym_capture_redis import codec
from gym_capture_redis.errors import (
    BackendUnavailableError,
    CallConflictError,
    RecordTooLargeError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)
from gym_capture_redis.executor import Executor
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import IncompleteCode
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.settings import Durability
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource
from gym_capture_redis.subject import Subject

ROLLOUT = "r"
MIB = 2**20
LAYERS, TOP_K = 48, 8
PATIENCE_S = 60.0
SMALL_RECORD_BYTES = 1_000


@dataclass
class Backend:
    """One rollout on a server, its clients, and what lies in its hash."""

    url: str
    namespace: str
    durability: Durability
    redis: redis.Redis
    stack: contextlib.AsyncExitStack

    @property
    def key(self) -> str:
        return rollout_key(self.namespace, ROLLOUT).decode()

    async def sink(self, **settings: Any) -> RedisTokenSink:
        made = RedisTokenSink(self.url, namespace=self.namespace, durability=self.durability, **settings)
        return await self.stack.enter_async_context(made)

    async def source(self, **settings: Any) -> RedisTokenSource:
        made = RedisTokenSource(self.url, namespace=self.namespace, durability=self.durability, **settings)
        return await self.stack.enter_async_context(made)

    def fields(self, prefix: bytes = b"") -> dict[bytes, bytes]:
        found: Any = self.redis.hgetall(self.key)
        return {field: value for field, value in found.items() if field.startswith(prefix)}

    def parts(self) -> dict[bytes, bytes]:
        """The parts that lie in the hash; a step of its own brought each."""
        brought = [trace[2:18] for trace in self.fields(b"o:").values() if trace[18:] == b"p:"]
        assert len(brought) == len(set(brought))
        return {name: self.fields(b"b:")[b"b:" + name] for name in brought}

    def counts_are_right(self) -> None:
        state = read_state(self.redis, self.key.encode())
        assert len(self.fields()) == hash_fields(state)
        blocks = self.fields(b"b:")
        assert int(state["blocks"]) == len(blocks)
        payload = sum(len(value) for value in (*blocks.values(), *self.fields(b"r:").values()))
        assert int(state["bytes"]) == payload

    async def holds(self, *entries: TokenEntry, chunk_bytes: int = 2**20, as_lists_too: bool = False) -> None:
        """Freeze, and see exactly these entries. Lists of millions take long: mostly arrays do."""
        source = await self.source(chunk_bytes=chunk_bytes)
        for freeze in (source.freeze_arrays, source.freeze)[: 1 + as_lists_too]:
            snapshot = await freeze(ROLLOUT)
            assert not snapshot.incomplete, snapshot.reasons
            found = {entry.model_call_id: entry for entry in snapshot.entries}
            assert found.keys() == {entry.model_call_id for entry in entries}
            for entry in entries:
                assert_same(found[entry.model_call_id], entry)
        self.counts_are_right()


@pytest.fixture(params=EVERY_KIND)
async def backend(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Backend]:
    async with contextlib.AsyncExitStack() as stack:
        place = stack.enter_context(place_of(request, namespace))
        yield Backend(place.url, namespace, place.durability, place.redis, stack)


only_real = pytest.mark.parametrize("backend", ["valkey9", "redis7"], indirect=True)


# What engines hand over


def experts_array(nbytes: int, seed: int = 0, below: int = 128) -> np.ndarray[Any, Any]:
    """As many tokens as make about ``nbytes`` bytes of ids below 256."""
    tokens = nbytes // (LAYERS * TOP_K)
    return np.random.default_rng(seed).integers(0, below, (tokens, LAYERS, TOP_K), "u2")


def route_string(array: np.ndarray[Any, Any]) -> str:
    shape = "x".join(map(str, array.shape))
    kind = "int8" if int(array.max()) < 128 else "int16"
    raw = array.astype("<i1" if kind == "int8" else "<i2").tobytes()
    return f"nrlre1:{kind}:{shape}:{base64.b64encode(raw).decode()}"


def call_of(name: str, experts: Any, **fields: Any) -> TokenEntry:
    return sample_entry(ROLLOUT, name, prompt_token_ids=random_ids(600), routed_experts=experts, **fields)


def assert_same(found: Any, put: Any) -> None:
    """Compare experts whole, since every element by itself would take seconds, and the rest exactly."""
    theirs, ours = found.routed_experts, put.routed_experts
    if isinstance(theirs, np.ndarray):
        assert theirs.dtype.kind in "iu"
        assert np.array_equal(theirs, ours)
    else:
        assert type(theirs) in (str, list)
        assert theirs == (ours.tolist() if isinstance(ours, np.ndarray) else ours)
    assert exact_dump(without_experts(found)) == exact_dump(without_experts(put))


def without_experts(entry: Any) -> Any:
    names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    lists = {name: np.asarray(getattr(entry, name)).tolist() for name in names}
    return entry.model_copy(update=lists | {"routed_experts": None})


LONG = experts_array(2 * MIB + MIB // 2)
PARTS = 3
SHORTER = experts_array(MIB + MIB // 4)
"""Two parts; lists of millions take long."""

FORMS: dict[str, Callable[[], Any]] = {
    "a string of int8": lambda: route_string(LONG),
    "a string of int16": lambda: route_string(experts_array(MIB + MIB // 2, below=512)),
    "nested lists": SHORTER.tolist,
    "nested lists of wide ids": lambda: experts_array(MIB // 2 + MIB // 4, below=60_000).tolist(),
    "nested lists with negative ids": lambda: np.subtract(SHORTER, 1, dtype="i8").tolist(),
    "an array": lambda: LONG,
    "an array of int64": lambda: LONG.astype("i8"),
    "an array in another order": lambda: np.asfortranarray(LONG),
    "an array of one dimension": lambda: LONG.reshape(-1),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_long_experts_of_any_form_come_back_exactly(backend: Backend, form: Callable[[], Any]) -> None:
    entry, sink = call_of("c", form()), await backend.sink()
    await sink.begin_call(ROLLOUT, "c")
    await sink.put(entry)
    stored = backend.parts()
    assert len(stored) >= 2
    assert max(map(len, stored.values())) == MIB
    assert all(1 <= len(part) <= MIB for part in stored.values())
    (record,) = backend.fields(b"r:").values()
    assert len(record) < SMALL_RECORD_BYTES
    await backend.holds(entry, as_lists_too=True)


@pytest.mark.parametrize("chunk_bytes", [1, MIB - 1, MIB, 3 * MIB, 2**30])
async def test_long_experts_are_read_in_chunks_of_any_size(backend: Backend, chunk_bytes: int) -> None:
    sink = await backend.sink()
    entries = [call_of(f"c{number}", experts_array(2 * MIB + 7, number)) for number in range(2)]
    entries.append(call_of("short", [[[1, 2]]]))
    for entry in entries:
        await sink.put(entry)
    await backend.holds(*entries, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("beside", [-1, 0, 1, MIB, MIB + 1])
async def test_experts_of_about_one_part_come_back_exactly(backend: Backend, beside: int) -> None:
    sink, raw = await backend.sink(), random_bytes(MIB + beside)
    entries = [
        call_of("array", np.frombuffer(raw, "u1")),
        call_of("string", f"nrlre1:int8:{len(raw)}x1x1:{base64.b64encode(raw).decode()}"),
    ]
    for entry in entries:
        await sink.put(entry)
    assert len(backend.parts()) == (-(-len(raw) // MIB) if beside > 0 else 0)
    await backend.holds(*entries)


def random_bytes(count: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(count)


async def test_experts_of_which_all_parts_are_equal_are_sent_and_stored_as_one(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[int] = []
    run = Executor.run

    async def note(executor: Executor, call: Call, subject: Subject, **options: Any) -> Reply:
        if call.step is Step.STAGE:
            staged.append(call.nbytes)
        return await run(executor, call, subject, **options)

    monkeypatch.setattr(Executor, "run", note)
    entry = call_of("c", np.zeros((5 * MIB // 8, 8), "u1"))
    await (await backend.sink()).put(entry)
    assert len(staged) == 1
    assert list(map(len, backend.parts().values())) == [MIB]
    await backend.holds(entry)


@pytest.mark.parametrize("form", [route_string, np.asarray], ids=["strings", "arrays"])
async def test_calls_that_begin_alike_share_their_parts(
    backend: Backend, form: Callable[[np.ndarray[Any, Any]], Any]
) -> None:
    whole = experts_array(4 * MIB)
    tokens = [len(whole) * share // 4 for share in (3, 4, 2)]
    entries = [call_of(f"c{number}", form(whole[:count])) for number, count in enumerate(tokens)]
    sinks = [await backend.sink() for _ in range(2)]
    for number, entry in enumerate(entries):
        await sinks[number % 2].put(entry)
    slices = {
        whole[:count].astype("u1").tobytes()[start : start + MIB]
        for count in tokens
        for start in range(0, count * LAYERS * TOP_K, MIB)
    }
    assert set(backend.parts().values()) == slices
    assert len(slices) == 6  # of nine
    await backend.holds(*entries)


async def test_calls_put_at_once_store_what_they_share_once(backend: Backend) -> None:
    sinks = [await backend.sink() for _ in range(3)]
    entries = [call_of(f"c{number}", LONG) for number in range(4)]
    await asyncio.gather(*(sinks[number % 3].put(entry) for number, entry in enumerate(entries)))
    assert len(backend.parts()) == PARTS
    await backend.holds(*entries)


async def test_experts_in_an_array_and_in_lists_are_the_same_content(backend: Backend) -> None:
    sink = await backend.sink()
    await sink.put(call_of("c", LONG))
    before = backend.fields()
    await sink.put(call_of("c", LONG.tolist()))
    assert backend.fields() == before


# Repeating, conflicts, limits


async def a_fresh_sink(backend: Backend) -> RedisTokenSink:
    return await backend.sink()


async def a_sink_without_a_cache(backend: Backend) -> RedisTokenSink:
    return await backend.sink(prefix_cache_bytes=0)


@pytest.mark.parametrize("frozen", [False, True], ids=["while open", "after freeze"])
@pytest.mark.parametrize("other", [None, a_fresh_sink, a_sink_without_a_cache])
async def test_a_repeated_put_stores_nothing(
    backend: Backend, other: Callable[[Backend], Any] | None, *, frozen: bool
) -> None:
    sink, entry = await backend.sink(), call_of("c", LONG)
    await sink.put(entry)
    if frozen:
        await (await backend.source()).freeze(ROLLOUT)
    before = backend.fields()
    await (await other(backend) if other else sink).put(entry)
    assert backend.fields() == before
    await backend.holds(entry)


@pytest.mark.parametrize("fresh", [False, True], ids=["by the same sink", "by another sink"])
async def test_other_experts_for_the_same_call_are_a_conflict(backend: Backend, *, fresh: bool) -> None:
    sink, entry = await backend.sink(), call_of("c", LONG)
    await sink.put(entry)
    changed = LONG.copy()
    changed[-1, -1, -1] ^= 1
    with pytest.raises(CallConflictError):
        await (await backend.sink() if fresh else sink).put(call_of("c", changed))
    snapshot = await (await backend.source()).freeze_arrays(ROLLOUT)
    assert [(reason.code, reason.model_call_id) for reason in snapshot.reasons] == [
        (IncompleteCode.CONFLICT, "c")
    ]
    (found,) = snapshot.entries
    assert_same(found, entry)
    backend.counts_are_right()


async def test_parts_count_for_the_largest_record(backend: Backend) -> None:
    sink = await backend.sink(max_record_bytes=2 * MIB)
    with pytest.raises(RecordTooLargeError):
        await sink.put(call_of("c", LONG))
    assert backend.fields() == {}
    await sink.put(call_of("c", experts_array(2 * MIB - 100_000)))
    assert len(backend.parts()) == 2


# Beliefs that are wrong


class Wire:
    """Keeps which steps one client sends, and what each was answered; may act before a step."""

    def __init__(self, client: RedisTokenSink | RedisTokenSource) -> None:
        self.answers: list[tuple[Step, str]] = []
        self.before: dict[Step, Callable[[], Any]] = {}
        self._executor = client._executors.get()
        self._run = self._executor.run
        self._executor.run = self.run  # type: ignore[method-assign]

    async def run(self, call: Call, subject: Subject, **options: Any) -> Reply:
        if act := self.before.pop(call.step, None):
            await act()
        reply = await self._run(call, subject, **options)
        self.answers.append((call.step, reply.code))
        return reply

    def of(self, step: Step) -> list[str]:
        return [code for sent, code in self.answers if sent is step]


@pytest.mark.parametrize("believed", [(0, 1, 2), (0,), (1, 2)])
async def test_a_put_whose_parts_are_not_stored_is_repeated_in_full(
    backend: Backend, believed: tuple[int, ...]
) -> None:
    sink, entry = await backend.sink(), call_of("c", LONG)
    await sink.begin_call(ROLLOUT, "c")
    names = [name for name, _ in codec.encode(entry, max_record_bytes=2**26).parts]
    incarnation = read_state(backend.redis, backend.key.encode())["incarnation"].decode()
    sink._blocks.learn(ROLLOUT, incarnation, [names[number] for number in believed])
    wire = Wire(sink)
    await sink.put(entry)
    assert wire.of(Step.PUT) == ["MISSING", "OK"]
    there = len(names) - len(believed)
    assert sorted(wire.of(Step.STAGE)) == sorted(["OK"] * there + ["SAME"] * there + ["OK"] * len(believed))
    await backend.holds(entry)


async def test_parts_taken_away_by_hand_are_stored_again_and_show(backend: Backend) -> None:
    sink, entries = await backend.sink(), [call_of("one", LONG), call_of("two", LONG)]
    await sink.put(entries[0])
    backend.redis.hdel(backend.key, *(b"b:" + name for name in backend.parts()))
    wire = Wire(sink)
    await sink.put(entries[1])
    assert wire.of(Step.PUT) == ["MISSING", "OK"]
    assert wire.of(Step.STAGE) == ["OK"] * PARTS
    snapshot = await (await backend.source()).freeze_arrays(ROLLOUT)
    assert {reason.code for reason in snapshot.reasons} == {IncompleteCode.TAMPERED}
    for found, put in zip(snapshot.entries, entries, strict=True):
        assert_same(found, put)


@pytest.mark.parametrize("step", [Step.STAGE, Step.PUT])
async def test_a_rollout_begun_again_between_the_steps_takes_nothing_of_the_earlier_attempt(
    backend: Backend, step: Step
) -> None:
    sink, other, source = await backend.sink(), await backend.sink(), await backend.source()
    entry = call_of("new", LONG)

    async def begin_again() -> None:
        await source.delete([ROLLOUT])
        await other.begin_call(ROLLOUT, "new")

    await sink.begin_call(ROLLOUT, "c")
    Wire(sink).before[step] = begin_again
    with pytest.raises(TokenCaptureRetiredError):
        await sink.put(call_of("c", LONG))
    assert backend.fields(b"b:") == {}
    await sink.begin_call(ROLLOUT, "new")
    await sink.put(entry)
    await backend.holds(entry)


@only_real
async def test_a_put_that_is_refused_after_its_parts_were_staged_does_not_say_that_nothing_changed(
    backend: Backend,
) -> None:
    sink = await backend.sink()
    await sink.begin_call(ROLLOUT, "c")

    async def fill_up() -> None:
        backend.redis.config_set("maxmemory", 1)

    Wire(sink).before[Step.PUT] = fill_up
    try:
        with pytest.raises(BackendUnavailableError, match=r"out of memory.*earlier attempt may have been"):
            await sink.put(call_of("c", LONG))
    finally:
        backend.redis.config_set("maxmemory", 0)
    assert len(backend.parts()) == PARTS
    await sink.put(call_of("c", LONG))
    await backend.holds(call_of("c", LONG))


# What happens while parts are read


@pytest.mark.parametrize("chunk_bytes", [1, 2**30])
@pytest.mark.parametrize("end", ["retired", "deleted", "begun again"])
async def test_a_rollout_that_ends_while_its_parts_are_read_gives_no_snapshot(
    backend: Backend, end: str, chunk_bytes: int
) -> None:
    sink, other = await backend.sink(), await backend.source()
    source = await backend.source(chunk_bytes=chunk_bytes)
    await sink.put(call_of("c", LONG))

    async def end_it() -> None:
        if end == "retired":
            await other.retire([ROLLOUT])
        else:
            await other.delete([ROLLOUT])
        if end == "begun again":
            await (await backend.sink()).put(call_of("c", None))

    Wire(source).before[Step.FETCH] = end_it
    with pytest.raises(TokenCaptureRetiredError):
        await source.freeze_arrays(ROLLOUT)


async def test_a_rollout_marked_while_its_parts_are_read_is_as_it_was_before_if_all_are_there(
    backend: Backend,
) -> None:
    sink, source, entry = await backend.sink(), await backend.source(), call_of("c", LONG)
    await sink.put(entry)
    Wire(source).before[Step.FETCH] = lambda: sink.mark_incomplete(ROLLOUT)
    before = await source.freeze_arrays(ROLLOUT)
    after = await source.freeze_arrays(ROLLOUT)
    assert (before.incomplete, after.incomplete) == (False, True)
    assert (before.snapshot_id, before.version + 1) == (after.snapshot_id, after.version)
    assert not await source.drop(ROLLOUT, snapshot_id=before.snapshot_id, version=before.version)


async def test_a_rollout_of_which_a_part_is_gone_is_read_again_if_it_was_marked_meanwhile(
    backend: Backend,
) -> None:
    sink, source, kept = (
        await backend.sink(),
        await backend.source(),
        call_of("kept", experts_array(MIB // 2)),
    )
    for entry in (call_of("c", LONG), kept):
        await sink.put(entry)

    async def damage() -> None:
        backend.redis.hdel(backend.key, b"b:" + min(backend.parts()))
        await sink.mark_incomplete(ROLLOUT, "c")

    wire = Wire(source)
    wire.before[Step.FETCH] = damage
    snapshot = await source.freeze_arrays(ROLLOUT)
    assert wire.of(Step.FREEZE) == ["OK", "OK"]
    assert snapshot.version == 4  # two records, the freeze, the mark
    assert {IncompleteCode.MARKED, IncompleteCode.CORRUPT, IncompleteCode.TAMPERED} == {
        reason.code for reason in snapshot.reasons
    }
    (found,) = snapshot.entries
    assert_same(found, kept)


async def test_a_rollout_of_many_parts_leaves_others_their_turn(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = call_of("c", experts_array(12 * MIB))
    await (await backend.sink()).put(entry)
    run, under_way, most = Executor.run, 0, 0

    async def counted(executor: Executor, call: Call, subject: Subject, **options: Any) -> Reply:
        nonlocal under_way, most
        under_way += call.step is Step.FETCH
        most = max(most, under_way)
        try:
            return await run(executor, call, subject, **options)
        finally:
            under_way -= call.step is Step.FETCH

    monkeypatch.setattr(Executor, "run", counted)
    await backend.holds(entry)
    assert 2 <= most <= 4
    assert under_way == 0


async def test_a_part_that_was_missing_for_a_moment_is_asked_for_again(backend: Backend) -> None:
    """As by a server that was just demoted, and has not got everything yet."""
    sink, source, entry = await backend.sink(), await backend.source(), call_of("c", LONG)
    await sink.put(entry)
    taken: dict[bytes, bytes] = {}

    async def take_away() -> None:
        taken.update({b"b:" + name: content for name, content in backend.parts().items()})
        backend.redis.hdel(backend.key, *taken)

    async def bring_back() -> None:
        backend.redis.hset(backend.key, mapping=dict(taken))  # type: ignore[arg-type]

    wire = Wire(source)
    wire.before = {Step.FETCH: take_away, Step.READ: bring_back}
    snapshot = await source.freeze_arrays(ROLLOUT)
    assert not snapshot.incomplete, snapshot.reasons
    assert_same(snapshot.entries[0], entry)
    assert len(taken) == PARTS


# Parts without their record

KILLED_BEFORE_ITS_PUT = """
import asyncio, os, signal, sys
import numpy as np
from gym_capture_redis import RedisTokenSink, TokenEntry
from gym_capture_redis.executor import Executor
from gym_capture_redis.scripts import Step
from gym_capture_redis.subject import Subject

url, namespace, rollout = sys.argv[1:]
run = Executor.run

async def run_until_the_put(executor, call, *args, **options):
    if call.step is Step.PUT:
        os.kill(os.getpid(), signal.SIGKILL)
    return await run(executor, call, *args, **options)

Executor.run = run_until_the_put

async def main():
    sink = RedisTokenSink(url, namespace=namespace)
    experts = np.arange(5 * 2**17, dtype="u4").view("u1")
    await sink.begin_call(rollout, "lost")
    await sink.put(
        TokenEntry(
            rollout_id=rollout, model_call_id="lost", prompt_token_ids=[1], generation_token_ids=[2],
            generation_log_probs=[-0.5], routed_experts=experts, created_at=1.0,
        )
    )

asyncio.run(main())
"""


@only_real
async def test_a_worker_killed_between_its_parts_and_its_record_is_a_lost_call(backend: Backend) -> None:
    command = [sys.executable, "-c", KILLED_BEFORE_ITS_PUT, backend.url, backend.namespace, ROLLOUT]
    child = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert child.returncode == -9, child.stderr
    assert len(backend.parts()) == 3
    backend.counts_are_right()
    kept = call_of("kept", LONG)
    await (await backend.sink()).put(kept)
    snapshot = await (await backend.source()).freeze_arrays(ROLLOUT)
    assert [(reason.code, reason.model_call_id) for reason in snapshot.reasons] == [
        (IncompleteCode.LOST_CALL, "lost")
    ]
    (found,) = snapshot.entries
    assert_same(found, kept)
    backend.counts_are_right()


async def test_a_put_cancelled_between_its_parts_and_its_record_is_a_lost_call(backend: Backend) -> None:
    sink, entry = await backend.sink(), call_of("c", LONG)
    await sink.begin_call(ROLLOUT, "c")
    reached = asyncio.Event()

    async def never() -> None:
        reached.set()
        await asyncio.Event().wait()

    Wire(sink).before[Step.PUT] = never
    put = asyncio.create_task(sink.put(entry))
    async with asyncio.timeout(PATIENCE_S):
        await reached.wait()
    put.cancel()
    assert isinstance((await asyncio.gather(put, return_exceptions=True))[0], asyncio.CancelledError)
    assert len(backend.parts()) == PARTS
    snapshot = await (await backend.source()).freeze_arrays(ROLLOUT)
    assert [(reason.code, reason.model_call_id) for reason in snapshot.reasons] == [
        (IncompleteCode.LOST_CALL, "c")
    ]
    backend.counts_are_right()


async def test_what_a_lost_worker_has_stored_is_used_by_the_one_that_repeats_its_call(
    backend: Backend,
) -> None:
    first, second, entry = await backend.sink(), await backend.sink(), call_of("c", LONG)
    await first.begin_call(ROLLOUT, "c")

    async def stop() -> None:
        raise asyncio.CancelledError

    Wire(first).before[Step.PUT] = stop
    with pytest.raises(asyncio.CancelledError):
        await first.put(entry)
    before, wire = backend.parts(), Wire(second)
    await second.put(entry)
    assert wire.of(Step.STAGE) == ["SAME"] * PARTS
    assert backend.parts() == before
    await backend.holds(entry)


# Rollouts that are over


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "unannounced"])
async def test_nothing_is_staged_in_a_frozen_rollout(backend: Backend, *, announced: bool) -> None:
    sink, source, kept = await backend.sink(), await backend.source(), call_of("kept", [[[1]]])
    await sink.put(kept)
    if announced:
        await sink.begin_call(ROLLOUT, "c")
    await source.freeze(ROLLOUT)
    before = backend.fields()
    with pytest.raises(TokenCaptureFrozenError) as refused:
        await sink.put(call_of("c", LONG))
    assert (refused.value.rollout_id, refused.value.model_call_id) == (ROLLOUT, "c")
    assert backend.fields() == before


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "unannounced"])
async def test_a_freeze_between_the_parts_leaves_counts_that_agree(
    backend: Backend, *, announced: bool
) -> None:
    sink, source, kept = await backend.sink(), await backend.source(), call_of("kept", [[[1]]])
    await sink.put(kept)
    if announced:
        await sink.begin_call(ROLLOUT, "c")
    freezing: list[Any] = []

    async def freeze() -> None:
        freezing.append(await source.freeze(ROLLOUT))

    Wire(sink).before[Step.STAGE] = freeze
    with pytest.raises(TokenCaptureFrozenError):
        await sink.put(call_of("c", LONG))
    snapshot = await source.freeze(ROLLOUT)
    assert len(freezing) == 1
    lost = [(IncompleteCode.LOST_CALL, "c")] if announced else []
    assert [(reason.code, reason.model_call_id) for reason in snapshot.reasons] == lost
    assert [entry.model_call_id for entry in snapshot.entries] == ["kept"]
    backend.counts_are_right()


@pytest.mark.parametrize("how", ["drop", "retire", "delete", "expired"])
async def test_nothing_is_staged_in_a_rollout_that_is_over(backend: Backend, how: str) -> None:
    sink, source = await backend.sink(), await backend.source()
    await sink.put(call_of("kept", LONG))
    await sink.begin_call(ROLLOUT, "c")
    if how == "drop":
        snapshot = await source.freeze(ROLLOUT)
        assert await source.drop(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    elif how == "expired":
        backend.redis.delete(backend.key)
    else:
        await getattr(source, how)([ROLLOUT])
    before = backend.fields()
    assert before.keys() <= {b"s"}, "parts were left behind"
    with pytest.raises(TokenCaptureRetiredError) as refused:
        await sink.put(call_of("c", LONG))
    assert (refused.value.rollout_id, refused.value.model_call_id) == (ROLLOUT, "c")
    assert backend.fields() == before


async def test_an_id_used_again_gets_all_parts_again(backend: Backend) -> None:
    sink, source, entry = await backend.sink(), await backend.source(), call_of("c", LONG)
    for _ in range(2):
        await sink.begin_call(ROLLOUT, "c")
        await sink.put(entry)
        await backend.holds(entry)
        assert await source.delete([ROLLOUT]) == {"removed": [ROLLOUT], "absent": []}
        assert backend.fields() == {}


# Damage


def damages(parts_: dict[bytes, bytes]) -> Iterator[tuple[str, dict[bytes, bytes | None]]]:
    """What became of which fields, by words; None: the field is gone."""
    names = list(parts_)
    for number, name in enumerate(names):
        field, part, other = b"b:" + name, parts_[name], names[number - 1]
        for bit in (0, 4 * len(part) + 3, 8 * len(part) - 1):
            flipped = bytearray(part)
            flipped[bit // 8] ^= 1 << bit % 8
            yield f"bit {bit} of part {number} flipped", {field: bytes(flipped)}
        yield f"part {number} deleted", {field: None}
        yield f"part {number} emptied", {field: b""}
        yield f"part {number} cut short", {field: part[:-1]}
        yield f"part {number} grown", {field: part + b"\0"}
        yield f"part {number} renamed", {field: None, field[:-1] + bytes([field[-1] ^ 1]): part}
        yield f"part {number} replaced by another", {field: parts_[other]}
        yield f"part {number} exchanged with another", {field: parts_[other], b"b:" + other: part}


@pytest.mark.parametrize("frozen", [False, True], ids=["while open", "after freeze"])
async def test_damage_to_any_part_makes_its_call_corrupt(backend: Backend, *, frozen: bool) -> None:
    sink, source = await backend.sink(), await backend.source()
    kept = call_of("kept", [[[1]]])
    for entry in (kept, call_of("c", LONG)):
        await sink.put(entry)
    if frozen:
        await source.freeze(ROLLOUT)
    whole = backend.fields()
    edits = dict(damages(backend.parts()))
    assert len(edits) == 10 * PARTS
    for what, values in edits.items():
        backend.redis.delete(backend.key)
        damaged = {field: value for field, value in (whole | values).items() if value is not None}
        backend.redis.hset(backend.key, mapping=damaged)  # type: ignore[arg-type]
        snapshot = await source.freeze_arrays(ROLLOUT)
        reasons = {(reason.code, reason.model_call_id) for reason in snapshot.reasons}
        assert (IncompleteCode.CORRUPT, "c") in reasons, what
        assert reasons <= {(IncompleteCode.CORRUPT, "c"), (IncompleteCode.TAMPERED, "")}, what
        (found,) = snapshot.entries
        assert_same(found, kept)


@pytest.mark.parametrize("chosen", [[], [0], [0, 0, 2], [2, 1, 0], [0, 1, 2, 2]])
async def test_a_record_that_names_other_parts_is_corrupt(backend: Backend, chosen: list[int]) -> None:
    entry = call_of("c", LONG)
    await (await backend.sink()).put(entry)
    names = [name for name, _ in codec.encode(entry, max_record_bytes=2**26).parts]
    record = backend.fields(b"r:")[b"r:c"]
    listed = msgpack.packb(names)
    assert record.count(listed) == 1
    changed = record.replace(listed, msgpack.packb([names[number] for number in chosen]))
    backend.redis.hset(backend.key, "r:c", changed)
    snapshot = await (await backend.source()).freeze_arrays(ROLLOUT)
    assert snapshot.entries == ()
    assert (IncompleteCode.CORRUPT, "c") in {
        (reason.code, reason.model_call_id) for reason in snapshot.reasons
    }


# The server in between


@only_real
async def test_scripts_flushed_between_the_parts_delay_nothing(backend: Backend) -> None:
    sink, entry = await backend.sink(), call_of("c", LONG)
    await sink.begin_call(ROLLOUT, "c")

    async def flush() -> None:
        backend.redis.script_flush()

    wire = Wire(sink)
    wire.before |= {Step.STAGE: flush, Step.PUT: flush}
    await sink.put(entry)
    await backend.holds(entry)


async def test_no_step_of_a_large_record_moves_more_than_a_part(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = Executor.run

    async def note_size(executor: Executor, call: Call, subject: Subject, **options: Any) -> Reply:
        sizes.append(call.nbytes)
        return await run(executor, call, subject, **options)

    monkeypatch.setattr(Executor, "run", note_size)
    await (await backend.sink()).put(call_of("c", experts_array(9 * MIB)))
    assert MIB <= max(sizes) <= MIB + SMALL_RECORD_BYTES
