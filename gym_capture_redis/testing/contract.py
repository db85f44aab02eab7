"""``TokenTransportContract``: the whole contract as one class of tests for a backend to subclass."""

# ruff: noqa: D102 - a test's name is its sentence

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gym_capture_redis.testing.backend import TransportUnderTest, contents, exact, needs
from gym_capture_redis.testing.lifecycle import RETIREMENTS, LifecycleContract
from gym_capture_redis.testing.recording import RecordingContract


class IntentContract(TransportUnderTest):
    """``begin_call``: a call that was announced and never came is a hole."""

    async def test_an_intent_without_a_record_makes_it_incomplete(self) -> None:
        await self.begin()
        snapshot = await self.freeze()
        assert (snapshot.entries, snapshot.version, snapshot.incomplete) == ((), 1, True)

    async def test_one_intent_without_a_record_is_enough(self) -> None:
        for call in ("call-1", "call-2", "call-3"):
            await self.begin(call)
        for call in ("call-1", "call-3"):
            await self.put(self.entry(call))
        snapshot = await self.freeze()
        assert (len(snapshot.entries), snapshot.version, snapshot.incomplete) == (2, 3, True)

    async def test_a_record_settles_the_intent(self) -> None:
        await self.begin()
        await self.put(self.entry())
        snapshot = await self.freeze()
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    async def test_a_record_without_an_intent_is_fine(self) -> None:
        await self.begin("call-1")
        await self.put(self.entry("call-1"))
        await self.put(self.entry("call-2"))
        assert not (await self.freeze()).incomplete

    async def test_repeating_an_intent_is_fine(self) -> None:
        for _ in range(3):
            await self.begin()
        await self.put(self.entry())
        snapshot = await self.freeze()
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    async def test_repeating_an_intent_after_its_record_does_not_reopen_it(self) -> None:
        await self.begin()
        await self.put(self.entry())
        await self.begin()
        snapshot = await self.freeze()
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    async def test_a_first_intent_after_the_record_does_not_open_one(self) -> None:
        await self.put(self.entry())
        await self.begin()
        assert not (await self.freeze()).incomplete

    async def test_a_mark_does_not_settle_an_intent_and_a_record_does_not_undo_a_mark(self) -> None:
        await self.begin()
        await self.mark()
        await self.put(self.entry())
        snapshot = await self.freeze()
        assert (len(snapshot.entries), snapshot.version, snapshot.incomplete) == (1, 3, True)

    async def test_a_put_by_another_worker_settles_the_intent(self) -> None:
        announcing, storing = self.sink(), self.sink()
        await announcing.begin_call(self.rollout_id, "call-1")
        await storing.put(self.entry())
        await announcing.put(self.entry())
        snapshot = await self.freeze()
        assert (snapshot.version, snapshot.incomplete) == (2, False)


