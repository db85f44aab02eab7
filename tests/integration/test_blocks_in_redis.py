"""On real servers every token is stored once, whoever sends it and whatever a sink believes to be there."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.processes import conversation_of, converse_from_a_process
from support.sample_entries import exact_dump, sample_entry
from support.sequences import distinct_blocks, growing_conversation, random_ids, sequence_of
from support.servers import RealServer
from support.stored_state import change_state, hash_fields, read_state

from gym_capture_redis import codec, scripts
from gym_capture_redis.blocks import BLOCK_IDS, NAME_BYTES
from gym_capture_redis.errors import TokenCaptureRetiredError
from gym_capture_redis.executor import Executor
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import TokenCaptureSnapshot
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource
from gym_capture_redis.subject import Subject

ROLLOUT = "r"
TURNS = 40
NEW_IDS = 400
GENERATED = 100
PROCESSES = 8
SINKS = 8
PUTS = 64


class Bench:
    """One rollout on a real server, its writers, and what lies in Redis."""

    def __init__(self, server: RealServer, namespace: str) -> None:
        self.server, self.namespace = server, namespace
        self.redis = server.client()
        self.key = rollout_key(namespace, ROLLOUT)
        self._made: list[Any] = []

    def sink(self, **settings: Any) -> RedisTokenSink:
        self._made.append(made := RedisTokenSink(self.server.url, namespace=self.namespace, **settings))
        return made

    def source(self, **settings: Any) -> RedisTokenSource:
        self._made.append(made := RedisTokenSource(self.server.url, namespace=self.namespace, **settings))
        return made

    async def close(self) -> None:
        for made in self._made:
            await made.close()
        self.redis.close()

    def fields(self, prefix: bytes = b"") -> dict[bytes, bytes]:
        found: Any = self.redis.hgetall(self.key)
        return {field: value for field, value in found.items() if field.startswith(prefix)}

    def payload_bytes(self) -> int:
        """Bytes of records and blocks, as the server counts them."""
        return sum(
            int(self.redis.hstrlen(self.key.decode(), field))
            for prefix in (b"r:", b"b:")
            for field in self.fields(prefix)
        )

    def all_bytes(self) -> int:
        return sum(len(field) + len(value) for field, value in self.fields().items())

    async def holds(self, entries: list[TokenEntry], **settings: Any) -> TokenCaptureSnapshot:
        """Freeze, and see exactly these entries, every prefix stored once, and the counts right."""
        source = self.source(**settings)
        snapshot, arrays = await source.freeze(ROLLOUT), await source.freeze_arrays(ROLLOUT)
        assert not snapshot.incomplete, snapshot.reasons
        assert dumps(snapshot.entries) == dumps(entries)
        assert dumps(map(with_lists, arrays.entries)) == dumps(entries)
        self.counts_are_right_for(entries, distinct_blocks(map(ids_of, entries)))
        assert snapshot.stored_bytes == self.payload_bytes()
        return snapshot

    def counts_are_right_for(self, entries: list[TokenEntry], blocks: int) -> None:
        """The state counts what is there, and each block was brought by one step."""
        state, stored = self.state(), self.fields(b"b:")
        assert len(stored) == blocks
        assert {name: int(state[name]) for name in ("records", "blocks", "ids", "bytes")} == {
            "records": len(entries),
            "blocks": blocks,
            "ids": sum(len(ids_of(entry)) for entry in entries),
            "bytes": self.payload_bytes(),
        }
        assert len(self.fields()) == hash_fields(state)
        brought = [name for names in self.traces().values() for name in names]
        assert sorted(brought) == sorted(field[2:] for field in stored)

    def state(self) -> dict[str, bytes]:
        return read_state(self.redis, self.key)

    def incarnation(self) -> str:
        return self.state()["incarnation"].decode()

    def traces(self) -> dict[str, list[bytes]]:
        """Names of the blocks that each step brought, by what else it wrote; each says it of itself once."""
        traces = {}
        for trace in self.fields(b"o:").values():
            count, _, rest = trace.partition(b":")
            end = NAME_BYTES * int(count)
            assert rest[end:].decode() not in traces
            traces[rest[end:].decode()] = names_in(rest[:end])
        return traces


@pytest.fixture
async def bench(real_server: RealServer, namespace: str) -> AsyncIterator[Bench]:
    prepared = Bench(real_server, namespace)
    yield prepared
    await prepared.close()


class Wire:
    """Keeps the puts that one sink sends, and what each was answered."""

    def __init__(self, sink: RedisTokenSink) -> None:
        self.puts: list[scripts.Call] = []
        self.answers: list[str] = []
        self._executor: Executor = sink._executors.get()
        self._run = self._executor.run
        self._executor.run = self.run  # type: ignore[method-assign]

    async def run(self, call: scripts.Call, subject: Subject, **options: Any) -> scripts.Reply:
        reply = await self._run(call, subject, **options)
        if call.step is scripts.Step.PUT:
            self.puts.append(call)
            self.answers.append(reply.code)
        return reply

    @property
    def sent_names(self) -> list[list[Any]]:
        """Names of the blocks of each put."""
        names = [names_in(call.args[7]) for call in self.puts]
        assert [list(call.args[8::2]) for call in self.puts] == [
            [b"b:" + name for name in of] for of in names
        ]
        return names

    def forget(self) -> None:
        self.puts.clear()
        self.answers.clear()


def names_in(joined: Any) -> list[bytes]:
    return [joined[at : at + NAME_BYTES] for at in range(0, len(joined), NAME_BYTES)]


def ids_of(entry: TokenEntry) -> list[int]:
    return entry.prompt_token_ids + entry.generation_token_ids


def with_lists(entry: Any) -> Any:
    """The same entry with lists in place of its arrays."""
    arrays = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
    return entry.model_copy(update={name: getattr(entry, name).tolist() for name in arrays})


def dumps(entries: Any) -> dict[str, Any]:
    return {entry.model_call_id: exact_dump(entry) for entry in entries}


def call_of(name: str, prompt: list[int], generated: list[int], **fields: Any) -> TokenEntry:
    return sample_entry(
        ROLLOUT,
        name,
        prompt_token_ids=prompt,
        generation_token_ids=generated,
        generation_log_probs=[-0.1 * (1 + number % 7) for number in range(len(generated))],
        **fields,
    )


def call_that_ends(name: str, ids: list[int], **fields: Any) -> TokenEntry:
    """A call whose sequence is ``ids``, the last of them generated."""
    return call_of(name, ids[:-GENERATED], ids[-GENERATED:], **fields)


def conversation(turns: int, new_ids: int = NEW_IDS, seed: int = 0) -> list[TokenEntry]:
    grown = growing_conversation(turns, new_ids, seed=seed)
    return [call_that_ends(f"c{number}", ids) for number, ids in enumerate(grown)]


def names_of(entry: TokenEntry) -> tuple[bytes, ...]:
    return sequence_of(ids_of(entry)).names


# Size


async def test_a_growing_rollout_takes_memory_for_what_is_new_only(bench: Bench) -> None:
    sink, entries = bench.sink(), conversation(TURNS)
    sizes = [0]
    for entry in entries:
        await sink.begin_call(ROLLOUT, entry.model_call_id)
        await sink.put(entry)
        sizes.append(bench.all_bytes())
    growth = [after - before for before, after in pairwise(sizes)]
    small_fields = len(codec.encode(call_of("c", [], []), max_record_bytes=2**20).record)
    new_ids, tail, log_probs, names = 3 * NEW_IDS, 3 * BLOCK_IDS, 8 * GENERATED, 2 * 64
    bound = small_fields + new_ids + tail + log_probs + names + 200
    assert max(growth[1:]) <= bound
    assert bound < 3 * len(entries[-1].prompt_token_ids) / 10, "the bound would not notice a stored prompt"
    snapshot = await bench.holds(entries)
    assert snapshot.stored_bytes <= TURNS * bound


async def test_the_same_prompt_costs_its_blocks_once(bench: Bench) -> None:
    sink, prompt = bench.sink(), random_ids(40 * BLOCK_IDS)
    entries = [call_of(f"c{number}", prompt, [number]) for number in range(10)]
    await sink.put(entries[0])
    first = bench.payload_bytes()
    for entry in entries[1:]:
        await sink.put(entry)
    assert bench.payload_bytes() - first < 9 * 600
    await bench.holds(entries)


# Histories of any form, from sinks that know anything


def linear() -> list[TokenEntry]:
    return conversation(8)


def branches() -> list[TokenEntry]:
    trunk = random_ids(1_500)
    cuts = (0, 1, 255, 256, 257, 512, 700, 1_279, 1_280, 1_400, 1_500)
    return [
        call_that_ends("trunk", trunk),
        *(call_that_ends(f"from {keep}", trunk[:keep] + random_ids(600, keep + 1)) for keep in cuts),
    ]


def retries() -> list[TokenEntry]:
    prompt = random_ids(1_000)
    return [call_of(f"try {number}", prompt, random_ids(30 * number, number)) for number in range(20)]


def equal_twins() -> list[TokenEntry]:
    return [call_that_ends(f"twin {number}", random_ids(1_000)) for number in range(4)]


def rewritten() -> list[TokenEntry]:
    """The harness shortens and edits its history every other turn."""
    made, history = [], random_ids(900)
    for turn in range(10):
        history = history + random_ids(350, 100 + turn)
        made.append(call_that_ends(f"turn {turn}", history))
        if turn % 2:
            history = history[:300] + random_ids(40, turn) + history[500:]
        if turn % 5 == 4:
            history = history[:: 2 if turn == 4 else 3]
    return made


def out_of_order() -> list[TokenEntry]:
    made = conversation(9)
    return [made[number] for number in (8, 0, 4, 3, 7, 1, 2, 6, 5)]


def deltas() -> list[TokenEntry]:
    """As Gym records them where a prompt holds only what is new since its parent."""
    made, parent = [call_that_ends("d0", random_ids(800), parent_resolution="root")], "d0"
    for turn in range(1, 8):
        new = random_ids(90 * turn + GENERATED, turn)
        lineage = {"parent_call_id": parent, "parent_resolution": "resolved", "prompt_is_delta": True}
        parent = f"d{turn}"
        made.append(call_that_ends(parent, new, **lineage))
    return made


def short_and_empty() -> list[TokenEntry]:
    lengths = ((0, 0), (1, 0), (0, 1), (255, 0), (255, 1), (256, 0), (0, 256), (128, 128), (0, 1_000))
    ids = random_ids(1_000)
    return [call_of(f"{p}+{g}", ids[:p], ids[p : p + g]) for p, g in lengths]


def ids_of_every_width() -> list[TokenEntry]:
    history: list[int] = []
    made = []
    for number, below in enumerate((2**8, 2**63, 2**16, 2**32, 2**24, 2**63)):
        history = history + random_ids(300, number, below)
        made.append(call_that_ends(f"w{number}", history))
    made.append(call_that_ends("largest", [*history, 2**63 - 1, *history]))
    return made


HISTORIES = (
    *(linear, branches, retries, equal_twins, rewritten, out_of_order),
    *(deltas, short_and_empty, ids_of_every_width),
)

Pick = Callable[[int], RedisTokenSink]


def one_sink(bench: Bench) -> Pick:
    sink = bench.sink()
    return lambda _: sink


def a_fresh_sink_for_each_call(bench: Bench) -> Pick:
    return lambda _: bench.sink()


def five_sinks_in_turn(bench: Bench) -> Pick:
    sinks = [bench.sink() for _ in range(5)]
    return lambda number: sinks[number % 5]


def a_sink_without_a_cache(bench: Bench) -> Pick:
    sink = bench.sink(prefix_cache_bytes=0)
    return lambda _: sink


def a_sink_with_a_tiny_cache(bench: Bench) -> Pick:
    sink = bench.sink(prefix_cache_bytes=4_000)
    return lambda _: sink


WRITERS = (
    *(one_sink, a_fresh_sink_for_each_call, five_sinks_in_turn),
    *(a_sink_without_a_cache, a_sink_with_a_tiny_cache),
)


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "unannounced"])
@pytest.mark.parametrize("writers", WRITERS)
@pytest.mark.parametrize("history", HISTORIES)
async def test_any_history_from_any_sinks_comes_back_exactly_and_is_stored_once(
    bench: Bench,
    history: Callable[[], list[TokenEntry]],
    writers: Callable[[Bench], Pick],
    *,
    announced: bool,
) -> None:
    entries, pick = history(), writers(bench)
    for number, entry in enumerate(entries):
        sink = pick(number)
        if announced:
            await sink.begin_call(ROLLOUT, entry.model_call_id)
        await sink.put(entry)
    for chunk_bytes in (4 * 2**20, 1):
        await bench.holds(entries, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("history", HISTORIES)
async def test_any_history_put_at_once_comes_back_exactly_and_is_stored_once(
    bench: Bench, history: Callable[[], list[TokenEntry]]
) -> None:
    entries, sinks = history(), [bench.sink() for _ in range(3)]
    await asyncio.gather(*(sinks[number % 3].put(entry) for number, entry in enumerate(entries)))
    await bench.holds(entries)
    await bench.holds(entries, chunk_bytes=1)


async def test_a_repeated_put_sends_no_block_again_and_stores_nothing(bench: Bench) -> None:
    sink, entries = bench.sink(), conversation(4)
    for entry in entries:
        await sink.put(entry)
    before, wire = bench.fields(), Wire(sink)
    for entry in entries:
        await sink.put(entry)
    assert (wire.answers, wire.sent_names) == (["SAME"] * 4, [[]] * 4)
    assert bench.fields() == before


# A put whose blocks are there already, all or some of them

BLOCKS = 6
OFTEN = 4


async def put_in_full(bench: Bench, sink: RedisTokenSink, entry: TokenEntry, first_block: int = 0) -> str:
    """Send the entry with its blocks from ``first_block`` on, whether they are stored or not."""
    executor, encoded = sink._executors.get(), codec.encode(entry, max_record_bytes=2**26)
    call = scripts.put(bench.key, encoded, incarnation=bench.incarnation(), first_block=first_block)
    return (await executor.run(call, Subject(ROLLOUT), deadline=executor.deadline())).code


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "unannounced"])
@pytest.mark.parametrize("there", range(BLOCKS + 1))
@pytest.mark.parametrize("first_block", [0, 1, 2, BLOCKS])
async def test_only_the_blocks_that_are_new_are_counted_and_traced(
    bench: Bench, there: int, first_block: int, *, announced: bool
) -> None:
    sink, ids = bench.sink(), random_ids(BLOCKS * BLOCK_IDS + 9)
    parent = call_of("parent", ids[: there * BLOCK_IDS], random_ids(20, 1))
    await sink.put(parent)
    entry = call_of("c", ids, random_ids(20, 2))
    if announced:
        await sink.begin_call(ROLLOUT, "c")
    code = await put_in_full(bench, sink, entry, first_block)
    if first_block > there:
        assert code == "MISSING"
        assert bench.state()["records"] == b"1"
        return
    assert code == "OK"
    assert bench.traces()["r:c"] == list(names_of(entry)[there:])
    assert bench.traces()["r:parent"] == list(names_of(entry)[:there])
    await bench.holds([parent, entry])
    await bench.holds([parent, entry], chunk_bytes=1)


@pytest.mark.parametrize("longest_first", [True, False])
async def test_the_same_blocks_sent_again_and_again_are_counted_once(
    bench: Bench, *, longest_first: bool
) -> None:
    sink, ids = bench.sink(), random_ids(BLOCKS * BLOCK_IDS)
    entries = [
        call_of(f"{blocks}.{number}", ids[: blocks * BLOCK_IDS], [number])
        for blocks in sorted(range(BLOCKS + 1), reverse=longest_first)
        for number in range(OFTEN)
    ]
    await sink.begin_call(ROLLOUT, entries[0].model_call_id)
    for entry in entries:
        assert await put_in_full(bench, sink, entry) == "OK"
        assert await put_in_full(bench, sink, entry) == "SAME"
    await bench.holds(entries)
    assert sum(map(bool, bench.traces().values())) == (1 if longest_first else BLOCKS)


async def test_puts_in_one_script_call_share_the_blocks_that_the_first_of_them_brings(bench: Bench) -> None:
    sink, trunk = bench.sink(connections=1), random_ids(3 * BLOCK_IDS)
    entries = [
        call_of(
            f"c{number}", trunk[: (1 + number % 3) * BLOCK_IDS] + random_ids(300 * (number // 3), number), []
        )
        for number in range(12)
    ]
    await sink.begin_call(ROLLOUT, "c0")
    codes = await asyncio.gather(*(put_in_full(bench, sink, entry) for entry in entries))
    assert codes == ["OK"] * len(entries)
    await bench.holds(entries)


@pytest.mark.parametrize("there", [0.0, 0.5, 1.0], ids=["none there", "half there", "all there"])
@pytest.mark.parametrize("blocks", [1_995, 1_996, 1_997, 2_000, 2_343, 4_100])
async def test_a_put_of_more_arguments_than_one_command_takes_comes_back_exactly(
    bench: Bench, blocks: int, there: float
) -> None:
    ids, stored = random_ids(blocks * BLOCK_IDS + 192), int(blocks * there)
    parent, entry = call_of("parent", ids[: stored * BLOCK_IDS], []), call_of("c", ids, [5])
    await bench.sink().put(parent)
    sink = bench.sink()
    await sink.begin_call(ROLLOUT, "c")
    assert await put_in_full(bench, sink, entry) == "OK"
    bench.counts_are_right_for([parent, entry], blocks=blocks)
    assert bench.traces()["r:c"] == list(names_of(entry)[stored:])
    for chunk_bytes in (4 * 2**20, 1):
        snapshot = await bench.source(chunk_bytes=chunk_bytes).freeze_arrays(ROLLOUT)
        assert not snapshot.incomplete, snapshot.reasons
        read = {each.model_call_id: with_lists(each).prompt_token_ids for each in snapshot.entries}
        assert read == {"parent": parent.prompt_token_ids, "c": ids}
    assert snapshot.stored_bytes == bench.payload_bytes()


async def test_a_sink_puts_a_very_long_prompt_and_goes_on_from_it(bench: Bench) -> None:
    sink, ids = bench.sink(), random_ids(600_000)
    wire = Wire(sink)
    await sink.put(call_of("c0", ids, [1]))
    await sink.put(call_of("c1", [*ids, 1, *random_ids(300, 1)], [2]))
    assert wire.answers == ["OK", "OK"]
    assert list(map(len, wire.sent_names)) == [2_343, 1]
    snapshot = await bench.source().freeze(ROLLOUT)
    assert not snapshot.incomplete, snapshot.reasons
    assert [entry.prompt_token_ids[:600_000] == ids for entry in snapshot.entries] == [True, True]


# A sink that believes what is not so


async def test_a_put_that_builds_on_a_missing_block_changes_nothing(bench: Bench) -> None:
    sink, (entry,) = bench.sink(), conversation(1, 3 * BLOCK_IDS)
    await sink.begin_call(ROLLOUT, entry.model_call_id)
    before, executor = bench.fields(), sink._executors.get()
    encoded = codec.encode(entry, max_record_bytes=2**20)
    incarnation = bench.incarnation()
    for first_block in (1, 2, 3):
        call = scripts.put(bench.key, encoded, incarnation=incarnation, first_block=first_block)
        reply = await executor.run(call, Subject(ROLLOUT), deadline=executor.deadline())
        assert (reply.code, bench.fields()) == ("MISSING", before)


@pytest.mark.parametrize("wrong", range(5))
async def test_a_sink_with_a_wrong_belief_repeats_its_put_in_full_exactly_once(
    bench: Bench, wrong: int
) -> None:
    sink, entry = bench.sink(), call_that_ends("c", random_ids(5 * BLOCK_IDS + 7))
    await sink.begin_call(ROLLOUT, "c")
    incarnation = bench.incarnation()
    sink._blocks.learn(ROLLOUT, incarnation, [names_of(entry)[wrong]])
    wire = Wire(sink)
    await sink.put(entry)
    assert wire.answers == ["MISSING", "OK"]
    assert wire.sent_names == [list(names_of(entry)[wrong + 1 :]), list(names_of(entry))]
    wire.forget()
    following = call_that_ends("d", [*ids_of(entry), *random_ids(600, 1)])
    await sink.put(following)
    assert (wire.answers, wire.sent_names) == (["OK"], [list(names_of(following)[5:])])
    await bench.holds([entry, following])


async def test_a_sink_that_was_wrong_once_believes_nothing_else_of_the_rollout(bench: Bench) -> None:
    sink = bench.sink()
    entries = [call_that_ends(f"c{number}", random_ids(1_000, number)) for number in range(3)]
    await sink.begin_call(ROLLOUT, "c0")
    incarnation = bench.incarnation()
    sink._blocks.learn(ROLLOUT, incarnation, [name for entry in entries for name in names_of(entry)])
    wire = Wire(sink)
    for entry in entries:
        await sink.put(entry)
    assert wire.answers == ["MISSING", "OK", "OK", "OK"]
    await bench.holds(entries)


async def test_many_puts_of_a_sink_with_a_wrong_belief_are_all_stored(bench: Bench) -> None:
    sink, prompt = bench.sink(), random_ids(4 * BLOCK_IDS)
    await sink.begin_call(ROLLOUT, "c0")
    incarnation = bench.incarnation()
    sink._blocks.learn(ROLLOUT, incarnation, sequence_of(prompt).names)
    entries = [call_of(f"c{number}", prompt, random_ids(300, number)) for number in range(PUTS)]
    await asyncio.gather(*map(sink.put, entries))
    await bench.holds(entries)


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "unannounced"])
@pytest.mark.parametrize("other", [False, True], ids=["same sequences", "other sequences"])
async def test_a_sink_that_remembers_a_deleted_attempt_serves_the_next_one(
    bench: Bench, *, announced: bool, other: bool
) -> None:
    sink, source = bench.sink(), bench.source()
    for entry in conversation(5):
        await sink.put(entry)
    await source.delete([ROLLOUT])
    entries = conversation(6, seed=int(other))[::-1]
    wire = Wire(sink)
    for entry in entries:
        if announced:
            await sink.begin_call(ROLLOUT, entry.model_call_id)
        await sink.put(entry)
    # The first one, if nobody announced it, is meant for the attempt that the sink remembers.
    assert wire.answers == [*["RETIRED"] * (not announced), *["OK"] * 6]
    assert wire.sent_names[-6:] == [list(names_of(entries[0])), *[[]] * 5]
    await bench.holds(entries)


async def test_a_sink_asks_once_for_the_attempt_that_unannounced_records_are_of(bench: Bench) -> None:
    sink = bench.sink()
    executor = sink._executors.get()
    steps: list[scripts.Step] = []
    run = executor.run

    async def watched(call: scripts.Call, subject: Subject, **options: Any) -> scripts.Reply:
        steps.append(call.step)
        return await run(call, subject, **options)

    executor.run = watched  # type: ignore[method-assign]
    entries = conversation(5)
    for entry in entries:
        await sink.put(entry)
    assert steps == [scripts.Step.JOIN, *[scripts.Step.PUT] * 5]
    await bench.holds(entries)


@pytest.mark.parametrize("how", ["delete", "retire"])
async def test_an_unannounced_record_that_comes_after_its_attempt_ended(bench: Bench, how: str) -> None:
    """It cannot be told from one of the next attempt, which a deleted rollout may have and a retired not."""
    sink, source = bench.sink(), bench.source()
    first, second = conversation(2)
    await sink.put(first)
    await getattr(source, how)([ROLLOUT])
    if how == "retire":
        with pytest.raises(TokenCaptureRetiredError):
            await sink.put(second)
        return
    await sink.put(second)
    await bench.holds([second])


async def test_a_call_left_from_a_deleted_attempt_leaves_no_block_in_the_next_one(bench: Bench) -> None:
    late, sink = bench.sink(), bench.sink()
    left, *entries = conversation(5)
    await late.begin_call(ROLLOUT, left.model_call_id)
    await bench.source().delete([ROLLOUT])
    await sink.put(entries[0])
    with pytest.raises(TokenCaptureRetiredError):
        await late.put(left)
    for entry in entries[1:]:
        await late.begin_call(ROLLOUT, entry.model_call_id)
        await late.put(entry)
    await bench.holds(entries)


@pytest.mark.parametrize(
    "ends", [b"", b"x", b" ", b"y" * 16, b"z" * 47, b"\0" * 16, b"\0\n " * 16, b"w" * 4_800], ids=ascii
)
async def test_damaged_hints_cost_no_record_and_no_block(bench: Bench, ends: bytes) -> None:
    entries = conversation(5)
    for entry in entries:
        sink = bench.sink()
        await sink.begin_call(ROLLOUT, entry.model_call_id)
        change_state(bench.redis, bench.key, ends=ends)
        await sink.put(entry)
        change_state(bench.redis, bench.key, ends=ends)
    await bench.holds(entries)


async def test_a_hint_to_a_block_that_is_not_stored_costs_one_repetition(bench: Bench) -> None:
    first, second = conversation(2, 5 * BLOCK_IDS)
    await bench.sink().put(first)
    change_state(bench.redis, bench.key, ends=names_of(second)[-1])
    sink = bench.sink()
    wire = Wire(sink)
    await sink.put(second)
    assert wire.answers == ["MISSING", "OK"]
    await bench.holds([first, second])


# What is sent


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "unannounced"])
async def test_a_fresh_sink_sends_only_the_blocks_that_are_new(bench: Bench, *, announced: bool) -> None:
    *before, last = conversation(TURNS)
    first = bench.sink()
    for entry in before:
        await first.put(entry)
    fresh = bench.sink()
    wire = Wire(fresh)
    if announced:
        await fresh.begin_call(ROLLOUT, last.model_call_id)
    await fresh.put(last)
    new = names_of(last)[len(names_of(before[-1])) :]
    assert wire.sent_names == [list(new)]
    assert wire.puts[0].nbytes < 3 * NEW_IDS + 3 * BLOCK_IDS + 8 * GENERATED + 1_000
    await bench.holds([*before, last])


@pytest.mark.parametrize("branch", [0, 1, 2])
async def test_a_fresh_sink_knows_the_newest_three_branches(bench: Bench, branch: int) -> None:
    sink, trunk = bench.sink(), random_ids(5 * BLOCK_IDS)
    entries = [call_that_ends(f"b{n}", trunk + random_ids(5 * BLOCK_IDS, n + 1)) for n in range(3)]
    for entry in entries:
        await sink.put(entry)
    following = call_that_ends("next", [*ids_of(entries[branch]), *random_ids(600, 9)])
    fresh = bench.sink()
    wire = Wire(fresh)
    await fresh.begin_call(ROLLOUT, "next")
    await fresh.put(following)
    assert wire.sent_names == [list(names_of(following)[10:])]
    await bench.holds([*entries, following])


async def test_a_branch_that_grows_does_not_crowd_out_the_others(bench: Bench) -> None:
    sink, trunk = bench.sink(), random_ids(5 * BLOCK_IDS)
    other = call_that_ends("other", trunk + random_ids(5 * BLOCK_IDS, 1))
    grown = conversation(6, seed=2)
    for entry in (other, *grown):
        await sink.put(entry)
    following = call_that_ends("next", [*ids_of(other), *random_ids(600, 9)])
    fresh = bench.sink()
    wire = Wire(fresh)
    await fresh.put(following)
    assert wire.sent_names == [list(names_of(following)[10:])]
    await bench.holds([other, *grown, following])


@pytest.mark.parametrize("turns", [1, 3])
async def test_an_end_that_is_sent_again_does_not_crowd_out_the_others(bench: Bench, turns: int) -> None:
    """As sinks do that race, each of which knows of no block."""
    sink = bench.sink()
    other, same = call_that_ends("other", random_ids(1_000)), random_ids(1_000, 1)
    await sink.put(other)
    again = [call_of(f"c{number}", same, [number]) for number in range(3 * turns)]
    for entry in again:
        assert await put_in_full(bench, sink, entry) == "OK"
    assert bench.state()["ends"] == names_of(other)[-1] + sequence_of(same).names[-1]
    await bench.holds([other, *again])


async def test_the_server_receives_a_long_prompt_once(valkey9: RealServer, namespace: str) -> None:
    with RealServer(valkey9.binary) as own:
        bench = Bench(own, namespace)
        sink, prompt = bench.sink(), random_ids(50_000)
        await sink.put(call_of("c0", prompt, []))
        received = int(bench.redis.info("stats")["total_net_input_bytes"])
        entries = [call_of(f"c{number}", prompt, [number]) for number in range(1, 21)]
        for entry in entries:
            await sink.begin_call(ROLLOUT, entry.model_call_id)
            await sink.put(entry)
        received = int(bench.redis.info("stats")["total_net_input_bytes"]) - received
        assert received < 20 * 2_500
        await bench.close()


# At once


async def test_puts_of_one_long_prompt_through_many_sinks_at_once_agree(bench: Bench) -> None:
    sinks, prompt = [bench.sink() for _ in range(SINKS)], random_ids(20 * BLOCK_IDS + 50)
    entries = [call_of(f"c{number}", prompt, random_ids(300, number + 1)) for number in range(PUTS)]
    await asyncio.gather(*(sinks[number % SINKS].put(entry) for number, entry in enumerate(entries)))
    assert len(bench.fields(b"b:")) == 20 + PUTS
    await bench.holds(entries)


async def test_two_sinks_that_race_turn_by_turn_agree(bench: Bench) -> None:
    sinks = [bench.sink(), bench.sink()]
    entries = []
    for turn, ids in enumerate(growing_conversation(15, 300)):
        pair = [call_that_ends(f"{turn}.{number}", ids) for number in range(2)]
        await asyncio.gather(*(sink.put(entry) for sink, entry in zip(sinks, pair, strict=True)))
        entries += pair
    await bench.holds(entries)


def test_processes_that_converse_in_one_rollout_share_their_prompt(
    valkey9: RealServer, namespace: str
) -> None:
    factory = functools.partial(RedisTokenSink, valkey9.url, namespace=namespace, timeout_s=60)
    workers = [f"w{number}" for number in range(PROCESSES)]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.starmap(
            converse_from_a_process, [(factory, ROLLOUT, worker, 10) for worker in workers], chunksize=1
        )
        pool.close()
        pool.join()
    bench = Bench(valkey9, namespace)
    entries = [entry for worker in workers for entry in conversation_of(ROLLOUT, worker, 10)]

    async def check() -> None:
        await bench.holds(entries)
        await bench.close()

    asyncio.run(check())


# A block that is gone


async def test_a_missing_block_costs_the_calls_that_need_it_and_no_other(bench: Bench) -> None:
    sink, trunk = bench.sink(), random_ids(600)
    entries = [
        call_that_ends("short", random_ids(200)),
        call_that_ends("trunk", trunk),
        *(call_that_ends(f"b{number}", trunk + random_ids(600, number + 1)) for number in range(3)),
        call_that_ends("apart", random_ids(900, 7)),
    ]
    for entry in entries:
        await sink.put(entry)
    dump: Any = bench.redis.dump(bench.key)
    for field in bench.fields(b"b:"):
        bench.redis.restore(bench.key.decode(), 0, dump, replace=True)
        bench.redis.hdel(bench.key.decode(), field)
        needy = {entry.model_call_id for entry in entries if field[2:] in names_of(entry)}
        snapshot = await bench.source().freeze(ROLLOUT)
        assert snapshot.incomplete
        assert {each.model_call_id for each in snapshot.reasons if each.code == "corrupt"} == needy
        assert dumps(snapshot.entries) == dumps(
            entry for entry in entries if entry.model_call_id not in needy
        )


async def test_a_first_block_that_is_gone_is_told_in_few_words(bench: Bench) -> None:
    entry = call_that_ends("c", random_ids(100 * BLOCK_IDS))
    await bench.sink().put(entry)
    bench.redis.hdel(bench.key.decode(), b"b:" + names_of(entry)[0])
    reasons = (await bench.source().freeze(ROLLOUT)).reasons
    assert "100 token blocks" in " ".join(reason.detail for reason in reasons)
    assert len(reasons) < 6


# Reading arrays, and without holding the event loop


@pytest.mark.parametrize("new_ids", [300, 500, 512])
async def test_arrays_of_a_growing_rollout_are_views_of_one_buffer(bench: Bench, new_ids: int) -> None:
    sink, entries = bench.sink(), conversation(8, new_ids)
    for entry in entries:
        await sink.put(entry)
    for chunk_bytes in (4 * 2**20, 1):
        read: Any = (await bench.source(chunk_bytes=chunk_bytes).freeze_arrays(ROLLOUT)).entries
        whole = max((entry.prompt_token_ids for entry in read), key=len)
        assert all(np.shares_memory(entry.prompt_token_ids, whole) for entry in read)
        earlier = [entry for entry in read if len(entry.prompt_token_ids) < len(whole)]
        assert all(np.shares_memory(entry.generation_token_ids, whole) for entry in earlier)


class ThreadNamingEntry(TokenEntry):
    """Says which thread built it."""

    def model_post_init(self, _: Any, /) -> None:
        built_on.add(threading.current_thread())


built_on: set[threading.Thread] = set()


@pytest.mark.parametrize(("ids", "in_the_loop"), [(300, True), (150_000, False)], ids=["small", "large"])
async def test_only_a_large_rollout_is_built_on_a_thread(
    bench: Bench, ids: int, *, in_the_loop: bool
) -> None:
    entry = call_of("c", random_ids(ids), [])
    await bench.sink().put(entry)
    built_on.clear()
    for chunk_bytes in (4 * 2**20, 1_000):
        snapshot = await bench.source(entry_type=ThreadNamingEntry, chunk_bytes=chunk_bytes).freeze(ROLLOUT)
        assert dumps(snapshot.entries) == dumps([entry])
    assert (built_on == {threading.main_thread()}) == in_the_loop
    assert (threading.main_thread() in built_on) == in_the_loop
