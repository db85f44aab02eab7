"""Conversations through NeMo Gym's own vLLM model server: over Redis all goes as over its file store.

Everything is Gym's, and runs as Gym runs it, but for the engine and the agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.agents import DIALECTS, Agent, CallFailedError
from support.conversations import gym
from support.engine import HOLD, OMIT_TOKENS, REFUSE, REFUSE_LENGTH, Engine, Served, calls_of
from support.model_servers import (
    NAMESPACE,
    PASSWORD,
    GuardedServer,
    ModelServer,
    capture_in_files,
    capture_in_redis,
    require_gym_servers,
    running,
)
from support.polling import wait_until
from support.servers import RealServer

from gym_capture_redis import RedisTokenSource

require_gym_servers()

AT_ONCE = 12
WAIT_S = 60.0

# How Gym may be set up: options of the model server, settings of the capture, and whether the engine samples
# ids that a repeated prompt would not have.
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "stock": ({}, {}, False),
    "prefixes": (
        {"supply_prefix_token_ids": True, "request_prompt_and_generation_token_ids": True},
        {"delta_records": True},
        True,
    ),
}


Script = Callable[[Agent], None]


class Verdict(NamedTuple):
    """What a trainer gets: whether to mask the rollout, why, and the calls of the rebuilt chain."""

    masked: bool
    incomplete: bool
    resolutions: list[str]
    retries: int
    metrics: dict[str, Any]
    calls: list[Served]


class Deployment:
    """Two workers with one store between them, an engine, and the trainer's way to the store."""

    def __init__(self, engine: Engine, workers: list[ModelServer], make_source: Callable[[], Any]) -> None:
        self.engine = engine
        self.workers = workers
        self.make_source = make_source

    @property
    def urls(self) -> list[str]:
        return [worker.url for worker in self.workers]

    def agent(self, rollout: str, dialect: str, **options: Any) -> Agent:
        return Agent(self.urls, rollout, dialect, **options)

    async def judge(self, rollout: str, **options: Any) -> Verdict:
        """Freeze and rebuild as a trainer does, and retire what was rebuilt."""
        source = self.make_source()
        built = await gym("consumer", "trajectories_from_source")(rollout, source, **options)
        snapshot = await source.freeze(rollout)
        retired = await gym("delivery", "retire_rollout_token_capture")(rollout, source, built)
        assert retired != built["mask_sample"]
        if retired:
            with pytest.raises(RuntimeError, match="retired"):
                await source.freeze(rollout)
        await source.close()
        return Verdict(
            masked=built["mask_sample"],
            incomplete=snapshot.incomplete,
            resolutions=sorted(entry.parent_resolution.value for entry in snapshot.entries),
            retries=len(built.get("unresolved_retries", [])),
            metrics=without_names(built["metrics"]),
            calls=calls_of(built["rebuilt_response"]),
        )


Pair = tuple[Deployment, Deployment]


def without_names(metrics: dict[str, Any]) -> dict[str, Any]:
    """All counts and reasons; the call ids are drawn at random."""
    attribution = {
        key: value for key, value in metrics.get("terminal_attribution", {}).items() if key != "call_id"
    }
    return {**metrics, "terminal_attribution": attribution}


@contextlib.contextmanager
def deployments(directory: Path, binary: Path, setup: str = "stock") -> Iterator[Pair]:
    """The same twice: over Redis as the documents show it, and over Gym's files."""
    options, settings, merges = SETUPS[setup]
    files = directory / "captures"
    with GuardedServer(binary) as redis, Engine(merges=merges) as one, Engine(merges=merges) as other:

        def workers(engine: Engine, block: dict[str, Any]) -> list[ModelServer]:
            return [ModelServer(directory, engine.base_url, block, **options) for _ in range(2)]

        ours = workers(one, capture_in_redis(redis, **settings))
        theirs = workers(other, capture_in_files(files, **settings))
        with running(*ours, *theirs):
            yield (
                Deployment(one, ours, functools.partial(make_source, redis)),
                Deployment(other, theirs, functools.partial(gym("store", "TokenCaptureStore"), files)),
            )


def make_source(redis: GuardedServer) -> RedisTokenSource:
    return RedisTokenSource(redis.tcp_url, namespace=NAMESPACE, password=PASSWORD)