class RefusalContract(TransportUnderTest):
    """``record_engine_refusal``: a call that the engine refused is settled without an entry."""

    @needs("has_refusals")
    async def test_a_refusal_is_listed_moves_the_version_and_is_no_hole(self) -> None:
        await self.refuse("call-1", "context-length")
        snapshot = await self.freeze()
        assert [(each.model_call_id, each.code) for each in snapshot.refusals] == [
            ("call-1", "context-length")
        ]
        assert (snapshot.entries, snapshot.version, snapshot.incomplete) == ((), 2, False)

    @needs("has_refusals")
    async def test_a_refusal_settles_the_intent(self) -> None:
        await self.begin()
        await self.refuse()
        snapshot = await self.freeze()
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    @needs("has_refusals")
    async def test_repeating_an_intent_after_its_refusal_does_not_reopen_it(self) -> None:
        await self.refuse()
        await self.begin()
        assert not (await self.freeze()).incomplete

    @needs("has_refusals")
    async def test_the_details_of_a_refusal_are_kept(self) -> None:
        details = {
            "limit": 4096,
            "prompt_tokens": 5000,
            "message": "zu lang 🤖",
            "nested": {"a": [None, 1.5]},
        }
        await self.sink().record_engine_refusal(
            self.rollout_id, model_call_id="call-1", code="context-length", **details
        )
        (refusal,) = (await self.freeze()).refusals
        assert dict(refusal.details) == details

    @needs("has_refusals")
    async def test_the_same_code_again_does_nothing(self) -> None:
        await self.refuse("call-1", "context-length")
        await self.refuse("call-1", "context-length")
        snapshot = await self.freeze()
        assert (len(snapshot.refusals), snapshot.version, snapshot.incomplete) == (1, 2, False)

    @needs("has_refusals")
    @pytest.mark.parametrize("code", ["context", "context-length-2", "Context-Length"])
    async def test_another_code_raises_and_keeps_the_first(self, code: str) -> None:
        await self.refuse("call-1", "context-length")
        with pytest.raises(ValueError, match=r"."):
            await self.refuse("call-1", code)
        snapshot = await self.freeze()
        assert [each.code for each in snapshot.refusals] == ["context-length"]

    @needs("has_refusals")
    async def test_a_record_for_a_refused_call_is_a_conflict(self) -> None:
        await self.refuse()
        with pytest.raises(self.conflict_error):
            await self.put(self.entry())
        snapshot = await self.freeze()
        assert (snapshot.entries, snapshot.version, snapshot.incomplete) == ((), 3, True)

    @needs("has_refusals")
    async def test_a_refusal_for_a_recorded_call_is_a_conflict(self) -> None:
        entry = await self.given_open()
        with pytest.raises(self.conflict_error):
            await self.refuse()
        snapshot = await self.freeze()
        assert (contents(snapshot), snapshot.refusals) == ({"call-1": exact(entry)}, ())
        assert (snapshot.version, snapshot.incomplete) == (3, True)

    @needs("has_refusals")
    async def test_several_calls_may_be_refused(self) -> None:
        for call in ("call-1", "call-2"):
            await self.refuse(call)
        await self.put(self.entry("call-3"))
        snapshot = await self.freeze()
        assert {each.model_call_id for each in snapshot.refusals} == {"call-1", "call-2"}
        assert (len(snapshot.entries), snapshot.version, snapshot.incomplete) == (1, 4, False)

    @needs("has_refusals")
    async def test_a_refusal_is_refused_after_freeze(self) -> None:
        snapshot = await self.given_frozen()
        with pytest.raises(self.frozen_error):
            await self.refuse("call-2")
        await self.assert_unchanged(snapshot)

    @needs("has_refusals")
    async def test_the_same_refusal_after_freeze_is_a_no_op_and_another_code_is_refused(self) -> None:
        await self.refuse("call-1", "context-length")
        snapshot = await self.freeze()
        await self.refuse("call-1", "context-length")
        with pytest.raises(self.frozen_error):
            await self.refuse("call-1", "overloaded")
        await self.assert_unchanged(snapshot)

    @needs("has_refusals")
    @needs("has_retire")
    async def test_a_rollout_that_holds_nothing_but_a_refusal_is_absent_when_it_is_retired(self) -> None:
        await self.refuse()
        ended = await self.source().retire([self.rollout_id])
        assert ended == {"removed": [], "absent": [self.rollout_id]}

    @needs("has_refusals")
    async def test_a_refusal_for_a_recorded_call_is_refused_after_freeze_and_marks_nothing(self) -> None:
        snapshot = await self.given_frozen()
        with pytest.raises(self.frozen_error):
            await self.refuse("call-1")
        await self.assert_unchanged(snapshot)

    @needs("has_refusals")
    async def test_a_record_for_a_refused_call_is_refused_after_freeze_and_marks_nothing(self) -> None:
        await self.refuse("call-1")
        snapshot = await self.freeze()
        with pytest.raises(self.frozen_error):
            await self.put(self.entry("call-1"))
        await self.assert_unchanged(snapshot)

    @RETIREMENTS
    @needs("has_refusals")
    async def test_a_refusal_is_refused_after_retirement(self, retired_by: str) -> None:
        snapshot = await self.given_retired(retired_by)
        with pytest.raises(self.retired_error):
            await self.refuse("call-2")
        await self.assert_still_retired(snapshot)


