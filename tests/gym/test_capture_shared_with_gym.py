"""In a process with Gym there is one capture: what ours sets, installs and stores is Gym's."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from gym_capture_redis import _standalone_capture, capture, gym_compat, protocols, records

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("nemo_gym.token_id_capture", reason="these tests compare with NeMo Gym")

SERVED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "served_responses.jsonl").read_text().splitlines()
]


class Sink:
    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.marks: list[tuple[str, str]] = []

    async def put(self, entry: Any) -> None:
        self.entries.append(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        self.marks.append((rollout_id, model_call_id))

    async def close(self) -> None:
        """Nothing is open."""


async def _method(*_args: object) -> None:
    """Stand in for any method of an endpoint."""


@pytest.fixture
def no_endpoints_left() -> Iterator[None]:
    yield
    protocols.install_token_sink(None)
    protocols.install_token_source(None)


@pytest.mark.parametrize("name", capture.__all__)
def test_every_name_of_the_flow_is_gyms_own_object(name: str) -> None:
    theirs = gym_compat.gym_attribute("sink", name)
    assert theirs is not None
    assert getattr(capture, name) is theirs


@pytest.mark.parametrize("name", ["install_token_sink", "installed_token_sink", "installed_token_source"])
def test_the_installed_endpoints_are_gyms_own(name: str) -> None:
    assert getattr(protocols, name) is gym_compat.gym_attribute("protocols", name)


@pytest.mark.usefixtures("no_endpoints_left")
def test_a_source_installed_here_is_found_by_gym_but_checked_first() -> None:
    source: Any = SimpleNamespace(freeze=_method, drop=_method, close=_method)
    incomplete: Any = SimpleNamespace(freeze=_method, close=_method)
    protocols.install_token_source(source)
    installed_in_gym = gym_compat.gym_attribute("protocols", "installed_token_source")
    assert installed_in_gym is not None
    assert installed_in_gym() is source
    with pytest.raises(TypeError, match="drop"):
        protocols.install_token_source(incomplete)
    assert installed_in_gym() is source


def test_our_protocols_ask_for_what_gyms_ask_for() -> None:
    sink = Sink()
    for role in ("TokenSink", "TokenSource"):
        theirs: Any = gym_compat.gym_attribute("protocols", role)
        assert isinstance(sink, theirs) == isinstance(sink, getattr(protocols, role))


@pytest.mark.parametrize(
    "served", SERVED, ids=lambda served: f"{served['rollout_id']}-{served['model_call_id']}"
)
async def test_both_flows_record_the_same_entry(served: dict[str, Any]) -> None:
    dumps = []
    for flow in (_standalone_capture, gym_compat.gym_package()):
        sink, module = Sink(), cast("Any", flow)
        context = module.CaptureContext(served["rollout_id"], served["model_call_id"], sink, model="policy")
        token = module.set_token_sink(context)
        await module.capture_tokens(served["response"])
        module.reset_token_sink(token)
        assert context.committed
        (entry,) = sink.entries
        dumps.append({**entry.model_dump(mode="json"), "created_at": 0.0})
    assert dumps[0] == dumps[1]
    assert list(dumps[0]) == list(dumps[1])


async def test_our_entry_goes_through_gyms_commit_and_dumps_as_gyms_would() -> None:
    sink = Sink()
    token = capture.set_token_sink(capture.CaptureContext("rollout", "call", sink))
    fields: dict[str, Any] = {
        "prompt_token_ids": [1],
        "generation_token_ids": [2],
        "generation_log_probs": [-0.5],
    }
    await capture.commit_entry(records.TokenEntry(rollout_id="rollout", model_call_id="call", **fields))
    capture.reset_token_sink(token)
    (entry,) = sink.entries
    assert isinstance(entry, records.TokenEntry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dump = entry.model_dump(mode="json")
    theirs: Any = gym_compat.gym_attribute("records", "TokenEntry")
    assert theirs.model_validate(dump).model_dump(mode="json") == dump
    assert (dump["parent_resolution"], dump["cum_len"]) == ("unresolved", 2)


def test_gyms_lineage_resolution_is_a_parent_resolution_for_ours() -> None:
    resolution: Any = gym_compat.gym_attribute("protocols", "LineageResolution")
    match: Any = gym_compat.gym_attribute("protocols", "LineageMatch")
    status: Any = gym_compat.gym_attribute("records", "ParentResolutionStatus")
    entry = records.TokenEntry(
        rollout_id="r",
        model_call_id="c",
        prompt_token_ids=[1],
        generation_token_ids=[],
        generation_log_probs=[],
    )
    _standalone_capture._stamp(entry, resolution(status.RESOLVED, match=match("call-0", (1,), "digest")))
    assert entry.parent_resolution is records.ParentResolutionStatus.RESOLVED
    assert entry.parent_call_id == "call-0"


def test_importing_everything_with_gym_imports_no_server_stack() -> None:
    script = (
        "import sys, gym_capture_redis\n"
        "assert any(name.startswith('nemo_gym') for name in sys.modules)\n"
        "heavy = {'ray', 'torch', 'fastapi', 'starlette', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    root = Path(capture.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, timeout=60)
