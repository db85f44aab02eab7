"""NeMo Gym's own collector in a process, and an environment server that has agents play what it asks for."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from support.agents import Agent
from support.model_servers import APP, CONTEXT, NAMESPACE, PASSWORD, ModelServer, enter_gym

COLLECTOR = "nemo_gym.rollout_collection"
AGENT, ENVIRONMENT = "player", "player_environment"
TIMEOUT_S = 240.0


CONTEXT.set_forkserver_preload([APP, COLLECTOR])


class Environment:
    """Serves ``/run``: a conversation with a model server, and a reward."""

    def __init__(self, worker: ModelServer) -> None:
        self._url = worker.url
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def configuration(self) -> dict[str, Any]:
        """What Gym's configuration says of the environment, and of the agent that it has play."""
        place = {"entrypoint": "app.py", "host": "127.0.0.1", "port": self._http.server_address[1]}
        agent = {"type": "responses_api_agents", "name": AGENT}
        return {
            AGENT: {"responses_api_agents": {"simple_agent": {**place, "token_id_capture": True}}},
            ENVIRONMENT: {"environment_servers": {"legacy_agent": {**place, "agent_server": agent}}},
        }

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        rollout = f"{row['_ng_task_index']}-{row['_ng_rollout_index']}"
        agent = Agent([self._url], rollout, row["dialect"], task=row["task"])
        agent.converse(2)
        before = list(agent.history)
        agent.say("and?")
        if row["asks_again"]:
            agent.history = before
            agent.say("and?")
        return {
            "reward": 1.0,
            "responses_create_params": row["responses_create_params"],
            "response": {"output": []},
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        environment = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                row = json.loads(self.rfile.read(int(self.headers["content-length"])))
                content = json.dumps(environment.run(row)).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        return Handler


def collect(server: ModelServer, rows: list[dict[str, Any]], directory: Path, url: str = "") -> list[Any]:
    """Let Gym collect these rows twice, and return what it wrote down.

    ``url`` is that of the Redis to install a source of.
    """
    directory.mkdir()
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Environment(server) as environment:
        config = {**server.config, **environment.configuration()}
        process = CONTEXT.Process(target=_collect, args=(config, directory, url))
        process.start()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
    log = (directory / "log").read_text("utf-8", errors="replace")
    assert process.exitcode == 0, log
    written = (directory / "rollouts.jsonl").read_text("utf-8")
    return [json.loads(line) for line in written.splitlines()]


def _collect(config: dict[str, Any], directory: Path, url: str) -> None:
    enter_gym(config, directory / "log")
    from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper

    from gym_capture_redis import RedisTokenSource, install_token_source

    if url:
        install_token_source(RedisTokenSource(url, namespace=NAMESPACE, password=PASSWORD))
    asyncio.run(
        RolloutCollectionHelper().run_from_config(
            RolloutCollectionConfig(
                agent_name=AGENT,
                input_jsonl_fpath=str(directory / "rows.jsonl"),
                output_jsonl_fpath=str(directory / "rollouts.jsonl"),
                num_repeats=2,
                disable_aggregation=True,
            )
        )
    )