class LateWriterContract(TransportUnderTest):
    """A worker that outlives its attempt never touches the next one under the same rollout id."""

    async def given_late_writer(self, end: str = "delete") -> Any:
        """Return a sink that announced call-1 to an attempt that was ended by ``end``."""
        self.require("fences_attempts")
        self.require(f"has_{end}")
        late = self.sink()
        await late.begin_call(self.rollout_id, "call-1")
        await getattr(self.source(), end)([self.rollout_id])
        return late

    @pytest.mark.parametrize("end", ["retire", "delete"])
    async def test_a_late_put_is_refused_and_brings_nothing_back(self, end: str) -> None:
        late = await self.given_late_writer(end)
        with pytest.raises(self.retired_error):
            await late.put(self.entry())
        await self.source().delete([self.rollout_id])
        snapshot = await self.freeze()
        assert (snapshot.entries, snapshot.version, snapshot.incomplete) == ((), 1, False)

    @pytest.mark.parametrize("end", ["retire", "delete"])
    async def test_a_late_mark_is_refused_and_brings_nothing_back(self, end: str) -> None:
        late = await self.given_late_writer(end)
        with pytest.raises(self.retired_error):
            await late.mark_incomplete(self.rollout_id, "call-1")
        await self.source().delete([self.rollout_id])
        snapshot = await self.freeze()
        assert (snapshot.version, snapshot.incomplete) == (1, False)

    @pytest.mark.parametrize("end", ["retire", "delete"])
    @needs("has_refusals")
    async def test_a_late_refusal_is_refused_and_brings_nothing_back(self, end: str) -> None:
        late = await self.given_late_writer(end)
        with pytest.raises(self.retired_error):
            await late.record_engine_refusal(self.rollout_id, model_call_id="call-1", code="late")
        await self.source().delete([self.rollout_id])
        snapshot = await self.freeze()
        assert (snapshot.refusals, snapshot.version) == ((), 1)

    async def test_a_late_put_does_not_join_the_new_attempt(self) -> None:
        late = await self.given_late_writer()
        entry = self.entry("call-2")
        await self.put(entry)
        with pytest.raises(self.retired_error):
            await late.put(self.entry("call-1"))
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-2": exact(entry)}
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    async def test_a_late_put_is_no_conflict_in_the_new_attempt(self) -> None:
        late = await self.given_late_writer()
        entry = await self.given_open()
        with pytest.raises(self.retired_error):
            await late.put(self.other())
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    async def test_a_late_put_does_not_settle_an_intent_of_the_new_attempt(self) -> None:
        late = await self.given_late_writer()
        await self.begin("call-1")
        with pytest.raises(self.retired_error):
            await late.put(self.entry())
        snapshot = await self.freeze()
        assert (snapshot.entries, snapshot.version, snapshot.incomplete) == ((), 1, True)

    async def test_a_late_mark_does_not_mark_the_new_attempt(self) -> None:
        late = await self.given_late_writer()
        await self.given_open()
        with pytest.raises(self.retired_error):
            await late.mark_incomplete(self.rollout_id, "call-1")
        snapshot = await self.freeze()
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    @needs("has_refusals")
    async def test_a_late_refusal_does_not_settle_an_intent_of_the_new_attempt(self) -> None:
        late = await self.given_late_writer()
        await self.begin("call-1")
        with pytest.raises(self.retired_error):
            await late.record_engine_refusal(self.rollout_id, model_call_id="call-1", code="late")
        snapshot = await self.freeze()
        assert (snapshot.refusals, snapshot.version, snapshot.incomplete) == ((), 1, True)

    async def test_the_late_writer_may_announce_itself_to_the_new_attempt(self) -> None:
        late = await self.given_late_writer()
        await late.begin_call(self.rollout_id, "call-1")
        entry = self.entry()
        await late.put(entry)
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert not snapshot.incomplete

    @needs("fences_attempts")
    async def test_an_announced_put_is_refused_after_a_drop(self) -> None:
        late = self.sink()
        await late.begin_call(self.rollout_id, "call-1")
        snapshot = await self.freeze()
        await self.drop(snapshot)
        with pytest.raises(self.retired_error):
            await late.put(self.entry())
        await self.assert_still_retired(snapshot)


