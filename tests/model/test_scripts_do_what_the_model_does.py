"""Random histories told to the real scripts and to the model's steps: the same replies, the same counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import fakeredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model.healing import HealRules, Kept, heal, snapshot_of, verify
from model.steps import STEPS, Answer, Rollout, Stored
from support.names_given import with_names_as_given

from gym_capture_redis import scripts
from gym_capture_redis.keys import refusal_row
from gym_capture_redis.scripts import Call, Dialect, Frozen, Reply, Step

KEY = b"rollout"
DIALECT = Dialect(flagged=False)
NO_BLOCK = bytes(16)
ROWS = 10**9
"""Bytes to read at once: all."""


@pytest.fixture(autouse=True, scope="module")
def _names_as_given() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        with_names_as_given(patch)
        yield


incarnations = st.sampled_from(["i1", "i2"])
named = st.sampled_from(["i1", "i2", ""])
calls = st.sampled_from(["a", "b"])
contents = st.sampled_from(["A", "Z"])
blocks = st.sampled_from(["", "k", "l"])
several = st.sampled_from([(), ("k",), ("k", "l")])
codes = st.sampled_from(["full", "busy"])
mark_ids = st.sampled_from(["0123456789abcdef", "fedcba9876543210"])
snapshots = st.sampled_from(["s1", "s2"])
numbers = st.integers(0, 6)

CAN_BE_LOST = {
    "begin": st.tuples(incarnations, calls),
    "stage": st.tuples(incarnations, st.sampled_from(["k", "l"])),
    "put": st.tuples(incarnations, calls, contents, blocks, several, several),
    "mark": st.tuples(incarnations, named, st.sampled_from(["a", "b", ""]), mark_ids),
    "refuse": st.tuples(incarnations, named, calls, codes),
}
OTHERS = {
    "join": st.tuples(incarnations),
    "freeze": st.tuples(incarnations, snapshots),
    "read": st.tuples(incarnations, snapshots, numbers),
    "drop": st.tuples(snapshots, numbers),
    "peek": st.tuples(),
    "retire": st.tuples(named, incarnations),
    "delete": st.tuples(incarnations),
}


class Told(NamedTuple):
    """A step, or ``heal``, ``verify``; or ``forget``: the server loses the newest so many of them."""

    what: str
    args: tuple[Any, ...]


def told(steps: dict[str, st.SearchStrategy[tuple[Any, ...]]]) -> st.SearchStrategy[Told]:
    return st.one_of([st.builds(Told, st.just(name), args) for name, args in steps.items()])


usual = told({name: CAN_BE_LOST[name] for name in ("begin", "put", "mark")})
healing = st.builds(
    lambda step, own, incarnation, new: Told("heal", (step, own, incarnation, new)),
    told(CAN_BE_LOST),
    numbers,
    incarnations,
    incarnations,
)
traces = st.sampled_from(["n:a", "r:a", "n:b", "r:b", "f:a", "x:a"])
verifying = st.builds(
    lambda *args: Told("verify", args), incarnations, incarnations, numbers, numbers, traces
)
forgetting = st.builds(lambda back: Told("forget", (back,)), st.integers(1, 4))
histories = st.lists(
    st.one_of(usual, told(CAN_BE_LOST), told(OTHERS), healing, healing, verifying, forgetting), max_size=14
)


def block_name(name: str) -> bytes:
    return name.encode().ljust(16, b".") if name else NO_BLOCK


def real_call(step: Told) -> Call:  # noqa: PLR0911 - one for each step
    """The step as the library sends it."""
    match step:
        case Told("put", (incarnation, call, content, base, parts, names)):
            row = b"r" + content.encode() * 32
            values = [word for name in names for word in (b"b:" + block_name(name), b"value")]
            joined = [b"".join(map(block_name, some)) for some in (parts, names)]
            return Call(
                Step.PUT, KEY, (incarnation, call, row, b"record", 1, block_name(base), *joined, *values)
            )
        case Told("stage", (incarnation, name)):
            return scripts.stage(KEY, block_name(name), b"value", incarnation=incarnation)
        case Told("mark", (new, incarnation, call, mark_id)):
            return Call(Step.MARK, KEY, (new, incarnation, call, "marked", mark_id))
        case Told("refuse", (new, incarnation, call, code)):
            return Call(Step.REFUSE, KEY, (new, incarnation, call, refusal_row(code), b"details"))
        case Told("freeze", (new, snapshot)):
            return scripts.freeze(KEY, new_incarnation=new, new_snapshot_id=snapshot, max_bytes=ROWS)
        case Told("read", (incarnation, snapshot, version)):
            return Call(Step.READ, KEY, (incarnation, snapshot, version, 1, ROWS))
        case Told("heal", (inner, own, incarnation, new)):
            return scripts.heal(real_call(inner), seq=own, incarnation=incarnation, new_incarnation=new)
        case Told("verify", (new, incarnation, seq, own, trace)):
            return scripts.verify(
                KEY,
                new_incarnation=new,
                incarnation=incarnation,
                seq=seq,
                own_seq=own,
                own_trace=trace.encode(),
            )
        case Told("drop" | "retire", args):
            return Call(Step[step.what.upper()], KEY, (*args, 60))
    return Call(Step[step.what.upper()], KEY, step.args)


def model_answer(there: Stored, step: Told) -> Answer:
    match step:
        case Told("heal", (inner, own, incarnation, new)):
            kept = Kept(inner.what, inner.args, incarnation, own, 1)
            return heal(there, STEPS[inner.what], kept, new, HealRules())
        case Told("verify", args):
            return verify(there, *args)
    return STEPS[step.what](there, *step.args)


def real_answer(server: fakeredis.FakeRedis, call: Call) -> Reply:
    raw = server.execute_command(  # type: ignore[no-untyped-call]
        *scripts.command([call], DIALECT, by_source=True)
    )
    (reply,) = scripts.read_replies(raw, 1, "")
    assert isinstance(reply, Reply), reply
    return reply


def restore(server: fakeredis.FakeRedis, fields: dict[bytes, bytes]) -> None:
    server.delete(KEY)
    if fields:
        server.hset(KEY, mapping=fields)  # type: ignore[arg-type]


def compare_frozen(reply: Reply, state: Rollout) -> None:
    """What a reader is told of a frozen rollout is what the model says that it sees."""
    facts, seen = Frozen.parse(reply).facts, snapshot_of(state)
    counts = [
        len(some) for some in (seen.records, seen.open_calls, seen.failures, seen.refusals, state.blocks)
    ]
    assert [facts.records, facts.intents, facts.failures, facts.refusals, facts.blocks] == counts
    assert (facts.hash_fields != facts.expected_hash_fields(reply.seq)) == seen.steps_lost


def tell(history: Sequence[Told]) -> None:
    """Tell a history to both, and compare all that they answer."""
    server = fakeredis.FakeRedis()
    there: Stored = None
    states: list[tuple[Stored, dict[bytes, bytes]]] = [(None, {})]
    for step in (*history, Told("freeze", ("i1", "s1"))):
        if step.what == "forget":
            states = states[: -step.args[0]] or states[:1]
            there, fields = states[-1]
            restore(server, fields)
            continue
        there, answer = model_answer(there, step)
        reply = real_answer(server, real_call(step))
        assert reply[:4] == answer[:4], step
        if step.what in ("peek", "retire", "delete") and reply.rest:
            assert reply.rest == answer.rest, step
        if step.what == "freeze" and reply.code == "OK":
            assert there is not None
            compare_frozen(reply, there)
        states.append((there, server.hgetall(KEY)))  # type: ignore[arg-type]


@settings(derandomize=True, max_examples=200)
@given(histories)
def test_the_scripts_do_what_the_model_does(history: list[Told]) -> None:
    tell(history)