@pytest.fixture(scope="module", params=list(SETUPS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, valkey9: RealServer
) -> Iterator[Pair]:
    with deployments(tmp_path_factory.mktemp("gym"), valkey9.binary, request.param) as made:
        yield made


@pytest.fixture
def own_pair(valkey9: RealServer, tmp_path: Path) -> Iterator[Pair]:
    """Workers of the test's own, to be killed."""
    with deployments(tmp_path, valkey9.binary) as made:
        yield made


# What agents do in one rollout.


def converse(agent: Agent) -> None:
    agent.converse(5)


def stream(agent: Agent) -> None:
    agent.streams = True
    agent.converse(5)


def branch(agent: Agent) -> None:
    """Two ways to go on from one answer."""
    agent.converse(3)
    before = list(agent.history)
    agent.say("one way")
    agent.history = before
    agent.say("another way")


def choose(agent: Agent) -> None:
    branch(agent)


def delegate(agent: Agent) -> None:
    """A second conversation in the same rollout, as of a sub-agent."""
    agent.converse(2)
    agent.history = []
    agent.say(f"part of {agent.task}")


def rewrite_an_answer(agent: Agent) -> None:
    agent.converse(2)
    rewritten = replaced(agent.history, "answer 0", "summary 0")
    assert rewritten != agent.history
    agent.history = rewritten
    agent.converse(2)


def rewrite_a_question(agent: Agent) -> None:
    agent.converse(2)
    agent.history[2]["content"] = "something else"
    agent.converse(2)


def ask_again(agent: Agent) -> None:
    """The last request once more, as after an answer that never arrived."""
    agent.converse(2)
    before = list(agent.history)
    agent.say("and?")
    agent.history = before
    agent.say("and?")


def be_refused_for_length(agent: Agent) -> None:
    """Gym answers for the engine then, with an empty message that has no token ids."""
    agent.converse(2)
    with contextlib.suppress(CallFailedError):
        agent.say(REFUSE_LENGTH)


def be_refused(agent: Agent) -> None:
    agent.converse(2)
    with pytest.raises(CallFailedError):
        agent.say(REFUSE)
    agent.converse(2)


def lose_tokens_after_generation(agent: Agent) -> None:
    agent.converse(2)
    with pytest.raises(CallFailedError):
        agent.say(OMIT_TOKENS)
    agent.converse(2)


def replaced(value: Any, old: str, new: str) -> Any:
    """The same with this text replaced wherever it is."""
    return json.loads(json.dumps(value).replace(old, new))


KEPT: list[Script] = [converse, stream]
INCOMPLETE: list[Script] = [be_refused_for_length, be_refused, lose_tokens_after_generation]
AMBIGUOUS: list[Script] = [branch, delegate, rewrite_an_answer, rewrite_a_question, ask_again]


def run(deployment: Deployment, scripts: Sequence[Script]) -> dict[str, tuple[Script, Agent]]:
    """Let agents run each of them in each dialect, with and without reasoning, many at once."""
    agents = {}
    for number, (script, dialect, task) in enumerate(itertools.product(scripts, DIALECTS, ("work", "think"))):
        rollout = f"{script.__name__}.{dialect}.{task}"
        agent = deployment.agent(rollout, dialect, task=f"{task} on {rollout}", first=number % 2)
        agents[rollout] = (script, agent)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda pair: pair[0](pair[1]), agents.values()))
    return agents


def chain_of(served: list[Served], last: Served) -> list[Served]:
    """The calls that this one goes on from, and itself."""
    return [call for call in served if last.prompt[: len(call.ids)] == call.ids] + [last]


def test_every_conversation_is_judged_and_rebuilt_as_by_the_file_store(pair: Pair) -> None:
    ours, theirs = pair
    agents, _ = (run(deployment, [*KEPT, *INCOMPLETE, *AMBIGUOUS]) for deployment in pair)
    for rollout, (script, agent) in agents.items():
        verdict, expected = (asyncio.run(deployment.judge(rollout)) for deployment in pair)
        assert verdict == expected, rollout
        served = ours.engine.served[agent.task]
        assert served == theirs.engine.served[agent.task]
        assert verdict.masked == (script not in KEPT), rollout
        assert verdict.incomplete == (script in INCOMPLETE), rollout
        assert bool(verdict.retries) == (script is ask_again), rollout
        if script in KEPT:
            assert verdict.calls == served
            assert verdict.resolutions == ["resolved"] * (len(served) - 1) + ["root"]


def test_the_branch_that_was_chosen_is_rebuilt_and_the_other_left_out(pair: Pair) -> None:
    verdicts = []
    for deployment in pair:
        for rollout, (_, agent) in run(deployment, [choose]).items():
            verdict = asyncio.run(deployment.judge(rollout, declared_response_id=agent.answers[-1]["id"]))
            served = deployment.engine.served[agent.task]
            assert not verdict.masked
            assert verdict.calls == chain_of(served, served[-1])
            assert len(verdict.calls) < len(served)
            verdicts.append(verdict)
    half = len(verdicts) // 2
    assert verdicts[:half] == verdicts[half:]