class ConcurrencyContract(TransportUnderTest):
    """Many workers at once, and callers that leave."""

    async def test_puts_of_many_workers_are_all_stored(self) -> None:
        entries = [self.entry(f"call-{number}") for number in range(40)]
        sinks = [self.sink() for _ in range(4)]
        await asyncio.gather(*(sinks[number % 4].put(entry) for number, entry in enumerate(entries)))
        snapshot = await self.freeze()
        assert contents(snapshot) == {entry.model_call_id: exact(entry) for entry in entries}
        assert (snapshot.version, snapshot.incomplete) == (41, False)

    async def test_identical_puts_at_once_store_one_record(self) -> None:
        await asyncio.gather(*(self.put(self.entry()) for _ in range(8)))
        snapshot = await self.freeze()
        assert (len(snapshot.entries), snapshot.version, snapshot.incomplete) == (1, 2, False)

    async def test_of_conflicting_puts_at_once_exactly_one_is_acknowledged(self) -> None:
        entries = [self.entry(created_at=float(number)) for number in range(8)]
        outcomes = await asyncio.gather(*map(self.put, entries), return_exceptions=True)
        stored = [entry for entry, outcome in zip(entries, outcomes, strict=True) if outcome is None]
        assert [type(outcome) for outcome in outcomes if outcome is not None] == [self.conflict_error] * 7
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(stored[0])}
        assert (snapshot.version, snapshot.incomplete) == (9, True)

    async def test_a_snapshot_holds_exactly_the_puts_that_were_acknowledged(self) -> None:
        entries = [self.entry(f"call-{number}") for number in range(30)]
        sink, source = self.sink(), self.source()
        puts = [asyncio.ensure_future(sink.put(entry)) for entry in entries]
        await puts[0]
        snapshot = await source.freeze(self.rollout_id)
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        refused = [outcome for outcome in outcomes if outcome is not None]
        assert all(isinstance(outcome, self.frozen_error) for outcome in refused)
        acknowledged = zip(entries, outcomes, strict=True)
        assert contents(snapshot) == {
            entry.model_call_id: exact(entry) for entry, outcome in acknowledged if outcome is None
        }
        await self.assert_unchanged(snapshot)

    async def test_freezes_at_once_give_one_snapshot(self) -> None:
        await self.given_open()
        snapshots = await asyncio.gather(*(self.freeze() for _ in range(6)))
        assert {(each.snapshot_id, each.version) for each in snapshots} == {(snapshots[0].snapshot_id, 2)}

    async def test_a_cancelled_put_is_stored_or_its_intent_tells(self) -> None:
        sink = self.sink()
        await sink.begin_call(self.rollout_id, "call-1")
        cancelled = asyncio.ensure_future(sink.put(self.entry("call-1")))
        await asyncio.sleep(0)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        await sink.put(self.entry("call-2"))
        snapshot = await self.freeze()
        assert "call-2" in contents(snapshot)
        assert snapshot.incomplete is ("call-1" not in contents(snapshot))

    async def test_a_cancelled_put_can_be_repeated(self) -> None:
        sink, entry = self.sink(), self.entry()
        cancelled = asyncio.ensure_future(sink.put(entry))
        await asyncio.sleep(0)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        await sink.put(entry)
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert (snapshot.version, snapshot.incomplete) == (2, False)


