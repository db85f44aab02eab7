"""What an executor decides before it does any I/O."""

from __future__ import annotations

import asyncio

import pytest

from gym_capture_redis.executor import Executor, watch_s
from gym_capture_redis.settings import SinkSettings, SourceSettings


@pytest.mark.parametrize(
    ("settle_s", "every_s"), [(60.0, 1.0), (2.0, 1.0), (1.0, 0.5), (0.2, 0.1), (0.001, 0.1)]
)
def test_servers_are_watched_often_enough_to_be_put_back_before_rollouts_are_frozen(
    settle_s: float, every_s: float
) -> None:
    assert watch_s(settle_s) == every_s


def test_by_default_servers_are_watched_once_a_second() -> None:
    assert watch_s(SinkSettings.build("redis://server", "run", {}).settle_s) == 1.0


async def test_those_who_would_work_at_once_work_in_several_rounds_of_the_loop_in_their_order() -> None:
    executor = Executor(SourceSettings.build("redis://server", "run", {}))
    loop, rounds = asyncio.get_running_loop(), [0]

    def count_rounds() -> None:
        rounds[0] += 1
        counting[0] = loop.call_soon(count_rounds)

    async def work(number: int) -> None:
        await executor.turn()
        worked.append((rounds[0], number))

    worked: list[tuple[int, int]] = []
    counting = [loop.call_soon(count_rounds)]
    for _ in range(2):  # what the first ones took is given back
        await asyncio.gather(*map(work, range(9)))
    counting[0].cancel()
    assert [number for _, number in worked] == [*range(9)] * 2
    at = [round_ for round_, _ in worked]
    assert max(map(at.count, at)) == 2
    assert len(set(at)) <= 2 * 5
    await executor.close()


async def test_one_who_works_alone_waits_for_nobody() -> None:
    executor = Executor(SourceSettings.build("redis://server", "run", {}))
    with pytest.raises(StopIteration):
        executor.turn().send(None)
    await executor.close()
