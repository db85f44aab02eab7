"""What a sink remembers spares work, is never taken for another attempt's, and stays within its bound."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.sequences import growing_conversation, random_ids, sequence_of

from gym_capture_redis.block_cache import MAX_BRANCHES, BlockCache
from gym_capture_redis.blocks import BLOCK_IDS, ROOT, TokenSequence

AMPLE = 2**30
THREADS = 8
PATIENCE_S = 30.0

SEQUENCE = sequence_of(random_ids(5 * BLOCK_IDS + 10))


@pytest.fixture
def cache() -> BlockCache:
    return BlockCache(AMPLE)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that meet wherever they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def branches(count: int, ids: int = 2 * BLOCK_IDS) -> list[TokenSequence]:
    return [sequence_of(random_ids(ids, seed=number)) for number in range(count)]


# What is known to be stored


def test_of_an_unheard_rollout_every_block_is_unknown(cache: BlockCache) -> None:
    assert cache.first_unknown("r", "one", SEQUENCE) == 0
    assert cache.sequences("r") == ()


@pytest.mark.parametrize("known", range(5))
def test_a_learned_name_stands_for_all_blocks_before_it(cache: BlockCache, known: int) -> None:
    cache.learn("r", "one", [SEQUENCE.names[known]])
    assert cache.first_unknown("r", "one", SEQUENCE) == known + 1


def test_the_last_of_several_learned_names_counts(cache: BlockCache) -> None:
    cache.learn("r", "one", [SEQUENCE.names[3], SEQUENCE.names[1]])
    cache.learn("r", "one", [SEQUENCE.names[0]])
    assert cache.first_unknown("r", "one", SEQUENCE) == 4


@pytest.mark.parametrize("names", [[], [ROOT], [b""], [b"\xff" * 16], [SEQUENCE.names[0][:-1]]])
def test_names_of_nothing_make_nothing_known(cache: BlockCache, names: list[bytes]) -> None:
    cache.learn("r", "one", names)
    assert cache.first_unknown("r", "one", SEQUENCE) == 0
    assert cache.first_unknown("r", "one", sequence_of([1, 2])) == 0


def test_a_remembered_sequence_is_known_whole(cache: BlockCache) -> None:
    cache.remember("r", "one", SEQUENCE)
    assert cache.first_unknown("r", "one", SEQUENCE) == 5


@pytest.mark.parametrize("shared", [0, 1, 255, 256, 700, 5 * BLOCK_IDS])
def test_of_a_branch_only_what_it_shares_is_known(cache: BlockCache, shared: int) -> None:
    cache.remember("r", "one", SEQUENCE)
    branch = sequence_of([*SEQUENCE.ids[:shared].tolist(), *random_ids(600, seed=1)])
    assert cache.first_unknown("r", "one", branch) == shared // BLOCK_IDS


def test_rollouts_are_apart(cache: BlockCache) -> None:
    cache.remember("r", "one", SEQUENCE)
    assert cache.first_unknown("other", "one", SEQUENCE) == 0
    assert cache.sequences("other") == ()


def test_what_was_forgotten_is_unknown_and_still_spares_hashing(cache: BlockCache) -> None:
    cache.remember("r", "one", SEQUENCE)
    cache.remember("other", "one", SEQUENCE)
    cache.forget("r")
    cache.forget("unheard")
    assert cache.first_unknown("r", "one", SEQUENCE) == 0
    assert [kept.names for kept in cache.sequences("r")] == [SEQUENCE.names]
    assert cache.first_unknown("other", "one", SEQUENCE) == 5
    cache.learn("r", "one", [SEQUENCE.names[0]])
    assert cache.first_unknown("r", "one", SEQUENCE) == 1


# Attempts


def test_what_one_attempt_holds_is_unknown_in_another(cache: BlockCache) -> None:
    cache.remember("r", "one", SEQUENCE)
    assert cache.first_unknown("r", "two", SEQUENCE) == 0


@pytest.mark.parametrize("by", ["learn", "remember"])
def test_a_new_attempt_takes_the_place_of_the_old_one(cache: BlockCache, by: str) -> None:
    cache.remember("r", "one", SEQUENCE)
    if by == "learn":
        cache.learn("r", "two", [SEQUENCE.names[1]])
    else:
        cache.remember("r", "two", sequence_of(SEQUENCE.ids[: 2 * BLOCK_IDS].tolist()))
    assert cache.first_unknown("r", "two", SEQUENCE) == 2
    assert cache.first_unknown("r", "one", SEQUENCE) == 0
    assert SEQUENCE.names in [kept.names for kept in cache.sequences("r")]


# Sequences that spare hashing


def test_only_full_blocks_of_a_sequence_are_kept(cache: BlockCache) -> None:
    cache.remember("r", "one", SEQUENCE)
    (kept,) = cache.sequences("r")
    assert kept.names == SEQUENCE.names
    assert kept.ids.tolist() == SEQUENCE.ids[: 5 * BLOCK_IDS].tolist()


def test_a_growing_conversation_is_kept_once(cache: BlockCache) -> None:
    sequences = [sequence_of(ids) for ids in growing_conversation(10, 300)]
    for sequence in sequences:
        cache.remember("r", "one", sequence)
    assert [kept.names for kept in cache.sequences("r")] == [sequences[-1].names]


def test_a_shorter_call_that_comes_late_takes_no_place(cache: BlockCache) -> None:
    kept = branches(MAX_BRANCHES)
    for sequence in kept:
        cache.remember("r", "one", sequence)
    for late in (sequence_of(kept[0].ids[:BLOCK_IDS].tolist()), sequence_of([1, 2]), kept[1]):
        cache.remember("r", "one", late)
    assert [each.names for each in cache.sequences("r")] == [each.names for each in reversed(kept)]


def test_the_newest_branches_are_kept_and_the_blocks_of_all_stay_known(cache: BlockCache) -> None:
    made = branches(MAX_BRANCHES + 3)
    for sequence in made:
        cache.remember("r", "one", sequence)
    assert [kept.names for kept in cache.sequences("r")] == [each.names for each in made[:2:-1]]
    assert {cache.first_unknown("r", "one", sequence) for sequence in made} == {2}


# The bound


@pytest.mark.parametrize("by", ["learn", "remember", "remember a short one"])
def test_however_many_rollouts_there_are_memory_stays_within_the_bound(by: str) -> None:
    cache, short = BlockCache(50_000), sequence_of([1, 2])
    for number in range(1_000):
        match by:
            case "learn":
                cache.learn(f"r{number}", "one", SEQUENCE.names)
            case "remember":
                cache.remember(f"r{number}", "one", SEQUENCE)
            case _:
                cache.remember(f"r{number}", "one", short)
        assert 0 < cache.nbytes <= 50_000
        assert len(cache._contents().rollouts) <= 50
    assert "r999" in cache._contents().rollouts


def test_names_of_one_rollout_count_towards_the_bound() -> None:
    cache = BlockCache(50_000)
    for number in range(5_000):
        cache.learn("r", "one", [number.to_bytes(16, "big")])
        assert cache.nbytes <= 50_000


def test_the_rollout_that_was_not_used_for_longest_goes_first() -> None:
    cache = BlockCache(25_000)
    for rollout in ("a", "b", "a", "c"):
        cache.remember(rollout, "one", SEQUENCE)
    cache.learn("a", "one", [])
    cache.remember("d", "one", SEQUENCE)
    assert [rollout for rollout in "abcd" if cache.sequences(rollout)] == ["a", "c", "d"]


@pytest.mark.parametrize("sequence", [SEQUENCE, sequence_of([1, 2])], ids=["long", "short"])
def test_a_bound_of_nothing_keeps_nothing(sequence: TokenSequence) -> None:
    cache = BlockCache(0)
    cache.learn("r", "one", SEQUENCE.names)
    cache.remember("r", "one", sequence)
    cache.forget("r")
    assert cache.first_unknown("r", "one", sequence) == 0
    assert (cache.sequences("r"), cache.nbytes) == ((), 0)


def test_memory_is_counted_right_after_any_history(cache: BlockCache) -> None:
    for number, sequence in enumerate(branches(40)):
        rollout = f"r{number % 5}"
        cache.remember(rollout, f"attempt{number % 3}", sequence)
        cache.learn(rollout, f"attempt{number % 2}", sequence.names)
        if number % 7 == 0:
            cache.forget(rollout)
    assert cache.nbytes == sum(rollout.nbytes for rollout in cache._contents().rollouts.values())


# Threads and processes


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("max_bytes", [AMPLE, 40_000])
def test_threads_never_see_another_rollouts_blocks(max_bytes: int) -> None:
    cache = BlockCache(max_bytes)
    made = branches(6)

    def work(thread: int) -> None:
        for turn in range(150):
            number = (thread + turn) % len(made)
            rollout, sequence = f"r{number}", made[number]
            cache.remember(rollout, "one", sequence)
            assert cache.first_unknown(rollout, "one", sequence) in (0, 2)
            assert {kept.names for kept in cache.sequences(rollout)} <= {sequence.names}
            assert cache.first_unknown(rollout, "one", made[number - 1]) == 0
            cache.learn(rollout, "one", sequence.names)
            if turn % 10 == thread:
                cache.forget(rollout)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))
    contents = cache._contents()
    assert contents.nbytes == sum(rollout.nbytes for rollout in contents.rollouts.values()) <= max_bytes


def test_after_a_fork_a_lock_held_by_a_thread_of_the_parent_holds_up_nobody(
    cache: BlockCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.remember("r", "one", SEQUENCE)
    with ThreadPoolExecutor(1) as thread, cache._contents().lock:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        in_child = thread.submit(cache.first_unknown, "r", "one", SEQUENCE)
        assert in_child.result(PATIENCE_S) == 0
    cache.remember("r", "one", SEQUENCE)
    assert cache.first_unknown("r", "one", SEQUENCE) == 5
