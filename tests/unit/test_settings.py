"""What a user can choose: every URL, every refusal by name, and never a password in what is shown."""

from __future__ import annotations

import asyncio
import functools
import pickle
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gym_capture_redis.errors import ConfigurationError, InvalidIdentifierError
from gym_capture_redis.server_url import DEFAULT_PORT, ServerUrl
from gym_capture_redis.settings import (
    URL_VARIABLE,
    LedgerSettings,
    LineageSettings,
    ServerSettings,
    SinkSettings,
    SourceSettings,
    StagingSinkSettings,
    StagingSourceSettings,
)
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

ENDPOINTS = [RedisTokenSink, RedisTokenSource]
CLASSES: list[type[ServerSettings]] = [
    SinkSettings,
    SourceSettings,
    LineageSettings,
    LedgerSettings,
    StagingSinkSettings,
    StagingSourceSettings,
]


class Container(Mapping[str, Any]):
    """A mapping that is no dict, as OmegaConf's are."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Row(Sequence[Any]):
    def __init__(self, *items: Any) -> None:
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


def parts(url: str) -> dict[str, Any]:
    """What differs from the defaults, with the password in clear."""
    parsed = ServerUrl.parse(url)
    shown = parsed.model_dump(exclude_defaults=True)
    if parsed.password is not None:
        shown["password"] = parsed.password.get_secret_value()
    return shown


# URLs


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", {"scheme": "tcp", "host": "127.0.0.1"}),
        ("redis://server", {"scheme": "tcp", "host": "server"}),
        ("redis://SERVER", {"scheme": "tcp", "host": "server"}),
        ("REDIS://server", {"scheme": "tcp", "host": "server"}),
        ("redis://server:7000/3", {"scheme": "tcp", "host": "server", "port": 7000, "db": 3}),
        ("redis://server/3/", {"scheme": "tcp", "host": "server", "db": 3}),
        ("valkey://server", {"scheme": "tcp", "host": "server"}),
        ("rediss://server", {"scheme": "tls", "host": "server"}),
        ("valkeys://server", {"scheme": "tls", "host": "server"}),
        ("redis://[::1]:7000", {"scheme": "tcp", "host": "::1", "port": 7000}),
        ("redis://:pw@server", {"scheme": "tcp", "host": "server", "password": "pw"}),
        ("redis://user:pw@server", {"scheme": "tcp", "host": "server", "username": "user", "password": "pw"}),
        ("redis://user@server", {"scheme": "tcp", "host": "server", "username": "user"}),
        (
            "redis://u%40x:%23%2F%40%3F%3A%25@server",
            {"scheme": "tcp", "host": "server", "username": "u@x", "password": "#/@?:%"},
        ),
        ("redis://:p%C3%A9+w@server", {"scheme": "tcp", "host": "server", "password": "pé+w"}),
        ("redis://:p@w@server", {"scheme": "tcp", "host": "server", "password": "p@w"}),
        ("redis://:p:w@[::1]:1/2", {"scheme": "tcp", "host": "::1", "port": 1, "db": 2, "password": "p:w"}),
        ("unix:///run/redis.sock", {"scheme": "unix", "path": "/run/redis.sock"}),
        ("unix:///run/redis.sock?db=4", {"scheme": "unix", "path": "/run/redis.sock", "db": 4}),
        (
            "unix://user:pw@/run/a%20b",
            {"scheme": "unix", "path": "/run/a b", "username": "user", "password": "pw"},
        ),
        ("embedded:", {"scheme": "embedded"}),
        ("embedded:///runs/today", {"scheme": "embedded", "path": "/runs/today"}),
        ("fakeredis://name", {"scheme": "fakeredis", "host": "name"}),
        (
            "redis+sentinel://u:pw@a,B:1,[::1]:2/service/3",
            {
                "scheme": "tcp",
                "topology": "sentinel",
                "host": "a",
                "port": 26379,
                "more": (("b", 1), ("::1", 2)),
                "service": "service",
                "db": 3,
                "username": "u",
                "password": "pw",
            },
        ),
        (
            "valkeys+sentinel://a/service",
            {"scheme": "tls", "topology": "sentinel", "host": "a", "port": 26379, "service": "service"},
        ),
        (
            "redis+cluster://a:7000,b",
            {"scheme": "tcp", "topology": "cluster", "host": "a", "port": 7000, "more": (("b", 6379),)},
        ),
        ("rediss+cluster://:pw@a/0", {"scheme": "tls", "topology": "cluster", "host": "a", "password": "pw"}),
    ],
)
def test_a_url_says_where_the_server_is_and_who_asks(url: str, expected: dict[str, Any]) -> None:
    assert parts(url) == expected


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@server:7000/3", "redis://server:7000/3"),
        ("valkeys://:pw@server", f"rediss://server:{DEFAULT_PORT}/0"),
        ("redis://:pw@[::1]", f"redis://[::1]:{DEFAULT_PORT}/0"),
        ("unix://user:pw@/run/redis.sock?db=4", "unix:///run/redis.sock"),
        ("embedded:", "embedded:"),
        ("embedded:///runs", "embedded:///runs"),
        ("fakeredis://name", "fakeredis://name"),
        ("redis+sentinel://u:pw@a,[::1]:2/service", "redis+sentinel://a:26379,[::1]:2/service/0"),
        ("valkeys+cluster://:pw@a,b:1", "rediss+cluster://a:6379,b:1/0"),
    ],
)
def test_a_url_is_shown_without_its_credentials(url: str, shown: str) -> None:
    assert str(ServerUrl.parse(url)) == shown
    assert repr(RedisTokenSink(url, namespace="run")) == f"RedisTokenSink({shown!r}, namespace='run')"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://server", "'http' is not a known URL scheme; use one of redis:.*unix:"),
        ("redis+other://server", r"'redis\+other' is not a known URL scheme"),
        ("server:6379", "has no scheme; use one of redis:"),
        ("", "has no scheme"),
        ("redis://server?timeout=5", "unknown query key 'timeout'"),
        ("redis://server?db=1", "unknown query key 'db'"),
        ("unix:///run/s?db=1&decode_responses=no", "unknown query key 'decode_responses'"),
        ("unix:///run/s?db=", None),
        ("redis://server/abc", "database in the Redis URL is not a number"),
        ("redis://server/-1", "database in the Redis URL is not a number"),
        ("redis://server/1/2", "database in the Redis URL is not a number"),
        ("redis://server/²", "database in the Redis URL is not a number"),
        ("unix:///run/s?db=x", "database in the Redis URL is not a number"),
        ("redis://server/" + "1" * 5000, "database in the Redis URL is not a number"),
        ("redis+sentinel://a,b", r"names the service, as in redis\+sentinel://a,b/service"),
        ("redis+sentinel://a,b/service/x", "database in the Redis URL is not a number"),
        ("redis+sentinel:///service", "names one or more hosts"),
        ("redis+cluster://", "names one or more hosts"),
        ("redis+cluster://a,,b", "cannot be parsed: a host is missing"),
        ("redis+cluster://a,:1", "cannot be parsed: a host is missing"),
        ("redis+cluster://a:1:2", "cannot be parsed: its host has .* a ':'"),
        ("redis+cluster://a:0", "cannot be parsed: its port is not a number from 1 to 65535"),
        ("redis+cluster://a/1", "a Cluster has database 0 only"),
        ("redis://a,b", r"several hosts need.*\+sentinel or \+cluster"),
        ("unix:", "needs the path of the socket"),
        ("unix://run/redis.sock", "absolute path"),
        ("embedded://runs/today", "absolute path"),
        ("embedded:runs/today", "absolute path, as in embedded:///absolute/path"),
        ("embedded:./runs", "absolute path, as in embedded:///absolute/path"),
        ("redis://server:port", "cannot be parsed: its port is not a number"),
        ("redis://server:", "cannot be parsed: its port is not a number"),
        ("redis://server:-1", "cannot be parsed: its port is not a number"),
        ("redis://server:65536", "cannot be parsed: its port is not a number from 1 to 65535"),
        ("redis://server:0", "cannot be parsed: its port is not a number from 1"),
        ("redis://server:²", "cannot be parsed: its port is not a number from 1"),
        ("redis://[::1", r"cannot be parsed: brackets stand around an IPv6 address only, as in \[::1\]"),
        ("redis://a\u2100b", "cannot be parsed: a character in it looks like"),
        ("redis://::1", "cannot be parsed: its host has .* an IPv6 address has in brackets only"),
        ("redis://ser ver", "cannot be parsed: its host has white space"),
        ("redis://server :6379", "cannot be parsed: its host has white space"),
        ("redis://:a?b@server", "cannot be parsed: .*in a password .* must be percent-encoded"),
        (" redis://server", "begins or ends with white space"),
        ("redis://server/0\n", "begins or ends with white space"),
        ("redis://server#x", "'#'.*%23"),
    ],
)
def test_a_malformed_url_is_refused_with_what_is_wrong(url: str, message: str | None) -> None:
    if message is None:
        assert ServerUrl.parse(url).db == 0
        return
    with pytest.raises(ConfigurationError, match=message):
        ServerUrl.parse(url)


# Passwords


def shown_by(url: str, **settings: Any) -> str:
    """All that a user can get to see of an endpoint, or of the refusal to build it."""
    try:
        endpoint = RedisTokenSink(url, **settings)
    except ConfigurationError as error:
        return f"{error} {error!r} {error.__cause__!r}"
    settings_ = endpoint._settings
    return f"{endpoint!r} {endpoint} {settings_!r} {settings_} {settings_.url!r} {settings_.url}"


@pytest.mark.parametrize("special", "#/?@[]:%\\ &=+\"'<>^`{|}é\u2100")
@pytest.mark.parametrize("form", ["{first}{special}{second}", "{special}{second}", "12{special}{second}"])
@pytest.mark.parametrize(
    "around", ["redis://:{}@server:6379/0", "rediss://user:{}@server", "unix://:{}@/run/s"]
)
def test_a_password_that_is_not_percent_encoded_is_never_shown(around: str, form: str, special: str) -> None:
    password = form.format(first="hunter", special=special, second="swordfish")
    shown = shown_by(around.format(password))
    assert "hunter" not in shown
    assert "swordfish" not in shown
    assert "12" not in shown.replace("127.0.0.1", "")


@pytest.mark.parametrize(
    "settings",
    [
        {"password": 5_551_234},
        {"password": ["swordfish"]},
        {"password": {"swordfish": 1}},
        {"password": "swordfish", "timeout_s": -1},
        {"password": "swordfish", "unknown": 1},
        {"password": "swordfish", "tls": {"unknown": 1}},
        {"password": "swordfish", "connections": "swordfish"},
        {"sentinel_password": 5_551_234},
        {"username": 5_551_234},
        {"tls": "swordfish"},
        {"durability": "redis://:swordfish@server"},
        {"assume_appendfsync": "redis://:swordfish@server"},
    ],
    ids=repr,
)
def test_a_refused_setting_shows_no_secret(settings: dict[str, Any]) -> None:
    shown = shown_by("redis://:swordfish@server", **settings)
    assert "swordfish" not in shown
    assert "5551234" not in shown


def test_a_password_setting_is_never_shown() -> None:
    sink = RedisTokenSink("redis://server", password="swordfish", username="user")
    settings = sink._settings
    assert settings.password == SecretStr("swordfish")
    for shown in (repr(sink), str(sink), repr(settings), str(settings), repr(sink.__dict__)):
        assert "swordfish" not in shown


# Settings


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time_out": 5}, "'time_out' is not a setting; the settings are url, namespace, .*timeout_s"),
        ({"nmspace": "x"}, "'nmspace' is not a setting; the settings are url, namespace, "),
        (
            {"tls": {"ca": "x"}},
            "'tls.ca' is not a setting; the settings of tls are ca_certs_path, [a-z_, ]*$",
        ),
        ({"timeout_s": 0}, "setting 'timeout_s' is refused: it must be above 0, not 0$"),
        ({"timeout_s": float("inf")}, "setting 'timeout_s' is refused: it must be a finite number, not inf$"),
        ({"timeout_s": float("nan")}, "setting 'timeout_s' is refused: it must be .*, not nan$"),
        ({"timeout_s": None}, "setting 'timeout_s' is refused: it must be a number, not None$"),
        ({"timeout_s": "soon"}, "setting 'timeout_s' is refused: it must be a number, not text$"),
        ({"connections": 0}, "setting 'connections' is refused: it must be at least 1, not 0$"),
        ({"connections": 65}, "setting 'connections' is refused: it must be at most 64, not 65$"),
        ({"connections": 1.5}, "setting 'connections' is refused: it must be a whole number, not 1.5$"),
        ({"connections": 10**5000}, "setting 'connections' is refused: it must be .*, not of type int$"),
        ({"connections": [2]}, "setting 'connections' is refused: it must be .*, not of type list$"),
        (
            {"durability": "disk"},
            "setting 'durability' is refused: it must be 'memory', 'aof' or 'fsync', not 'disk'$",
        ),
        ({"assume_appendfsync": "no"}, "setting 'assume_appendfsync' .* 'everysec' or 'always', not 'no'$"),
        ({"username": 5}, "setting 'username' is refused: it must be text, not of type int$"),
        ({"tls": 5}, "setting 'tls' is refused: it must be a mapping, not 5$"),
        (
            {"tls": {"check_hostname": 5}},
            r"'tls\.check_hostname' is refused: it must be true or false, not 5$",
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, str) else "-".join(value),
)
def test_a_wrong_setting_is_refused_in_plain_words(
    endpoint: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{endpoint.__name__}: .*{message}"):
        endpoint("rediss://server", **settings)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("url", ["redis://server", "unix:///run/s", "embedded:", "fakeredis://name"])
@pytest.mark.parametrize("tls", [{}, {"check_hostname": False}, {"ca": "misspelt"}])
def test_certificates_are_refused_where_nothing_would_be_encrypted(
    endpoint: Any, url: str, tls: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"'tls' needs a rediss:// URL"):
        endpoint(url, tls=tls)
    assert endpoint(url, tls=None)._settings.tls is None


@pytest.mark.parametrize("name", ["ca_certs_path", "cert_path", "key_path"])
async def test_a_certificate_that_cannot_be_read_is_told_at_the_first_call(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "missing.pem")
    async with RedisTokenSink("rediss://127.0.0.1:1", tls={name: path}) as sink:
        with pytest.raises(ConfigurationError, match=rf"'tls\.{name}' names '{path}', which cannot be read"):
            await sink.begin_call("r", "c")


@pytest.mark.parametrize(
    ("endpoint", "settings"),
    [
        (RedisTokenSink, {"chunk_bytes": 1}),
        (RedisTokenSink, {"max_record_bytes": 0}),
        (RedisTokenSink, {"max_record_bytes": 2**30}),
        (RedisTokenSource, {"max_record_bytes": 1}),
        (RedisTokenSource, {"chunk_bytes": 0}),
        (RedisTokenSource, {"tombstone_ttl_s": 59}),
    ],
)
def test_a_setting_of_the_other_end_or_out_of_range_is_refused(
    endpoint: Any, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        endpoint("redis://server", **settings)


def test_an_unknown_setting_is_told_what_there_is() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        RedisTokenSink("redis://server", max_bytes=1)
    for name in SinkSettings.model_fields:
        assert name in str(refusal.value)


@pytest.mark.parametrize("kind", CLASSES)
def test_each_kind_of_settings_names_the_class_that_takes_them(kind: type[ServerSettings]) -> None:
    assert f"``{kind.used_by}``" in str(kind.__doc__)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_url_and_namespace_have_one_way_in(endpoint: Any) -> None:
    for settings in ({"scheme": "tcp"}, {"host": "x"}, {"port": 1}):
        with pytest.raises(ConfigurationError, match="is not a setting"):
            endpoint("redis://server", **settings)


@pytest.mark.parametrize("namespace", ["", "a b", "a/b", "{a}", "a" * 65, "é", "a\n", None, 5])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_namespace_outside_the_alphabet_is_refused(endpoint: Any, namespace: Any) -> None:
    with pytest.raises(InvalidIdentifierError, match="namespace"):
        endpoint("redis://server", namespace=namespace)


@pytest.mark.parametrize("url", [5, b"redis://server", ["redis://server"]])
def test_a_url_must_be_text(url: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"url must be a string, not of type {type(url).__name__}"):
        RedisTokenSink(url)


def test_mappings_of_any_class_are_settings() -> None:
    tls = Container(ca_certs_path="ca.pem", check_hostname=False)
    settings = SinkSettings.build("rediss://server", "run", Container(tls=tls, timeout_s=5))
    assert settings.tls is not None
    assert (settings.tls.ca_certs_path, settings.tls.check_hostname) == ("ca.pem", False)
    assert settings.timeout_s == 5
    assert RedisTokenSink("rediss://server", tls=tls)._settings.tls == settings.tls


def test_an_error_in_a_nested_mapping_is_named_by_its_path() -> None:
    with pytest.raises(ConfigurationError, match=r"'tls\.check_hostname' is refused"):
        RedisTokenSink("rediss://server", tls=Container(check_hostname=Row(1, 2)))


def test_sink_and_source_have_deadlines_of_their_own_by_default() -> None:
    assert SinkSettings.build("redis://server", "run", {}).timeout_s == 30
    assert SourceSettings.build("redis://server", "run", {}).timeout_s == 120


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("variable", "argument", "shown"),
    [
        (None, None, "redis://127.0.0.1:6379/0"),
        ("", None, "redis://127.0.0.1:6379/0"),
        ("redis://:pw@other:1/2", None, "redis://other:1/2"),
        ("redis://other:1/2", "redis://server", "redis://server:6379/0"),
    ],
)
def test_without_a_url_the_environment_decides(
    endpoint: Any,
    variable: str | None,
    argument: str | None,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is None:
        monkeypatch.delenv(URL_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(URL_VARIABLE, variable)
    assert repr(endpoint(argument)) == f"{endpoint.__name__}({shown!r}, namespace='default')"


def test_a_malformed_url_in_the_environment_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, "redis://:hunter#fish@server")
    with pytest.raises(ConfigurationError) as refusal:
        RedisTokenSink()
    assert "hunter" not in str(refusal.value)


# Constructing


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    "url", ["redis://:pw@server", "rediss://server", "unix:///run/s", "embedded:", "fakeredis://name"]
)
def test_constructing_opens_no_socket_thread_or_loop(
    endpoint: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        pytest.fail("constructing did something")

    # Patched by hand: asyncio.new_event_loop and friends all end in one of these.
    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setattr(threading.Thread, "start", forbidden)
    monkeypatch.setattr(asyncio, "new_event_loop", forbidden)
    monkeypatch.setattr(selectors, "DefaultSelector", forbidden)
    monkeypatch.setattr("subprocess.Popen", forbidden)
    built = endpoint(url, namespace="run", timeout_s=5)
    assert "run" in repr(built)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_endpoint_never_used_is_closed_without_effect(endpoint: Any) -> None:
    built = endpoint("redis://nowhere.invalid")

    async def close_twice() -> None:
        await built.close()
        await built.close()

    asyncio.run(close_twice())
    asyncio.run(close_twice())


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_factory_of_an_endpoint_can_be_pickled(endpoint: Any) -> None:
    factory = functools.partial(endpoint, "redis://:pw@server", namespace="run", timeout_s=5)
    built = pickle.loads(pickle.dumps(factory))()
    assert repr(built) == f"{endpoint.__name__}('redis://server:6379/0', namespace='run')"
    assert built._settings == factory()._settings


@pytest.mark.parametrize("settings", [SinkSettings, SourceSettings])
def test_settings_survive_pickling(settings: Any) -> None:
    built = settings.build("rediss://user:pw@server", "run", {"password": "other", "tls": {}})
    again = pickle.loads(pickle.dumps(built))
    assert again == built
    assert again.password.get_secret_value() == "other"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_endpoint_is_true_and_has_no_length(endpoint: Any) -> None:
    # Callers choose with `a or b`.
    assert "__bool__" not in dir(endpoint)
    assert "__len__" not in dir(endpoint)
    assert bool(endpoint("redis://server"))
