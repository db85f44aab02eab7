"""The table of contract section 4, cell by cell, and what stands around it: drop, retire, delete."""

# ruff: noqa: D102 - a test's name is its sentence

from __future__ import annotations

from typing import Any

import pytest

from gym_capture_redis.testing.backend import TransportUnderTest, contents, exact, facts, needs

RETIREMENTS = pytest.mark.parametrize("retired_by", ["drop", "retire"])


class LifecycleContract(TransportUnderTest):
    """From an unknown rollout to a retired one, and what each step does on the way."""

    # On an unknown rollout

    async def test_when_unknown_a_new_put_is_stored_and_moves_the_version(self) -> None:
        entry = self.entry()
        await self.put(entry)
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    async def test_when_unknown_begin_call_is_fine(self) -> None:
        await self.begin()
        await self.put(self.entry())
        assert not (await self.freeze()).incomplete

    async def test_when_unknown_a_mark_makes_it_incomplete_and_moves_the_version(self) -> None:
        await self.mark()
        snapshot = await self.freeze()
        assert (snapshot.version, snapshot.incomplete, snapshot.entries) == (2, True, ())

    async def test_when_unknown_a_freeze_gives_an_empty_complete_snapshot_at_version_one(self) -> None:
        snapshot = await self.freeze()
        assert (snapshot.rollout_id, snapshot.entries) == (self.rollout_id, ())
        assert (snapshot.version, snapshot.incomplete) == (1, False)
        assert snapshot.snapshot_id

    async def test_when_unknown_a_drop_is_false_and_creates_nothing(self) -> None:
        assert not await self.source().drop(self.rollout_id, snapshot_id="anything", version=1)
        await self.put(self.entry())
        assert (await self.freeze()).version == 2

    async def test_when_unknown_a_drop_of_nothing_at_version_zero_is_false(self) -> None:
        assert not await self.source().drop(self.rollout_id, snapshot_id="", version=0)

    @needs("has_retire")
    async def test_when_unknown_retire_fences_it_and_calls_it_absent(self) -> None:
        ended = await self.source().retire([self.rollout_id])
        assert ended == {"removed": [], "absent": [self.rollout_id]}
        with pytest.raises(self.retired_error):
            await self.put(self.entry())
        with pytest.raises(self.retired_error):
            await self.freeze()

    @needs("has_delete")
    async def test_when_unknown_delete_calls_it_absent_and_fences_nothing(self) -> None:
        ended = await self.source().delete([self.rollout_id])
        assert ended == {"removed": [], "absent": [self.rollout_id]}
        await self.put(self.entry())
        assert (await self.freeze()).version == 2

    # On an open rollout

    async def test_when_open_a_new_put_is_stored_and_moves_the_version(self) -> None:
        first, second = await self.given_open(), self.entry("call-2")
        await self.put(second)
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(first), "call-2": exact(second)}
        assert (snapshot.version, snapshot.incomplete) == (3, False)

    async def test_when_open_an_identical_put_does_nothing(self) -> None:
        entry = await self.given_open()
        await self.put(self.entry())
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    async def test_when_open_a_conflicting_put_raises_and_makes_it_incomplete(self) -> None:
        entry = await self.given_open()
        with pytest.raises(self.conflict_error):
            await self.put(self.other())
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert (snapshot.version, snapshot.incomplete) == (3, True)

    async def test_when_open_begin_call_is_fine_and_does_not_move_the_version(self) -> None:
        await self.given_open()
        await self.begin("call-2")
        assert (await self.freeze()).version == 2

    async def test_when_open_a_mark_makes_it_incomplete_and_moves_the_version(self) -> None:
        entry = await self.given_open()
        await self.mark("call-2")
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert (snapshot.version, snapshot.incomplete) == (3, True)

    async def test_when_open_a_freeze_moves_the_version(self) -> None:
        await self.given_open()
        assert (await self.freeze()).version == 2

    async def test_when_open_a_drop_is_false_and_changes_nothing(self) -> None:
        entry = await self.given_open()
        assert not await self.source().drop(self.rollout_id, snapshot_id="", version=1)
        await self.put(self.entry("call-2"))
        snapshot = await self.freeze()
        assert contents(snapshot)["call-1"] == exact(entry)
        assert snapshot.version == 3

    @needs("has_retire")
    async def test_when_open_retire_removes_what_it_holds(self) -> None:
        await self.given_open()
        ended = await self.source().retire([self.rollout_id])
        assert ended == {"removed": [self.rollout_id], "absent": []}
        with pytest.raises(self.retired_error):
            await self.freeze()

    @needs("has_delete")
    async def test_when_open_delete_removes_what_it_holds(self) -> None:
        await self.given_open()
        ended = await self.source().delete([self.rollout_id])
        assert ended == {"removed": [self.rollout_id], "absent": []}
        snapshot = await self.freeze()
        assert (snapshot.version, snapshot.entries, snapshot.incomplete) == (1, (), False)

    # On a frozen rollout

    async def test_when_frozen_a_new_put_is_refused(self) -> None:
        snapshot = await self.given_frozen()
        with pytest.raises(self.frozen_error):
            await self.put(self.entry("call-2"))
        await self.assert_unchanged(snapshot)

    @needs("repeats_put_after_freeze")
    async def test_when_frozen_an_identical_put_does_nothing(self) -> None:
        snapshot = await self.given_frozen()
        await self.put(self.entry())
        await self.assert_unchanged(snapshot)

    async def test_when_frozen_a_conflicting_put_is_refused_and_marks_nothing(self) -> None:
        snapshot = await self.given_frozen()
        with pytest.raises(self.frozen_error):
            await self.put(self.other())
        await self.assert_unchanged(snapshot)

    @pytest.mark.parametrize("model_call_id", ["call-1", "call-2"])
    async def test_when_frozen_begin_call_is_refused(self, model_call_id: str) -> None:
        snapshot = await self.given_frozen()
        with pytest.raises(self.frozen_error):
            await self.begin(model_call_id)
        await self.assert_unchanged(snapshot)

    async def test_when_frozen_a_mark_makes_it_incomplete_under_the_same_snapshot_id(self) -> None:
        before = await self.given_frozen()
        await self.mark("call-2")
        after = await self.freeze()
        assert (after.snapshot_id, after.version) == (before.snapshot_id, before.version + 1)
        assert after.incomplete
        assert contents(after) == contents(before)

    async def test_when_frozen_a_freeze_gives_the_same_again(self) -> None:
        snapshot = await self.given_frozen()
        await self.assert_unchanged(snapshot)
        await self.assert_unchanged(snapshot)

    async def test_when_frozen_a_matching_drop_is_true_and_retires_it(self) -> None:
        snapshot = await self.given_frozen()
        assert await self.drop(snapshot)
        await self.assert_still_retired(snapshot)

    @needs("has_retire")
    async def test_when_frozen_retire_removes_what_it_holds(self) -> None:
        snapshot = await self.given_frozen()
        ended = await self.source().retire([self.rollout_id])
        assert ended == {"removed": [self.rollout_id], "absent": []}
        await self.assert_still_retired(snapshot)

    @needs("has_retire")
    async def test_when_frozen_and_empty_retire_calls_it_absent_and_fences_it(self) -> None:
        snapshot = await self.freeze()
        ended = await self.source().retire([self.rollout_id])
        assert ended == {"removed": [], "absent": [self.rollout_id]}
        await self.assert_still_retired(snapshot)

    @needs("has_delete")
    async def test_when_frozen_delete_removes_what_it_holds_and_the_fence(self) -> None:
        before = await self.given_frozen()
        ended = await self.source().delete([self.rollout_id])
        assert ended == {"removed": [self.rollout_id], "absent": []}
        after = await self.freeze()
        assert (after.version, after.entries, after.incomplete) == (1, (), False)
        assert after.snapshot_id != before.snapshot_id

    @needs("has_delete")
    async def test_when_frozen_and_empty_delete_calls_it_absent_and_removes_the_fence(self) -> None:
        await self.freeze()
        ended = await self.source().delete([self.rollout_id])
        assert ended == {"removed": [], "absent": [self.rollout_id]}
        await self.put(self.entry())

    # On a retired rollout

    @RETIREMENTS
    async def test_when_retired_a_new_put_is_refused(self, retired_by: str) -> None:
        snapshot = await self.given_retired(retired_by)
        with pytest.raises(self.retired_error):
            await self.put(self.entry("call-2"))
        await self.assert_still_retired(snapshot)

    @RETIREMENTS
    async def test_when_retired_an_identical_put_is_refused(self, retired_by: str) -> None:
        snapshot = await self.given_retired(retired_by)
        with pytest.raises(self.retired_error):
            await self.put(self.entry())
        await self.assert_still_retired(snapshot)

    @RETIREMENTS
    async def test_when_retired_a_conflicting_put_is_refused(self, retired_by: str) -> None:
        snapshot = await self.given_retired(retired_by)
        with pytest.raises(self.retired_error):
            await self.put(self.other())
        await self.assert_still_retired(snapshot)

    @RETIREMENTS
    async def test_when_retired_begin_call_is_refused(self, retired_by: str) -> None:
        snapshot = await self.given_retired(retired_by)
        with pytest.raises(self.retired_error):
            await self.begin()
        await self.assert_still_retired(snapshot)

    @RETIREMENTS
    async def test_when_retired_a_mark_is_refused(self, retired_by: str) -> None:
        snapshot = await self.given_retired(retired_by)
        with pytest.raises(self.retired_error):
            await self.mark()
        await self.assert_still_retired(snapshot)

    @RETIREMENTS
    async def test_when_retired_a_freeze_is_refused(self, retired_by: str) -> None:
        snapshot = await self.given_retired(retired_by)
        with pytest.raises(self.retired_error):
            await self.freeze()
        assert await self.drop(snapshot)

    @RETIREMENTS
    async def test_when_retired_the_same_drop_is_true_again(self, retired_by: str) -> None:
        snapshot = await self.given_retired(retired_by)
        assert await self.drop(snapshot)
        assert await self.drop(snapshot)

    @RETIREMENTS
    async def test_when_retired_another_drop_is_false(self, retired_by: str) -> None:
        snapshot = await self.given_retired(retired_by)
        source = self.source()
        for snapshot_id, version in _other_drops(snapshot):
            assert not await source.drop(self.rollout_id, snapshot_id=snapshot_id, version=version)
        await self.assert_still_retired(snapshot)

    @RETIREMENTS
    @needs("has_retire")
    async def test_when_retired_retire_calls_it_absent_and_keeps_the_fence(self, retired_by: str) -> None:
        snapshot = await self.given_retired(retired_by)
        ended = await self.source().retire([self.rollout_id])
        assert ended == {"removed": [], "absent": [self.rollout_id]}
        await self.assert_still_retired(snapshot)

    @RETIREMENTS
    @needs("has_delete")
    async def test_when_retired_delete_calls_it_absent_and_removes_the_fence(self, retired_by: str) -> None:
        before = await self.given_retired(retired_by)
        ended = await self.source().delete([self.rollout_id])
        assert ended == {"removed": [], "absent": [self.rollout_id]}
        await self.put(self.entry())
        after = await self.freeze()
        assert (after.version, after.incomplete) == (2, False)
        assert after.snapshot_id != before.snapshot_id

    # Versions and snapshot ids

    async def test_every_mark_moves_the_version_also_of_the_same_call(self) -> None:
        for _ in range(3):
            await self.mark("call-1")
        assert (await self.freeze()).version == 4

    async def test_every_conflict_moves_the_version(self) -> None:
        await self.given_open()
        for _ in range(2):
            with pytest.raises(self.conflict_error):
                await self.put(self.other())
        assert (await self.freeze()).version == 4

    async def test_versions_count_all_changes_of_a_history(self) -> None:
        await self.begin("call-1")
        for call in ("call-1", "call-2", "call-1"):
            await self.put(self.entry(call))
        with pytest.raises(self.conflict_error):
            await self.put(self.other("call-2"))
        await self.mark("call-3")
        assert (await self.freeze()).version == 5
        await self.mark("call-3")
        assert (await self.freeze()).version == 6

    async def test_a_mark_of_no_call_in_particular_counts_as_well(self) -> None:
        await self.given_open()
        await self.sink().mark_incomplete(self.rollout_id)
        snapshot = await self.freeze()
        assert (snapshot.version, snapshot.incomplete) == (3, True)

    async def test_an_identical_put_after_a_conflict_still_does_nothing(self) -> None:
        entry = await self.given_open()
        with pytest.raises(self.conflict_error):
            await self.put(self.other())
        await self.put(self.entry())
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert (snapshot.version, snapshot.incomplete) == (3, True)

    async def test_snapshot_ids_of_two_rollouts_differ(self) -> None:
        source = self.source()
        first = await source.freeze(self.rollout_id)
        second = await source.freeze(f"{self.rollout_id}-2")
        assert first.snapshot_id != second.snapshot_id

    async def test_a_rollout_does_not_see_what_happens_to_another(self) -> None:
        snapshot = await self.given_frozen()
        sink, other = self.sink(), f"{self.rollout_id}-2"
        await sink.put(self.entry(rollout_id=other))
        await sink.mark_incomplete(other, "call-1")
        await self.assert_unchanged(snapshot)

    # Drop

    async def test_a_drop_of_anything_but_the_snapshot_is_false_and_touches_nothing(self) -> None:
        snapshot = await self.given_frozen()
        source = self.source()
        for snapshot_id, version in _other_drops(snapshot):
            assert not await source.drop(self.rollout_id, snapshot_id=snapshot_id, version=version)
        await self.assert_unchanged(snapshot)

    async def test_a_drop_of_another_rollouts_snapshot_is_false(self) -> None:
        snapshot = await self.given_frozen()
        source = self.source()
        other = await source.freeze(f"{self.rollout_id}-2")
        assert not await source.drop(self.rollout_id, snapshot_id=other.snapshot_id, version=snapshot.version)
        await self.assert_unchanged(snapshot)

    async def test_a_snapshot_that_was_marked_since_is_not_dropped(self) -> None:
        stale = await self.given_frozen()
        await self.mark()
        assert not await self.drop(stale)
        current = await self.freeze()
        assert contents(current) == contents(stale)
        assert await self.drop(current)
        assert not await self.drop(stale)

    async def test_a_drop_leaves_the_snapshot_in_hand_whole(self) -> None:
        snapshot = await self.given_frozen()
        before = facts(snapshot)
        await self.drop(snapshot)
        assert facts(snapshot) == before

    async def test_an_empty_snapshot_can_be_dropped(self) -> None:
        snapshot = await self.freeze()
        assert await self.drop(snapshot)
        await self.assert_still_retired(snapshot)

    # Batches

    @pytest.mark.parametrize("end", ["retire", "delete"])
    async def test_a_batch_counts_duplicates_once(self, end: str) -> None:
        self.require(f"has_{end}")
        await self.given_open()
        unknown = f"{self.rollout_id}-unknown"
        ended = await getattr(self.source(), end)([unknown, self.rollout_id, unknown, self.rollout_id])
        assert ended == {"removed": [self.rollout_id], "absent": [unknown]}

    @pytest.mark.parametrize("end", ["retire", "delete"])
    async def test_a_batch_may_be_empty(self, end: str) -> None:
        self.require(f"has_{end}")
        assert await getattr(self.source(), end)([]) == {"removed": [], "absent": []}

    @pytest.mark.parametrize("end", ["retire", "delete"])
    async def test_a_batch_may_come_from_any_iterable(self, end: str) -> None:
        self.require(f"has_{end}")
        await self.given_open()
        ended = await getattr(self.source(), end)(iter((self.rollout_id,)))
        assert ended == {"removed": [self.rollout_id], "absent": []}

    @pytest.mark.parametrize("end", ["retire", "delete"])
    async def test_a_bare_string_is_no_batch(self, end: str) -> None:
        self.require(f"has_{end}")
        snapshot = await self.given_frozen()
        with pytest.raises(TypeError):
            await getattr(self.source(), end)(self.rollout_id)
        await self.assert_unchanged(snapshot)

    @pytest.mark.parametrize("end", ["retire", "delete"])
    @pytest.mark.parametrize("malformed", ["", "a/b", "é", "a b", "{a}", None, 7])
    async def test_a_batch_with_a_malformed_id_is_refused_whole(self, end: str, malformed: Any) -> None:
        self.require(f"has_{end}")
        snapshot = await self.given_frozen()
        with pytest.raises(ValueError, match=r"."):
            await getattr(self.source(), end)([self.rollout_id, malformed])
        await self.assert_unchanged(snapshot)

    @pytest.mark.parametrize("end", ["retire", "delete"])
    async def test_the_same_batch_again_finds_everything_absent(self, end: str) -> None:
        self.require(f"has_{end}")
        await self.given_open()
        source = self.source()
        await getattr(source, end)([self.rollout_id])
        assert await getattr(source, end)([self.rollout_id]) == {"removed": [], "absent": [self.rollout_id]}

    @pytest.mark.parametrize("end", ["retire", "delete"])
    async def test_a_mark_or_an_intent_alone_is_enough_to_be_removed(self, end: str) -> None:
        self.require(f"has_{end}")
        sink = self.sink()
        marked, announced, unknown = (f"{self.rollout_id}-{name}" for name in ("mark", "intent", "unknown"))
        await sink.mark_incomplete(marked)
        await sink.begin_call(announced, "call-1")
        ended = await getattr(self.source(), end)([marked, announced, unknown])
        assert ended == {"removed": [marked, announced], "absent": [unknown]}

    @pytest.mark.parametrize("end", ["retire", "delete"])
    async def test_a_large_batch_is_sorted_out_id_by_id(self, end: str) -> None:
        self.require(f"has_{end}")
        ids = [f"{self.rollout_id}-{number}" for number in range(150)]
        held = ids[::3]
        sink = self.sink()
        for rollout_id in held:
            await sink.mark_incomplete(rollout_id)
        ended = await getattr(self.source(), end)(ids)
        assert ended == {"removed": held, "absent": [each for each in ids if each not in held]}

    @needs("has_delete")
    async def test_an_id_that_was_deleted_can_be_used_again(self) -> None:
        old = await self.given_frozen()
        await self.source().delete([self.rollout_id])
        entry = self.other()
        await self.put(entry)
        new = await self.freeze()
        assert contents(new) == {"call-1": exact(entry)}
        assert (new.version, new.incomplete) == (2, False)
        assert not await self.drop(old)
        assert await self.drop(new)


def _other_drops(snapshot: Any) -> list[tuple[str, int]]:
    """Return drops that resemble the one of ``snapshot`` and must not do anything."""
    snapshot_id, version = snapshot.snapshot_id, snapshot.version
    return [
        (snapshot_id, version - 1),
        (snapshot_id, version + 1),
        (snapshot_id, 0),
        (snapshot_id, version + 2**53),
        (snapshot_id + "0", version),
        (snapshot_id[:-1], version),
        ("", version),
    ]
