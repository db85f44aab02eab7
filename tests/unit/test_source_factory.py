"""What makes a source somewhere else: checked here, sent as bytes, and silent about its password."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from gym_capture_redis import (
    ConfigurationError,
    InvalidIdentifierError,
    RedisTokenSink,
    RedisTokenSource,
    token_source_factory,
)


def test_the_source_it_makes_after_it_was_sent_has_all_its_settings() -> None:
    factory = token_source_factory("redis://host:7000/1", namespace="run-17", password="secret", timeout_s=7)
    source = pickle.loads(pickle.dumps(factory))()
    assert isinstance(source, RedisTokenSource)
    assert vars(source._settings) == vars(
        RedisTokenSource("redis://host:7000/1", namespace="run-17", password="secret", timeout_s=7)._settings
    )


def test_the_url_of_the_environment_is_read_where_the_factory_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GYM_CAPTURE_REDIS_URL", "redis://driver/0")
    sent = pickle.dumps(token_source_factory(namespace="run-17"))
    monkeypatch.setenv("GYM_CAPTURE_REDIS_URL", "redis://actor/0")
    assert str(pickle.loads(sent)()._settings.url) == "redis://driver:6379/0"


def test_containers_of_omegaconf_are_not_sent() -> None:
    omegaconf: Any = pytest.importorskip("omegaconf", reason="NeMo Gym reads YAML with it")
    arguments = omegaconf.OmegaConf.create({"namespace": "run-17", "tls": {"check_hostname": False}})
    sent = pickle.dumps(token_source_factory("rediss://host/0", **arguments))
    assert b"omegaconf" not in sent
    assert pickle.loads(sent)()._settings.tls.check_hostname is False


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name_space": "x"}, ConfigurationError),
        ({"namespace": "x y"}, InvalidIdentifierError),
        ({"url": "http://host"}, ConfigurationError),
        ({"timeout_s": -1}, ConfigurationError),
    ],
)
def test_what_no_source_would_take_is_refused_where_the_factory_is_made(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        token_source_factory(**arguments)


def test_a_source_is_not_sent_itself_used_or_not() -> None:
    source = RedisTokenSource("fakeredis://pickling", durability="memory")
    with pytest.raises(TypeError, match=r"a RedisTokenSource cannot be pickled.*token_source_factory\(...\)"):
        pickle.dumps(source)
    with pytest.raises(TypeError, match="a RedisTokenSink cannot be pickled"):
        pickle.dumps(RedisTokenSink("redis://host"))


def test_it_does_not_show_the_password() -> None:
    shown = repr(token_source_factory("redis://user:secret@host/0", password="secret", namespace="run-17"))
    assert "secret" not in shown
    assert "run-17" in shown