def test_a_killed_worker_costs_the_calls_that_it_had_and_no_other(own_pair: Pair) -> None:
    verdicts: list[dict[str, Verdict]] = [
        asyncio.run(judge_after_a_kill(deployment)) for deployment in own_pair
    ]
    assert verdicts[0] == verdicts[1]


async def judge_after_a_kill(deployment: Deployment) -> dict[str, Verdict]:
    """Kill a worker that waits for the engine, between intent and put, and serves others at the same time."""
    engine, (victim, survivor) = deployment.engine, deployment.workers

    def agents(kind: str, *workers: ModelServer) -> list[Agent]:
        urls = [worker.url for worker in workers]
        return [Agent(urls, f"{kind}.{dialect}", dialect) for dialect in DIALECTS]

    held, others, busy = (
        agents("held", victim),
        agents("other", *deployment.workers),
        agents("busy", victim, survivor),
    )
    for agent in (*held, *others):
        agent.converse(2)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = [pool.submit(agent.say, HOLD) for agent in held]
        for agent in held:
            assert engine.held[agent.task].wait(WAIT_S)
        persisting = [pool.submit(persist, agent, 8) for agent in busy]
        wait_until(
            lambda: all(len(engine.served[agent.task]) > 2 for agent in busy),
            "all were served",
            timeout_s=WAIT_S,
        )
        victim.kill()
        engine.released.set()
        for future in waiting:
            assert isinstance(future.exception(WAIT_S), CallFailedError)
        for future in persisting:
            future.result(WAIT_S)
    for agent in (*held, *others):
        agent.move_to(survivor.url)
        agent.say("still there?")
    verdicts = {agent.rollout: await deployment.judge(agent.rollout) for agent in (*held, *others)}
    for agent in held:
        assert verdicts[agent.rollout].masked
        assert verdicts[agent.rollout].incomplete
    for agent in others:
        assert verdicts[agent.rollout].calls == engine.served[agent.task]
        assert not verdicts[agent.rollout].masked
    for agent in busy:
        # Whether a call of it was lost is chance; what is handed out is whole.
        verdict = await deployment.judge(agent.rollout)
        assert verdict.masked or verdict.calls == engine.served[agent.task]
    return verdicts


def persist(agent: Agent, turns: int) -> None:
    """Go on; what fails is asked again, of the other worker, and a tool call takes a second call."""
    for turn in range(turns):
        for _ in range(4):
            with contextlib.suppress(CallFailedError):
                agent.say(f"go on {turn}" if agent.history else agent.task)
                break
        else:
            raise AssertionError("both workers failed")


def test_workers_of_one_server_are_replaced_one_by_one_and_nothing_is_lost(
    valkey9: RealServer, tmp_path: Path
) -> None:
    """Gym's ``num_workers``: the calls of a worker that is gone are found by the one that takes its place."""
    with GuardedServer(valkey9.binary) as redis, Engine() as engine:
        server = ModelServer(tmp_path, engine.base_url, capture_in_redis(redis), num_workers=2)
        with running(server):
            deployment = Deployment(engine, [server], functools.partial(make_source, redis))
            agents = [deployment.agent(dialect, dialect) for dialect in DIALECTS]
            for round_number in range(3):
                for agent in agents:
                    agent.converse(2)
                if round_number < 2:
                    server.replace_a_worker(round_number)
            for agent in agents:
                verdict = asyncio.run(deployment.judge(agent.rollout))
                assert not verdict.masked
                assert verdict.calls == engine.served[agent.task]
                assert len(verdict.calls) > 6


def test_no_call_is_generated_while_redis_is_away_and_the_conversation_goes_on_after(
    valkey9: RealServer, tmp_path: Path
) -> None:
    with GuardedServer(valkey9.binary) as redis, Engine() as engine:
        block = capture_in_redis(redis)
        for kwargs in ("sink_kwargs", "lineage_store_kwargs"):
            block["token_id_capture"][kwargs]["timeout_s"] = 2
        server = ModelServer(tmp_path, engine.base_url, block)
        with running(server):
            deployment = Deployment(engine, [server], functools.partial(make_source, redis))
            agents = [deployment.agent(dialect, dialect) for dialect in DIALECTS]
            for agent in agents:
                agent.converse(2)
            served = {agent.task: len(engine.served[agent.task]) for agent in agents}
            redis.wait_until_written()
            redis.kill()
            for agent in agents:
                with pytest.raises(CallFailedError, match="BackendUnavailableError"):
                    agent.say("anybody?")
                assert len(engine.served[agent.task]) == served[agent.task]
            redis.start()
            for agent in agents:
                agent.converse(2)
                verdict = asyncio.run(deployment.judge(agent.rollout))
                assert not verdict.masked
                assert verdict.calls == engine.served[agent.task]
