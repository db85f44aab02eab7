"""Which node of a Cluster is asked: what a map of slots and the redirections of nodes say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis import exceptions as redis_errors
from redis.crc import key_slot

from gym_capture_redis import connection
from gym_capture_redis.cluster import Cluster
from gym_capture_redis.errors import BackendUnavailableError
from gym_capture_redis.executor import Executor
from gym_capture_redis.faults import NotConfirmedError, NotSettledError
from gym_capture_redis.lanes import Job
from gym_capture_redis.node import Node
from gym_capture_redis.scripts import Call, Reply, peek
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import SinkSettings
from gym_capture_redis.subject import Subject

KEY = b"gymcap:{run/r}"
SLOT = key_slot(KEY)
HALF = 8_192

Answers = dict[Address, Any]


class Nodes:
    """Stands for the network: what each address answers to ``CLUSTER SLOTS``, and who was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: Answers = {}
        self.asked: list[Address] = []
        monkeypatch.setattr(connection, "ask", self._ask)

    async def _ask(self, _: SinkSettings, address: Address, *words: str, **__: Any) -> Any:
        assert words == ("CLUSTER", "SLOTS")
        self.asked.append(address)
        answer = self.answers.get(address, redis_errors.ConnectionError("refused"))
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(monkeypatch)


async def nothing_to_do(*_: object) -> None:
    """What a connection needs that is never opened."""


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(SinkSettings.build("redis+cluster://a:1,b:2", "run", {}), nothing_to_do)


def slots(*primaries: tuple[bytes | None, int], first: int = 0) -> list[Any]:
    """Two halves, or what is named of them; each part has a replica as well."""
    return [
        [first + number * HALF, first + number * HALF + HALF - 1, [host, port, b"id"], [b"replica", 9, b"id"]]
        for number, (host, port) in enumerate(primaries)
    ]


WHOLE = slots((b"a", 1), (b"c", 3))
SERVES = Address("a", 1) if SLOT < HALF else Address("c", 3)


async def address_of(cluster: Cluster, key: bytes = KEY) -> Address | None:
    node = cluster.node_of(key)
    return cluster._address_of(node) if node else None


async def test_the_map_is_asked_for_first(cluster: Cluster, nodes: Nodes) -> None:
    nodes.answers = {Address("a", 1): WHOLE, Address("b", 2): WHOLE}
    assert cluster.node_of(KEY) is None
    await cluster.refresh()
    assert await address_of(cluster) == SERVES
    assert len(nodes.asked) == 1
    assert cluster.node_of(KEY) is cluster.node_of(KEY)


async def test_a_node_that_is_away_is_passed_over(cluster: Cluster, nodes: Nodes) -> None:
    nodes.answers = {Address("b", 2): WHOLE}
    await cluster.refresh()
    assert await address_of(cluster) == SERVES


async def test_a_node_that_knows_no_slots_is_passed_over(cluster: Cluster, nodes: Nodes) -> None:
    nodes.answers = {Address("a", 1): [], Address("b", 2): WHOLE}
    await cluster.refresh()
    assert await address_of(cluster) == SERVES


@pytest.mark.parametrize("answer", [[], [[]], [["x", 2, [b"a", 1]]], 5, [[0, 1, None]]])
async def test_no_map_is_an_error_to_try_again_after(cluster: Cluster, nodes: Nodes, answer: Any) -> None:
    nodes.answers = {Address("a", 1): answer, Address("b", 2): answer}
    with pytest.raises(redis_errors.RedisError):
        await cluster.refresh()
    assert cluster.node_of(KEY) is None


async def test_a_refused_password_ends_the_search(cluster: Cluster, nodes: Nodes) -> None:
    nodes.answers = dict.fromkeys(
        (Address("a", 1), Address("b", 2)), redis_errors.AuthenticationError("WRONGPASS")
    )
    with pytest.raises(redis_errors.AuthenticationError):
        await cluster.refresh()
    assert len(nodes.asked) == 1


async def test_a_node_that_leaves_its_host_out_means_itself(cluster: Cluster, nodes: Nodes) -> None:
    itself = slots((b"", 1), (None, 3))
    nodes.answers = {Address("b", 2): itself}
    await cluster.refresh()
    assert await address_of(cluster) == Address("b", SERVES.port)


async def ready(cluster: Cluster, nodes: Nodes) -> Node:
    nodes.answers = {Address("a", 1): WHOLE, Address("b", 2): WHOLE}
    await cluster.refresh()
    node = cluster.node_of(KEY)
    assert node is not None
    return node


async def test_a_slot_that_has_moved_is_learned(cluster: Cluster, nodes: Nodes) -> None:
    node = await ready(cluster, nodes)
    assert cluster.learn(redis_errors.MovedError(f"{SLOT} d:4"), node) is None
    assert await address_of(cluster) == Address("d", 4)
    assert len(nodes.asked) == 1


