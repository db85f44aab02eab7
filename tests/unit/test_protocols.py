"""The interfaces and the installed endpoints, with Gym if it is there and in any case without."""

from __future__ import annotations

import dataclasses
import importlib.util
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from gym_capture_redis import gym_compat, protocols
from gym_capture_redis.protocols import IncompleteCode, IncompleteReason, Refusal, TokenCaptureSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator


async def _method(*_args: object, **_kwargs: object) -> None:
    """Stand in for any method of an endpoint."""


def endpoint(*methods: str) -> Any:
    return SimpleNamespace(**dict.fromkeys(methods, _method))


def loaded_without_gym(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a second copy of the module, made where Gym cannot be found."""
    monkeypatch.setattr(gym_compat, "gym_package", lambda: None)
    monkeypatch.setattr(gym_compat, "gym_attribute", lambda _module, _name: None)
    spec = importlib.util.find_spec("gym_capture_redis.protocols")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["as imported", "without Gym"])
def endpoints(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = protocols if request.param == "as imported" else loaded_without_gym(monkeypatch)
    yield module
    module.install_token_sink(None)
    module.install_token_source(None)


def test_nothing_is_installed_at_first(endpoints: ModuleType) -> None:
    assert endpoints.installed_token_sink() is None
    assert endpoints.installed_token_source() is None


def test_an_installed_sink_is_found_until_it_is_cleared(endpoints: ModuleType) -> None:
    sink = endpoint("put", "mark_incomplete", "close")
    endpoints.install_token_sink(sink)
    assert endpoints.installed_token_sink() is sink
    assert endpoints.installed_token_source() is None
    endpoints.install_token_sink(None)
    assert endpoints.installed_token_sink() is None


def test_an_installed_source_is_found_until_it_is_cleared(endpoints: ModuleType) -> None:
    source = endpoint("freeze", "drop", "close")
    endpoints.install_token_source(source)
    assert endpoints.installed_token_source() is source
    assert endpoints.installed_token_sink() is None
    endpoints.install_token_source(None)
    assert endpoints.installed_token_source() is None


@pytest.mark.parametrize("missing", ["put", "mark_incomplete", "close"])
def test_a_sink_that_lacks_a_method_is_refused_by_name(endpoints: ModuleType, missing: str) -> None:
    installed = endpoint("put", "mark_incomplete", "close")
    endpoints.install_token_sink(installed)
    with pytest.raises(TypeError, match=rf"\b{missing}\b"):
        endpoints.install_token_sink(endpoint(*{"put", "mark_incomplete", "close"} - {missing}))
    assert endpoints.installed_token_sink() is installed


@pytest.mark.parametrize("missing", ["freeze", "drop", "close"])
def test_a_source_that_lacks_a_method_is_refused_by_name(endpoints: ModuleType, missing: str) -> None:
    installed = endpoint("freeze", "drop", "close")
    endpoints.install_token_source(installed)
    with pytest.raises(TypeError, match=rf"\b{missing}\b"):
        endpoints.install_token_source(endpoint(*{"freeze", "drop", "close"} - {missing}))
    assert endpoints.installed_token_source() is installed


def test_an_attribute_that_cannot_be_called_is_no_method(endpoints: ModuleType) -> None:
    sink = SimpleNamespace(put=_method, mark_incomplete=True, close=_method)
    with pytest.raises(TypeError, match="mark_incomplete"):
        endpoints.install_token_sink(sink)


def test_a_refusal_names_everything_that_is_missing(endpoints: ModuleType) -> None:
    with pytest.raises(TypeError, match="put, mark_incomplete, close"):
        endpoints.install_token_sink(object())


def test_begin_call_and_refusals_are_optional(endpoints: ModuleType) -> None:
    assert isinstance(endpoint("put", "mark_incomplete", "close"), endpoints.TokenSink)
    assert isinstance(endpoint("freeze", "drop", "close"), endpoints.TokenSource)
    assert not isinstance(endpoint("put", "close"), endpoints.TokenSink)
    assert not isinstance(endpoint("freeze", "close"), endpoints.TokenSource)


def test_a_snapshot_is_built_from_gyms_five_fields_in_their_order() -> None:
    snapshot = TokenCaptureSnapshot("rollout", (), True, "snapshot", 3)
    assert [field.name for field in dataclasses.fields(snapshot)][:5] == [
        "rollout_id",
        "entries",
        "incomplete",
        "snapshot_id",
        "version",
    ]
    assert (snapshot.reasons, snapshot.refusals, snapshot.stored_bytes) == ((), (), 0)


def test_the_other_snapshot_fields_are_given_by_keyword_only() -> None:
    build: Any = TokenCaptureSnapshot
    reason = IncompleteReason(IncompleteCode.MARKED, "call-1", "")
    refusal = Refusal("call-2", "context-length", {"limit": 4096})
    snapshot = build("rollout", (), True, "s", 1, reasons=(reason,), refusals=(refusal,), stored_bytes=7)
    assert (snapshot.reasons, snapshot.refusals, snapshot.stored_bytes) == ((reason,), (refusal,), 7)
    with pytest.raises(TypeError):
        build("rollout", (), True, "s", 1, (reason,))


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (TokenCaptureSnapshot("rollout", (), False, "snapshot", 1), "version"),
        (IncompleteReason("marked", "call", ""), "code"),
        (Refusal("call", "code", {}), "code"),
    ],
)
def test_what_a_source_returns_cannot_be_changed(value: object, field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, "changed")


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (
            IncompleteReason(IncompleteCode.LOST_CALL, "c7", "no record"),
            "lost-call (model call c7): no record",
        ),
        (IncompleteReason(IncompleteCode.MARKED, "c7", ""), "marked (model call c7)"),
        (IncompleteReason("tampered", "", "3 records, 4 counted"), "tampered: 3 records, 4 counted"),
        (IncompleteReason("marked", "", ""), "marked"),
    ],
)
def test_a_reason_reads_as_one_line(reason: IncompleteReason, line: str) -> None:
    assert str(reason) == line


def test_the_reason_codes_never_change() -> None:
    assert {code.name: str(code) for code in IncompleteCode} == {
        "LOST_CALL": "lost-call",
        "MARKED": "marked",
        "LOST_STEPS": "lost-steps",
        "CONFLICT": "conflict",
        "CORRUPT": "corrupt",
        "MISSING_PARENT": "missing-parent",
        "TAMPERED": "tampered",
    }
