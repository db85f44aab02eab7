"""NeMo Gym's own vLLM model servers, each a process that runs what Gym runs in it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.documents import DOCS, yaml_with
from support.polling import wait_until
from support.servers import RealServer, free_port

APP = "responses_api_models.vllm_model.app"
NAME, PASSWORD = "policy_model", "secret"  # the documents ask for a password
NAMESPACE = "run-17"
START_TIMEOUT_S, STOP_TIMEOUT_S = 180.0, 20.0

# Importing Gym takes seconds: one process does, and all servers are forked from it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([APP])


def require_gym_servers() -> None:
    """Skip a module, or fail it where they must be there, if what Gym's servers import is not installed."""
    if importlib.util.find_spec("ray") is None:
        reason = "Gym's servers need packages that scripts/test installs in an environment of their own"
        if os.environ.get("REQUIRE_GYM_SERVERS"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)


class GuardedServer(RealServer):
    """A server with a password."""

    def __init__(self, binary: Path, **config: str) -> None:
        super().__init__(binary, requirepass=PASSWORD, **config)

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket_path), password=PASSWORD, protocol=2)


def capture_in_redis(server: GuardedServer, **settings: Any) -> dict[str, Any]:
    """The block that the documents show, for this server; ``settings`` go beside sink and lineage store."""
    from omegaconf import OmegaConf

    written = OmegaConf.create(yaml_with("RedisTokenSink", DOCS / "nemo-gym.md"))
    for kwargs in (written.token_id_capture.sink_kwargs, written.token_id_capture.lineage_store_kwargs):
        kwargs.update(url=server.tcp_url, namespace=NAMESPACE)
    written.token_id_capture.update(settings)
    block: dict[str, Any] = OmegaConf.to_container(written)  # type: ignore[assignment]
    return block


def capture_in_files(directory: Path, **settings: Any) -> dict[str, Any]:
    return {"token_id_capture": {"enabled": True, "dir": str(directory), **settings}}


class ModelServer:
    """One server: a process of its own, or with ``num_workers`` one that watches its workers."""

    def __init__(self, directory: Path, engine_url: str, capture: dict[str, Any], **options: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"{self.port}.log"
        model = {
            "entrypoint": "app.py",
            "host": "127.0.0.1",
            "port": self.port,
            "base_url": engine_url,
            "api_key": "none",
            "model": "policy",
            "return_token_id_information": True,
            "uses_reasoning_parser": True,
            **options,
        }
        self.config = {
            "head_server": {"host": "127.0.0.1", "port": free_port()},
            "dry_run": False,
            NAME: {"responses_api_models": {"vllm_model": model}},
            **capture,
        }
        self._process = CONTEXT.Process(target=serve, args=(self.config, self.log), daemon=False)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        self._process.start()

    def wait_until_ready(self) -> None:
        wait_until(self._is_ready, f"the model server of {self.log} serves", timeout_s=START_TIMEOUT_S)

    def _is_ready(self) -> bool:
        assert self._process.is_alive(), self.log.read_text("utf-8")
        with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
            return bool(response.status == 200)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def replace_a_worker(self, number: int) -> None:
        """Kill the worker that started as this one, and wait until another took its place."""
        started = self._started_workers()
        os.kill(started[number], signal.SIGKILL)
        wait_until(
            lambda: len(self._started_workers()) > len(started),
            f"a worker of {self.log} was replaced",
            timeout_s=START_TIMEOUT_S,
        )

    def _started_workers(self) -> list[int]:
        log = self.log.read_text("utf-8", errors="replace")
        return [int(pid) for pid in re.findall(r"Started server process \[(\d+)\]", log)]

    def stop(self) -> None:
        if self._process.pid is None:
            return
        self._process.terminate()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self.kill()


def serve(config: dict[str, Any], log: Path) -> None:
    """Run Gym's server as its launcher has it run: in a process, configured by the environment."""
    enter_gym(config, log)
    importlib.import_module(APP).VLLMModel.run_webserver()


def enter_gym(config: dict[str, Any], log: Path) -> None:
    """Make this process one that Gym started: with its configuration, and its output in a file."""
    with log.open("wb", buffering=0) as file, Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdin = os.fdopen(0)  # its number is handed on to uvicorn's workers
    os.chdir(log.parent)
    os.environ |= {
        "NEMO_GYM_CONFIG_DICT": json.dumps(config),
        "NEMO_GYM_CONFIG_PATH": NAME,
        "REDIS_PASSWORD": PASSWORD,
    }


@contextlib.contextmanager
def running(*servers: ModelServer) -> Iterator[None]:
    """All started at once, then waited for."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield
    finally:
        for server in servers:
            server.stop()