async def test_a_slot_that_is_moving_is_asked_for_elsewhere_just_once(cluster: Cluster, nodes: Nodes) -> None:
    node = await ready(cluster, nodes)
    other = cluster.learn(redis_errors.AskError(f"{SLOT} d:4"), node)
    assert other is not None
    assert cluster._address_of(other) == Address("d", 4)
    assert await address_of(cluster) == SERVES


async def test_a_redirection_without_a_host_is_to_another_port(cluster: Cluster, nodes: Nodes) -> None:
    node = await ready(cluster, nodes)
    cluster.learn(redis_errors.MovedError(f"{SLOT} :4"), node)
    assert await address_of(cluster) == Address(SERVES.host, 4)


@pytest.mark.parametrize(
    "error",
    [
        redis_errors.ConnectionError(),
        redis_errors.ClusterDownError("CLUSTERDOWN"),
        OSError(),
        redis_errors.TimeoutError(),
    ],
)
async def test_a_node_that_fails_makes_the_map_old(cluster: Cluster, nodes: Nodes, error: Exception) -> None:
    node = await ready(cluster, nodes)
    assert cluster.learn(error, node) is None
    assert cluster.node_of(KEY) is None
    nodes.answers = {
        Address("c", 3): slots((b"d", 4), (b"d", 4)),
        Address("b", 2): slots((b"d", 4), (b"d", 4)),
    }
    await cluster.refresh()
    assert await address_of(cluster) == Address("d", 4)


@pytest.mark.parametrize(
    "error",
    [
        redis_errors.TryAgainError(),
        NotConfirmedError(),
        NotSettledError(0.0),
        redis_errors.ResponseError("ERR"),
        ValueError(),
    ],
)
async def test_other_errors_say_nothing_of_the_map(cluster: Cluster, nodes: Nodes, error: Exception) -> None:
    node = await ready(cluster, nodes)
    assert cluster.learn(error, node) is None
    assert cluster.node_of(KEY) is node


async def test_nodes_without_slots_are_forgotten(cluster: Cluster, nodes: Nodes) -> None:
    await ready(cluster, nodes)
    nodes.answers = dict.fromkeys((Address("a", 1), Address("b", 2), SERVES), slots((b"d", 4), (b"d", 4)))
    await cluster.refresh()
    assert await address_of(cluster) == Address("d", 4)
    assert list(cluster._nodes) == [Address("d", 4)]


async def test_a_node_that_is_forgotten_before_it_is_asked_fails_no_step(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is getting its first slot, of which the node that told the map may not know yet."""
    nodes.answers = {Address("a", 1): WHOLE, Address("b", 2): WHOLE}
    executor = Executor(SinkSettings.build("redis+cluster://a:1,b:2", "run", {}))
    topology: Any = executor._topology
    asked: list[bool] = []
    tasks: list[asyncio.Task[None]] = []
    submit = Node.submit

    def answering(node: Node, call: Call, *, asking: bool, **options: Any) -> Job:
        if node.is_closed:
            return submit(node, call, asking=asking, **options)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        asked.append(asking)
        if len(asked) == 1:
            reply.set_exception(redis_errors.AskError(f"{SLOT} d:4"))
            tasks.append(asyncio.create_task(topology._forget_nodes()))
        else:
            reply.set_result(Reply("OK", "1" * 32, 1, 1, (), "run id"))
        return Job(call, by_source=False, asking=asking, deadline=0.0, reply=reply)

    monkeypatch.setattr(Node, "submit", answering)
    await executor.run(peek(KEY), Subject("r"), deadline=executor.deadline())
    assert asked == [False, False]
    await executor.close()
    await asyncio.gather(*tasks)


async def test_whoever_waits_for_the_map_is_told_that_the_client_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = Executor(SinkSettings.build("redis+cluster://a:1,b:2", "run", {}))
    asked = asyncio.Event()

    async def silent(*_: Any, **__: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(connection, "ask", silent)
    step = asyncio.create_task(executor.run(peek(KEY), Subject("r"), deadline=executor.deadline()))
    await asked.wait()
    await executor.close()
    with pytest.raises(BackendUnavailableError, match="closed meanwhile"):
        await step


async def test_a_step_that_is_to_be_sent_again_opens_nothing_after_closing(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor(SinkSettings.build("redis+cluster://a:1,b:2", "run", {}))
    topology: Any = executor._topology
    asked = asyncio.Event()

    async def noted(*args: Any, **options: Any) -> Any:
        asked.set()
        return await nodes._ask(*args, **options)

    monkeypatch.setattr(connection, "ask", noted)
    step = asyncio.create_task(executor.run(peek(KEY), Subject("r"), deadline=executor.deadline()))
    await asked.wait()
    await executor.close()
    nodes.answers = {Address("a", 1): WHOLE, Address("b", 2): WHOLE}
    with pytest.raises(BackendUnavailableError, match="closed meanwhile"):
        await step
    assert not topology._nodes
