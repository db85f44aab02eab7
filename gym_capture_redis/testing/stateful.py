"""A hypothesis state machine: random histories on a backend, compared with the model step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from gym_capture_redis.errors import CallConflictError, TokenCaptureFrozenError, TokenCaptureRetiredError
from gym_capture_redis.protocols import IncompleteCode
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.testing.backend import contents, exact
from gym_capture_redis.testing.model import Ended, ModelSnapshot, ModelTransport, Outcome, Record, Writer

ROLLOUTS = ("rollout-1", "rollout-2", "rollout-3")
CALLS = ("call-1", "call-2", "вызов 3")
CODES = ("context-length", "context", "overloaded")
METHODS = ("put", "put", "put", "begin_call", "begin_call", "refuse", "mark_incomplete")

DAMAGE = {IncompleteCode.CORRUPT, IncompleteCode.TAMPERED}
"""Reasons that no history may end with: nobody touched the backend behind the clients."""

_OUTCOMES: dict[type[Exception], Outcome] = {
    TokenCaptureFrozenError: Outcome.FROZEN,
    TokenCaptureRetiredError: Outcome.RETIRED,
    CallConflictError: Outcome.CONFLICT,
}

rollouts = st.sampled_from(ROLLOUTS)


@dataclass(frozen=True)
class Clients:
    """How to make new clients of one fresh and empty backend."""

    make_sink: Callable[[], Any]
    make_source: Callable[[], Any]


@dataclass(frozen=True)
class SeenSnapshot:
    """A snapshot as a trainer remembers it."""

    rollout_id: str
    snapshot_id: str
    version: int


@dataclass(frozen=True)
class WriterStep:
    """What one of the two workers does for a call; ``choice`` is which content or refusal code it uses."""

    sink: int
    method: str
    call: str
    choice: int


def writer_steps() -> st.SearchStrategy[list[WriterStep]]:
    """Several steps for one rollout, mostly puts: what happens while it is open takes more than one."""
    return st.lists(
        st.builds(
            WriterStep,
            sink=st.integers(0, 1),
            method=st.sampled_from(METHODS),
            call=st.sampled_from(CALLS),
            choice=st.sampled_from((0, 0, 0, 1, 2)),
        ),
        min_size=3,
        max_size=10,
    )


def json_values() -> st.SearchStrategy[Any]:
    """Values that JSON carries unchanged, down to the bit."""
    leaves: st.SearchStrategy[Any] = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    )


@st.composite
def entry_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a valid entry, without its ids."""
    token_ids = st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 300), max_size=4)
    width = draw(st.sampled_from((32, 64)))
    log_prob = st.floats(allow_nan=False, allow_infinity=False, width=width)  # type: ignore[arg-type]
    generation = draw(token_ids)
    size = len(generation)
    parent = draw(st.sampled_from((None, None, None, *CALLS)))
    return {
        "prompt_token_ids": draw(token_ids),
        "generation_token_ids": generation,
        "generation_log_probs": draw(st.lists(log_prob, min_size=size, max_size=size)),
        "routed_experts": draw(json_values()),
        "extra": draw(json_values()),
        "created_at": draw(st.floats(0, 2e9)),
        "parent_call_id": parent,
        "parent_resolution": None if parent is None else "resolved",
    }