class ClientContract(TransportUnderTest):
    """What sinks and sources are as objects, and what their errors say."""

    async def test_clients_define_neither_length_nor_truth(self) -> None:
        for client in (self.sink(), self.source()):
            assert not hasattr(type(client), "__len__")
            assert not hasattr(type(client), "__bool__")
            assert (client or None) is client

    async def test_clients_are_made_where_no_event_loop_runs(self) -> None:
        sink = await asyncio.to_thread(self.sink)
        source = await asyncio.to_thread(self.source)
        await sink.put(self.entry())
        assert len((await source.freeze(self.rollout_id)).entries) == 1

    async def test_clients_that_were_never_used_can_be_closed(self) -> None:
        for client in (self.sink(), self.source()):
            await client.close()
            await client.close()

    async def test_clients_that_were_used_can_be_closed_twice(self) -> None:
        sink, source = self.sink(), self.source()
        await sink.put(self.entry())
        await source.freeze(self.rollout_id)
        for client in (sink, source):
            await client.close()
            await client.close()

    async def test_closing_a_sink_loses_nothing(self) -> None:
        sink = self.sink()
        entry = self.entry()
        await sink.put(entry)
        await sink.close()
        assert contents(await self.freeze()) == {"call-1": exact(entry)}

    @needs("has_context_managers")
    async def test_clients_are_context_managers(self) -> None:
        async with self.make_sink() as sink:
            await sink.put(self.entry())
        async with self.make_source() as source:
            assert len((await source.freeze(self.rollout_id)).entries) == 1

    @needs("errors_name_the_call")
    async def test_a_conflict_names_its_rollout_and_call(self) -> None:
        await self.given_open()
        with pytest.raises(self.conflict_error) as caught:
            await self.put(self.other())
        self.assert_about(caught.value, "call-1")

    @needs("errors_name_the_call")
    async def test_the_frozen_error_names_its_rollout_and_call(self) -> None:
        await self.given_frozen()
        steps: list[Callable[[], Awaitable[None]]] = [
            lambda: self.put(self.entry("call-2")),
            lambda: self.begin("call-2"),
        ]
        for step in steps:
            with pytest.raises(self.frozen_error) as caught:
                await step()
            self.assert_about(caught.value, "call-2")

    @needs("errors_name_the_call")
    async def test_the_retired_error_names_its_rollout_and_call(self) -> None:
        await self.given_retired("drop")
        steps: list[Callable[[], Awaitable[None]]] = [
            lambda: self.put(self.entry("call-2")),
            lambda: self.begin("call-2"),
            lambda: self.mark("call-2"),
        ]
        for step in steps:
            with pytest.raises(self.retired_error) as caught:
                await step()
            self.assert_about(caught.value, "call-2")

    @needs("errors_name_the_call")
    async def test_the_retired_error_of_a_freeze_names_its_rollout(self) -> None:
        await self.given_retired("drop")
        with pytest.raises(self.retired_error) as caught:
            await self.freeze()
        self.assert_about(caught.value, None)

    @needs("errors_name_the_call")
    @needs("refuses_bad_records")
    async def test_the_error_of_a_malformed_record_names_its_rollout_and_call(self) -> None:
        entry = self.entry()
        entry.generation_log_probs = [float("nan"), -0.25]
        with pytest.raises(ValueError, match=r".") as caught:
            await self.put(entry)
        self.assert_about(caught.value, "call-1")

    def assert_about(self, error: Any, model_call_id: str | None) -> None:
        """Check what ``error`` says it is about."""
        assert (error.rollout_id, error.model_call_id) == (self.rollout_id, model_call_id)


class TokenTransportContract(
    LifecycleContract,
    IntentContract,
    RefusalContract,
    LateWriterContract,
    ConcurrencyContract,
    ClientContract,
    RecordingContract,
):
    """Subclass this in a test module, define ``make_sink`` and ``make_source``, and run pytest.

    Example::

        class TestMyTransport(TokenTransportContract):
            has_refusals = "not yet"

            @pytest.fixture(autouse=True)
            def _directory(self, tmp_path):
                self.directory = tmp_path

            def make_sink(self):
                return MySink(self.directory)

            def make_source(self):
                return MySource(self.directory)

    """
