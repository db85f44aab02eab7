"""The capture flow without Gym: it records, or it marks, and it never fails the model call."""

from __future__ import annotations

import asyncio
import importlib
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict
from support.names import steady_repr

from gym_capture_redis import _standalone_capture as capture
from gym_capture_redis import gym_compat
from gym_capture_redis._standalone_capture import CaptureContext, capture_tokens, commit_entry
from gym_capture_redis.records import ParentResolutionStatus, TokenEntry, compute_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

ARRAYS = {
    "prompt_token_ids": [1, 2, 3],
    "generation_token_ids": [4, 5],
    "generation_log_probs": [-0.5, -0.25],
}
MESSAGE = {"type": "message", "content": [{"type": "output_text", "text": "hi"}]}
RESPONSE = {"id": "resp-1", "model": "served", "output": [{"type": "reasoning"}, {**MESSAGE, **ARRAYS}]}


class Sink:
    """Remember what the flow asks for; raise where a test wants a failure."""

    def __init__(
        self, put_error: BaseException | None = None, mark_error: BaseException | None = None
    ) -> None:
        self.entries: list[TokenEntry] = []
        self.marks: list[tuple[str, str]] = []
        self.put_error = put_error
        self.mark_error = mark_error

    async def put(self, entry: TokenEntry) -> None:
        if self.put_error is not None:
            raise self.put_error
        self.entries.append(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        if self.mark_error is not None:
            raise self.mark_error
        self.marks.append((rollout_id, model_call_id))

    async def close(self) -> None:
        """Nothing is open."""


class AnnouncedSink(Sink):
    def __init__(self, begin_error: BaseException | None = None) -> None:
        super().__init__()
        self.intents: list[tuple[str, str]] = []
        self.begin_error = begin_error

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        if self.begin_error is not None:
            raise self.begin_error
        self.intents.append((rollout_id, model_call_id))


class UnmarkableSink:
    async def put(self, entry: TokenEntry) -> None:
        raise OSError(entry.model_call_id)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def context(sink: Sink) -> Iterator[CaptureContext]:
    context = CaptureContext("rollout-1", "call-1", sink)
    token = capture.set_token_sink(context)
    yield context
    capture.reset_token_sink(token)


def entry(**fields: Any) -> TokenEntry:
    return TokenEntry(**{"rollout_id": "rollout-1", "model_call_id": "call-1", **ARRAYS, **fields})


def only_log(caplog: pytest.LogCaptureFixture, level: int) -> logging.LogRecord:
    """Return the one message that was logged, which names the rollout and the call."""
    (record,) = caplog.records
    assert record.levelno == level
    assert record.name == capture.__name__
    assert "rollout-1" in record.getMessage()
    assert "call-1" in record.getMessage()
    return record


# The context


def test_a_task_has_no_context_until_one_is_set_and_none_after_it_is_reset() -> None:
    assert capture.current_capture_context() is None
    outer, inner = CaptureContext("r", "outer", None), CaptureContext("r", "inner", None)
    outer_token = capture.set_token_sink(outer)
    inner_token = capture.set_token_sink(inner)
    assert capture.current_capture_context() is inner
    capture.reset_token_sink(inner_token)
    assert capture.current_capture_context() is outer
    capture.reset_token_sink(outer_token)
    assert capture.current_capture_context() is None


def test_a_context_starts_without_a_model_name_and_uncommitted(sink: Sink) -> None:
    context = CaptureContext(rollout_id="r", model_call_id="c", token_sink=sink)
    assert (context.model, context.committed) == ("", False)


async def test_concurrent_calls_do_not_see_each_others_context() -> None:
    sinks = [Sink() for _ in range(3)]

    async def serve(number: int) -> None:
        capture.set_token_sink(CaptureContext("rollout", f"call-{number}", sinks[number]))
        await asyncio.sleep(0)
        await capture_tokens(RESPONSE)

    await asyncio.gather(*(serve(number) for number in range(3)))
    assert [sink.entries[0].model_call_id for sink in sinks] == ["call-0", "call-1", "call-2"]


# The intent


async def test_an_intent_is_announced_to_a_sink_that_takes_it() -> None:
    sink = AnnouncedSink()
    token = capture.set_token_sink(CaptureContext("rollout-1", "call-1", sink))
    await capture.register_call_intent()
    capture.reset_token_sink(token)
    assert sink.intents == [("rollout-1", "call-1")]


async def test_a_failing_intent_fails_the_model_call() -> None:
    token = capture.set_token_sink(CaptureContext("r", "c", AnnouncedSink(begin_error=OSError("away"))))
    with pytest.raises(OSError, match="away"):
        await capture.register_call_intent()
    capture.reset_token_sink(token)


async def test_a_sink_without_begin_call_needs_no_intent(context: CaptureContext, sink: Sink) -> None:
    await capture.register_call_intent()
    assert (context.committed, sink.marks) == (False, [])


async def test_there_is_no_intent_without_a_sink_or_a_context(context: CaptureContext) -> None:
    context.token_sink = None
    await capture.register_call_intent()
    token = capture.set_token_sink(None)  # type: ignore[arg-type]  # as in untagged traffic
    await capture.register_call_intent()
    capture.reset_token_sink(token)


# Capturing a response


async def test_a_response_is_recorded_before_the_model_call_returns(
    context: CaptureContext, sink: Sink
) -> None:
    await capture_tokens(RESPONSE)
    (stored,) = sink.entries
    assert stored.model_dump(exclude={"created_at"}, exclude_defaults=True) == {
        "rollout_id": "rollout-1",
        "model_call_id": "call-1",
        "model": "served",
        **ARRAYS,
        "output_items": [{"type": "reasoning"}, MESSAGE],
        "token_item_index": 1,
        "response_id": "resp-1",
        "cum_len": 5,
        "digest": compute_digest([1, 2, 3, 4, 5]),
        "parent_resolution": ParentResolutionStatus.UNRESOLVED,
        "parent_resolution_reason": "not_attempted",
    }
    assert stored.created_at > 1_700_000_000
    assert context.committed
    assert sink.marks == []


async def test_the_contexts_model_name_wins_over_the_responses(context: CaptureContext, sink: Sink) -> None:
    context.model = "policy"
    await capture_tokens(RESPONSE)
    assert sink.entries[0].model == "policy"


@pytest.mark.usefixtures("context")
async def test_a_response_without_id_and_model_is_recorded_too(sink: Sink) -> None:
    await capture_tokens({"output": [ARRAYS]}, [{"role": "user", "content": "hi"}])
    assert (sink.entries[0].model, sink.entries[0].response_id) == ("", None)


@pytest.mark.usefixtures("context")
async def test_a_pydantic_response_is_recorded_like_a_dict(sink: Sink) -> None:
    class Response(BaseModel):
        model_config = ConfigDict(extra="allow")

    await capture_tokens(Response.model_validate(RESPONSE))
    await capture_tokens(RESPONSE)
    first, second = (stored.model_dump(exclude={"created_at"}) for stored in sink.entries)
    assert first == second


@pytest.mark.usefixtures("context")
async def test_a_chat_response_is_recorded_with_its_message_as_token_item(sink: Sink) -> None:
    await capture_tokens({"choices": [{"message": {"content": "hi", **ARRAYS}}]})
    assert sink.entries[0].output_items == [{"content": "hi", "type": "message", "role": "assistant"}]
    assert sink.entries[0].token_item_index == 0


async def test_nothing_happens_without_a_context(caplog: pytest.LogCaptureFixture) -> None:
    await capture_tokens(RESPONSE)
    await capture_tokens(None)
    await commit_entry(entry())
    assert caplog.records == []


@pytest.mark.parametrize(
    ("response", "why"),
    [({"output": [MESSAGE]}, "it has no token ids"), ("text", "it is a str"), (None, "it is a NoneType")],
)
async def test_a_response_without_token_ids_is_a_hole(
    context: CaptureContext, sink: Sink, caplog: pytest.LogCaptureFixture, response: object, why: str
) -> None:
    await capture_tokens(response)
    assert sink.marks == [("rollout-1", "call-1")]
    assert sink.entries == []
    assert not context.committed
    assert only_log(caplog, logging.WARNING).getMessage().endswith(f"{why}.")


@pytest.mark.parametrize("response", [{"output": [MESSAGE]}, "text"])
async def test_a_committed_call_leaves_no_hole(
    context: CaptureContext, sink: Sink, caplog: pytest.LogCaptureFixture, response: object
) -> None:
    context.committed = True
    await capture_tokens(response)
    assert (sink.marks, caplog.records) == ([], [])


@pytest.mark.parametrize("response", [{"output": [MESSAGE]}, "text"])
async def test_a_context_without_a_sink_leaves_no_hole(
    context: CaptureContext, caplog: pytest.LogCaptureFixture, response: object
) -> None:
    context.token_sink = None
    await capture_tokens(response)
    assert (context.committed, caplog.records) == (False, [])


@pytest.mark.parametrize(
    "response",
    [
        {"output": [{"prompt_token_ids": [1]}]},
        {"output": [ARRAYS, ARRAYS]},
        {"output": [{**ARRAYS, "generation_log_probs": [-0.5]}]},
        {"output": [{**ARRAYS, "prompt_token_ids": "not ids"}]},
        {"choices": "text"},
        SimpleNamespace(model_dump=lambda: ["not", "a", "dict"]),
        SimpleNamespace(model_dump=None),
    ],
)
async def test_a_record_that_cannot_be_built_is_logged_and_marked(
    context: CaptureContext, sink: Sink, caplog: pytest.LogCaptureFixture, response: object
) -> None:
    await capture_tokens(response)
    assert sink.marks == [("rollout-1", "call-1")]
    assert sink.entries == []
    assert not context.committed
    record = only_log(caplog, logging.WARNING)
    assert "build" in record.getMessage()
    assert record.exc_info is not None


async def test_a_write_that_fails_is_logged_and_marked(
    context: CaptureContext, sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    sink.put_error = OSError("redis is away")
    await capture_tokens(RESPONSE)
    assert sink.marks == [("rollout-1", "call-1")]
    assert not context.committed
    record = only_log(caplog, logging.WARNING)
    assert "store" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is sink.put_error


async def test_a_marking_that_fails_is_logged_and_never_raised(
    context: CaptureContext, sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    sink.mark_error = OSError("redis is still away")
    await capture_tokens("text")
    assert not context.committed
    hole, failure = caplog.records
    assert hole.levelno == failure.levelno == logging.WARNING
    assert "rollout-1, model call call-1" in failure.getMessage()
    assert failure.exc_info is not None
    assert failure.exc_info[1] is sink.mark_error


async def test_a_sink_that_cannot_mark_is_logged_as_an_error(
    context: CaptureContext, caplog: pytest.LogCaptureFixture
) -> None:
    context.token_sink = UnmarkableSink()  # type: ignore[assignment]  # that is the point
    await capture_tokens(RESPONSE)
    error = caplog.records[-1]
    assert error.levelno == logging.ERROR
    assert "rollout-1" in error.getMessage()
    assert "call-1" in error.getMessage()
    assert "UnmarkableSink has no mark_incomplete" in error.getMessage()


async def test_a_cancellation_in_put_passes_through_and_marks_nothing(
    context: CaptureContext, sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    sink.put_error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await capture_tokens(RESPONSE)
    assert (sink.marks, context.committed, caplog.records) == ([], False, [])


async def test_a_cancellation_while_marking_passes_through(context: CaptureContext, sink: Sink) -> None:
    sink.mark_error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await capture_tokens("text")
    assert not context.committed


# Committing an entry that is already built


async def test_a_finished_entry_is_stamped_and_stored(context: CaptureContext, sink: Sink) -> None:
    finished = entry()
    await commit_entry(finished)
    assert sink.entries == [finished]
    assert (finished.cum_len, finished.digest) == (5, compute_digest([1, 2, 3, 4, 5]))
    assert finished.parent_resolution is ParentResolutionStatus.UNRESOLVED
    assert finished.parent_resolution_reason == "not_attempted"
    assert context.committed


@pytest.mark.usefixtures("context")
async def test_a_stale_length_and_digest_are_stamped_anew(sink: Sink) -> None:
    await commit_entry(entry(cum_len=99, digest="stale"))
    assert (sink.entries[0].cum_len, sink.entries[0].digest) == (5, compute_digest([1, 2, 3, 4, 5]))


@pytest.mark.parametrize(
    "lineage",
    [
        {"parent_resolution": ParentResolutionStatus.ROOT, "parent_resolution_reason": ""},
        {"parent_resolution": ParentResolutionStatus.RESOLVED, "parent_call_id": "call-0"},
        {"parent_resolution": ParentResolutionStatus.UNRESOLVED, "parent_resolution_reason": "ambiguous"},
    ],
)
@pytest.mark.usefixtures("context")
async def test_a_parent_resolution_that_is_set_is_kept(sink: Sink, lineage: dict[str, str]) -> None:
    await commit_entry(entry(**lineage))
    assert {name: getattr(sink.entries[0], name) for name in lineage} == lineage


@pytest.mark.usefixtures("context")
async def test_a_parent_without_a_resolution_is_not_kept(sink: Sink) -> None:
    await commit_entry(entry(parent_call_id="a-guess"))
    assert sink.entries[0].parent_call_id is None
    assert sink.entries[0].parent_resolution is ParentResolutionStatus.UNRESOLVED


@pytest.mark.usefixtures("context")
async def test_a_given_parent_resolution_wins(sink: Sink) -> None:
    given = SimpleNamespace(status="resolved", match=SimpleNamespace(model_call_id="call-0"), reason="proven")
    await commit_entry(entry(parent_resolution="root"), parent_resolution=given)
    stored = sink.entries[0]
    assert stored.parent_resolution is ParentResolutionStatus.RESOLVED
    assert (stored.parent_call_id, stored.parent_resolution_reason) == ("call-0", "proven")


@pytest.mark.usefixtures("context")
async def test_a_given_root_clears_the_parent(sink: Sink) -> None:
    given = SimpleNamespace(status=ParentResolutionStatus.ROOT, match=None, reason="")
    await commit_entry(entry(parent_resolution="resolved", parent_call_id="call-0"), parent_resolution=given)
    stored = sink.entries[0]
    assert (stored.parent_resolution, stored.parent_call_id) == (ParentResolutionStatus.ROOT, None)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "resolved"),
        ({}, "orphan"),
        ({"generation_log_probs": []}, "root"),
        ({"prompt_token_ids": [-1]}, "root"),
        ({"prompt_is_delta": True}, "root"),
    ],
)
async def test_an_entry_that_no_reader_could_load_is_marked_not_stored(
    context: CaptureContext, sink: Sink, changes: dict[str, Any], status: str
) -> None:
    broken = entry()
    for name, value in changes.items():
        setattr(broken, name, value)
    await commit_entry(broken, parent_resolution=SimpleNamespace(status=status, match=None, reason=""))
    assert (sink.entries, sink.marks, context.committed) == ([], [("rollout-1", "call-1")], False)


@pytest.mark.parametrize("other", [{"rollout_id": "rollout-2"}, {"model_call_id": "call-2"}])
async def test_an_entry_of_another_call_is_marked_not_stored(
    context: CaptureContext, sink: Sink, caplog: pytest.LogCaptureFixture, other: dict[str, str]
) -> None:
    await commit_entry(entry(**other))
    assert (sink.entries, sink.marks, context.committed) == ([], [("rollout-1", "call-1")], False)
    only_log(caplog, logging.WARNING)


class Incomparable:
    """As numpy arrays and proxies of remote objects behave."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("cannot be compared")

    __hash__ = object.__hash__


@pytest.mark.parametrize("name", ["rollout_id", "model_call_id"])
@pytest.mark.parametrize("odd_id", [Incomparable(), np.array([1, 2]), b"call-1", 5], ids=steady_repr)
async def test_an_entry_whose_ids_are_no_text_is_marked_and_never_raised(
    context: CaptureContext, sink: Sink, name: str, odd_id: Any
) -> None:
    broken = entry()
    setattr(broken, name, odd_id)
    await commit_entry(broken)
    assert (sink.entries, sink.marks, context.committed) == ([], [("rollout-1", "call-1")], False)


async def test_what_is_no_entry_at_all_is_marked_and_never_raised(
    context: CaptureContext, sink: Sink
) -> None:
    nothing: Any = None
    await commit_entry(nothing)
    assert (sink.marks, context.committed) == ([("rollout-1", "call-1")], False)


async def test_without_a_sink_the_context_counts_as_committed(context: CaptureContext) -> None:
    context.token_sink = None
    staged = entry()
    await commit_entry(staged)
    assert context.committed
    assert staged.digest is None


async def test_a_response_captured_without_a_sink_commits_the_context(context: CaptureContext) -> None:
    context.token_sink = None
    await capture_tokens(RESPONSE)
    assert context.committed


# The choice between this flow and Gym's

# The package's own __init__ imports the Redis transport, so an empty one takes its place here.
WITHOUT_GYM = """
import sys
from types import ModuleType
sys.modules["nemo_gym"] = None
sys.modules["gym_capture_redis"] = package = ModuleType("gym_capture_redis")
package.__path__ = [sys.argv[1]]
import gym_capture_redis._standalone_capture as standalone
from gym_capture_redis import capture, protocols, records
assert all(getattr(capture, name) is getattr(standalone, name) for name in capture.__all__)
assert protocols.installed_token_sink() is None
heavy = {"redis", "ray", "torch", "fastapi", "starlette", "aiohttp"} & set(sys.modules)
assert not heavy, heavy
"""


def test_without_gym_the_modules_stand_alone_and_import_nothing_heavy() -> None:
    package = str(Path(capture.__file__).parent)
    subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_GYM, package], check=True, timeout=60)


def test_a_gym_that_lacks_a_part_of_the_flow_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    has = {"capture_tokens": capture_tokens}
    monkeypatch.setattr(gym_compat, "gym_package", object)
    monkeypatch.setattr(gym_compat, "gym_attribute", lambda _module, name: has.get(name))
    assert gym_compat.shared_objects("sink", ["capture_tokens"]) == has
    with pytest.raises(ImportError, match="no commit_entry to share"):
        gym_compat.shared_objects("sink", ["capture_tokens", "commit_entry"])


def test_without_gym_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_compat, "gym_package", lambda: None)
    assert gym_compat.shared_objects("sink", ["capture_tokens"]) == {}


@pytest.mark.parametrize(
    "error", [ImportError("no orjson"), SyntaxError("newer Python"), ModuleNotFoundError()]
)
def test_a_gym_that_cannot_be_imported_is_no_gym_but_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(_name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    assert gym_compat.gym_package.__wrapped__() is None
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize("field", ARRAYS)
@pytest.mark.parametrize(
    "bad",
    [
        [987654321.5],
        ["abc987654321"],
        "987654321",
        [[987654321]],
        {"987654321": 1},
        [2**70 + 987654321],
        [True],
    ],
    ids=repr,
)
async def test_what_is_wrong_is_logged_without_token_data(
    caplog: pytest.LogCaptureFixture, field: str, bad: Any
) -> None:
    sink = Sink()
    token = capture.set_token_sink(CaptureContext("r", "c", token_sink=sink))
    try:
        await capture_tokens({**RESPONSE, "output": [{**MESSAGE, **ARRAYS, field: bad}]})
    finally:
        capture.reset_token_sink(token)
    assert "987654321" not in caplog.text
    assert str(2**70 + 987654321) not in caplog.text
    assert bool(sink.entries) != bool(sink.marks)