class TokenTransportMachine(RuleBasedStateMachine):
    """Two workers and a trainer on a few rollouts. ``token_transport_machine`` adds the backend."""

    snapshots = Bundle("snapshots")

    def __init__(self, open_backend: Callable[[], Clients]) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._clients = open_backend()
        self._model = ModelTransport()
        self._sinks = [self._clients.make_sink() for _ in range(2)]
        self._writers = [Writer(), Writer()]
        self._source = self._clients.make_source()
        self._snapshot_ids: dict[int, str] = {}
        self._contents: list[dict[str, Any]] = []

    def teardown(self) -> None:
        """Close the clients and their event loop."""
        for client in (*self._sinks, self._source):
            self._runner.run(client.close())
        self._runner.close()

    @initialize(drawn=st.lists(entry_fields(), min_size=3, max_size=3))
    def think_of_contents(self, drawn: list[dict[str, Any]]) -> None:
        """Choose the contents of this history: so few that calls meet identical and other ones."""
        self._contents = drawn

    @rule(target=snapshots, rollout_id=rollouts, steps=writer_steps(), to_the_end=st.booleans())
    def work(self, rollout_id: str, steps: list[WriterStep], to_the_end: bool) -> Any:
        """Let the workers do something for a rollout, step by step, until the trainer freezes it."""
        for step in steps:
            getattr(self, f"_{step.method}")(rollout_id, step)
        return self._freeze(rollout_id) if to_the_end else multiple()

    @rule(target=snapshots, rollout_id=rollouts)
    def freeze(self, rollout_id: str) -> Any:
        """Freeze a rollout, whatever became of it."""
        return self._freeze(rollout_id)

    @rule(snapshot=snapshots)
    def drop(self, snapshot: SeenSnapshot) -> None:
        """Drop a snapshot that a trainer holds; others may have moved on, or dropped it, since."""
        self._drop(snapshot.rollout_id, snapshot.snapshot_id, snapshot.version)

    @rule(snapshot=snapshots, rollout_id=rollouts, newer=st.integers(-1, 1))
    def drop_another(self, snapshot: SeenSnapshot, rollout_id: str, newer: int) -> None:
        """Drop what resembles a snapshot: of another rollout, or at another version."""
        self._drop(rollout_id, snapshot.snapshot_id, snapshot.version + newer)

    @rule(method=st.sampled_from(("retire", "delete")), rollout_ids=st.lists(rollouts, max_size=3))
    def end(self, method: str, rollout_ids: list[str]) -> None:
        """Retire or delete a batch."""
        expected = getattr(self._model, method)(rollout_ids)
        assert Ended(**self._runner.run(getattr(self._source, method)(rollout_ids))) == expected

    @rule(sink=st.integers(0, 1))
    def replace_a_worker_and_the_trainer(self, sink: int) -> None:
        """Start a new worker, which has announced nothing, and a new trainer."""
        for client in (self._sinks[sink], self._source):
            self._runner.run(client.close())
        self._sinks[sink], self._writers[sink] = self._clients.make_sink(), Writer()
        self._source = self._clients.make_source()

    def _put(self, rollout_id: str, step: WriterStep) -> None:
        entry, record = _entry_and_record(rollout_id, step.call, self._contents[step.choice])
        expected = self._model.put(self._writers[step.sink], rollout_id, step.call, record)
        assert self._outcome(self._sinks[step.sink].put(entry)) == expected

    def _begin_call(self, rollout_id: str, step: WriterStep) -> None:
        expected = self._model.begin_call(self._writers[step.sink], rollout_id, step.call)
        assert self._outcome(self._sinks[step.sink].begin_call(rollout_id, step.call)) == expected

    def _mark_incomplete(self, rollout_id: str, step: WriterStep) -> None:
        expected = self._model.mark_incomplete(self._writers[step.sink], rollout_id, step.call)
        assert self._outcome(self._sinks[step.sink].mark_incomplete(rollout_id, step.call)) == expected

    def _refuse(self, rollout_id: str, step: WriterStep) -> None:
        code = CODES[step.choice]
        expected = self._model.refuse(self._writers[step.sink], rollout_id, step.call, code)
        refusal = self._sinks[step.sink].record_engine_refusal(rollout_id, model_call_id=step.call, code=code)
        assert self._outcome(refusal) == expected

    def _freeze(self, rollout_id: str) -> Any:
        """Compare everything that the snapshot shows."""
        expected = self._model.freeze(rollout_id)
        if expected is None:
            assert self._outcome(self._source.freeze(rollout_id)) == Outcome.RETIRED
            return multiple()
        snapshot = self._runner.run(self._source.freeze(rollout_id))
        assert snapshot.rollout_id == rollout_id
        assert (snapshot.version, snapshot.incomplete) == (expected.version, expected.incomplete)
        _assert_plausible(snapshot, expected)
        assert contents(snapshot) == {call: record.content for call, record in expected.records.items()}
        assert {each.model_call_id: each.code for each in snapshot.refusals} == expected.refusals
        known = self._snapshot_ids.setdefault(expected.snapshot_id, snapshot.snapshot_id)
        assert snapshot.snapshot_id == known
        assert len(set(self._snapshot_ids.values())) == len(self._snapshot_ids)
        return SeenSnapshot(rollout_id, snapshot.snapshot_id, snapshot.version)

    def _drop(self, rollout_id: str, snapshot_id: str, version: int) -> None:
        (model_id,) = [own for own, theirs in self._snapshot_ids.items() if theirs == snapshot_id]
        expected = self._model.drop(rollout_id, snapshot_id=model_id, version=version)
        drop = self._source.drop(rollout_id, snapshot_id=snapshot_id, version=version)
        assert self._runner.run(drop) == expected

    def _outcome(self, step: Awaitable[None]) -> Outcome:
        """Run a step; an error of a kind that the contract does not name goes through."""

        async def run() -> Outcome:
            try:
                await step
            except tuple(_OUTCOMES) as error:
                return next(outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind))
            return Outcome.OK

        return self._runner.run(run())


def token_transport_machine(open_backend: Callable[[], Clients]) -> type[TokenTransportMachine]:
    """Return a state machine for ``hypothesis.stateful.run_state_machine_as_test``.

    ``open_backend`` is called once for each history and must give clients of an empty backend, such
    as a fresh namespace.
    """

    class Machine(TokenTransportMachine):
        def __init__(self) -> None:
            super().__init__(open_backend)

    return Machine


def _assert_plausible(snapshot: Any, expected: ModelSnapshot) -> None:
    """Check the reasons, where a backend gives any: no damage, and no call lost that is not."""
    reasons = getattr(snapshot, "reasons", ())
    assert not {reason.code for reason in reasons} & DAMAGE
    lost = {reason.model_call_id for reason in reasons if reason.code == IncompleteCode.LOST_CALL}
    assert lost <= expected.open_calls


def _entry_and_record(rollout_id: str, call: str, fields: dict[str, Any]) -> tuple[Any, Record]:
    """Return the entry for a backend and the record for the model; no call is its own parent."""
    if fields["parent_call_id"] == call:
        fields = fields | {"parent_call_id": None, "parent_resolution": None}
    entry = TokenEntry(rollout_id=rollout_id, model_call_id=call, **fields)
    return entry, Record(exact(entry), fields["parent_call_id"])
