"""Which server can keep which promise, and which line of configuration a refused one needs."""

from __future__ import annotations

import re
import time
import uuid
from itertools import pairwise
from typing import Any, Literal

import pytest
from redis.exceptions import InvalidResponse, ResponseError

from gym_capture_redis.errors import ConfigurationError, DurabilityError
from gym_capture_redis.faults import is_transient
from gym_capture_redis.server_check import (
    ServerFacts,
    ServersSeen,
    check_kind,
    check_server,
    confirming_commands,
    warnings_about,
)
from gym_capture_redis.server_url import Address, Topology
from gym_capture_redis.settings import Durability, SinkSettings
from gym_capture_redis.wire import agree, read_facts

SERVER = "redis://server:6379/0"
ABLE = ServerFacts(
    run_id="1",
    version=(7, 0, 15),
    aof_enabled=True,
    maxmemory_policy="noeviction",
    appendfsync="always",
    still_starting="",
)


def check(
    durability: Durability = "fsync",
    assume: Literal["everysec", "always"] | None = None,
    **facts: Any,
) -> None:
    check_server(
        ServerFacts(**vars(ABLE) | facts), durability=durability, assume_appendfsync=assume, server=SERVER
    )


@pytest.mark.parametrize("durability", ["memory", "aof", "fsync"])
def test_a_server_that_can_do_everything_is_taken(durability: Durability) -> None:
    check(durability)


@pytest.mark.parametrize(
    ("durability", "appendfsync", "taken"),
    [
        ("memory", "no", True),
        ("memory", "everysec", True),
        ("aof", "no", False),
        ("aof", "everysec", True),
        ("aof", "always", True),
        ("fsync", "no", False),
        ("fsync", "everysec", False),
        ("fsync", "always", True),
    ],
)
def test_each_durability_needs_its_appendfsync(durability: Durability, appendfsync: str, taken: bool) -> None:
    if taken:
        check(durability, appendfsync=appendfsync)
        return
    line = "always" if durability == "fsync" else "everysec"
    message = f"{re.escape(SERVER)} has appendfsync {appendfsync}.*`appendfsync {line}`"
    with pytest.raises(DurabilityError, match=message):
        check(durability, appendfsync=appendfsync)


@pytest.mark.parametrize("durability", ["aof", "fsync"])
def test_without_an_append_only_file_only_memory_can_be_promised(durability: Durability) -> None:
    check("memory", aof_enabled=False)
    with pytest.raises(DurabilityError, match=r"`appendonly yes`.*durability='memory'"):
        check(durability, aof_enabled=False)


@pytest.mark.parametrize("durability", ["memory", "aof", "fsync"])
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random", ""])
def test_a_server_that_evicts_is_never_taken(durability: Durability, policy: str) -> None:
    with pytest.raises(DurabilityError, match="`maxmemory-policy noeviction`"):
        check(durability, maxmemory_policy=policy)


@pytest.mark.parametrize(
    ("durability", "assumed", "taken"),
    [
        ("memory", None, True),
        ("aof", None, False),
        ("aof", "everysec", True),
        ("aof", "always", True),
        ("fsync", None, False),
        ("fsync", "everysec", False),
        ("fsync", "always", True),
    ],
)
def test_where_config_is_forbidden_the_user_must_vouch_for_appendfsync(
    durability: Durability, assumed: Literal["everysec", "always"] | None, taken: bool
) -> None:
    if taken:
        check(durability, assumed, appendfsync=None)
        return
    with pytest.raises(DurabilityError, match="assume_appendfsync" if assumed is None else "too weak"):
        check(durability, assumed, appendfsync=None)


def test_what_the_server_says_outweighs_what_the_user_assumes() -> None:
    with pytest.raises(DurabilityError, match="has appendfsync no"):
        check("aof", "always", appendfsync="no")


@pytest.mark.parametrize("version", [(6, 2, 14), (0,), ()])
def test_a_server_without_script_flags_is_refused(version: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"7\.0"):
        check("memory", version=version)


@pytest.mark.parametrize("version", [(7, 0), (7, 2, 4), (8, 2, 3), (10, 0)])
def test_newer_servers_are_taken(version: tuple[int, ...]) -> None:
    check(version=version)


@pytest.mark.parametrize(
    ("line", "topology", "message"),
    [
        ("redis_mode:sentinel", "standalone", r"is a Sentinel; use redis\+sentinel://host:port/service"),
        ("server_mode:sentinel", "standalone", "is a Sentinel"),
        ("cluster_enabled:1", "standalone", r"is a node of a Cluster; use redis\+cluster://"),
        ("cluster_enabled:1", "sentinel", r"is a node of a Cluster; use redis\+cluster://"),
        ("cluster_enabled:1", "cluster", None),
        ("redis_mode:standalone\r\ncluster_enabled:0", "standalone", None),
    ],
)
def test_a_server_of_another_kind_than_the_url_says_is_refused(
    line: str, topology: Topology, message: str | None
) -> None:
    facts = ServerFacts.parse(INFO + line.encode(), None)
    if message is None:
        check_kind(facts, topology=topology, server=SERVER)
        return
    with pytest.raises(ConfigurationError, match=f"^{SERVER} {message}"):
        check_kind(facts, topology=topology, server=SERVER)


INFO = (
    b"# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nrun_id:abc\r\n"
    b"executable:/opt/a:b\r\n\r\n# Memory\r\nmaxmemory_policy:noeviction\r\n"
    b"# Persistence\r\naof_enabled:1\r\n"
)


def test_the_replies_of_a_server_are_read() -> None:
    assert ServerFacts.parse(INFO, {"appendfsync": "everysec"}) == ServerFacts(
        run_id="abc",
        version=(7, 2, 4),
        aof_enabled=True,
        maxmemory_policy="noeviction",
        appendfsync="everysec",
        still_starting="",
        is_valkey=True,
    )


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("loading:1", "loading its data"),
        ("loading:0 async_loading:1", "loading its data"),
        ("aof_base_size:0 aof_rewrite_in_progress:1", "writing its first append-only file"),
        (
            "aof_base_size:0 aof_rewrite_in_progress:0 aof_rewrite_scheduled:1",
            "writing its first append-only",
        ),
    ],
)
def test_a_server_that_cannot_tell_yet_says_why(lines: str, why: str) -> None:
    assert why in ServerFacts.parse(INFO + lines.replace(" ", "\r\n").encode(), None).still_starting


@pytest.mark.parametrize(
    "lines",
    [
        "loading:0 async_loading:0",
        "aof_base_size:0 aof_rewrite_in_progress:0 aof_rewrite_scheduled:0",  # an empty server
        "aof_base_size:88 aof_rewrite_in_progress:1",  # an ordinary rewrite
        "aof_rewrite_in_progress:1",
        "aof_enabled:0 aof_base_size:0 aof_rewrite_in_progress:1",
    ],
)
def test_a_server_at_its_ordinary_work_is_ready(lines: str) -> None:
    assert not ServerFacts.parse(INFO + lines.replace(" ", "\r\n").encode(), None).still_starting


@pytest.mark.parametrize("config", [None, {}])
def test_what_the_server_does_not_tell_is_unknown(config: dict[str, str] | None) -> None:
    assert ServerFacts.parse(INFO, config).appendfsync is None


@pytest.mark.parametrize(
    "info", [b"", b"\xff\xfe", b"redis_version:\r\n", b"redis_version:x.y", b"aof_enabled:yes"]
)
def test_a_strange_reply_never_looks_able(info: bytes) -> None:
    facts = ServerFacts.parse(info, None)
    with pytest.raises((ConfigurationError, DurabilityError)):
        check_server(facts, durability="memory", assume_appendfsync="always", server=SERVER)


# What to wait for, and what to warn of


def confirming(facts: dict[str, Any], **settings: Any) -> list[tuple[Any, ...]]:
    made = SinkSettings.build("redis://server", "run", settings)
    return [each.words for each in confirming_commands(ServerFacts(**vars(ABLE) | facts), made)]


@pytest.mark.parametrize(
    ("facts", "settings", "expected"),
    [
        ({}, {}, []),
        ({"appendfsync": "everysec"}, {"durability": "aof"}, []),
        ({}, {"durability": "fsync"}, []),  # `always` needs no wait
        ({}, {"replicas": 2}, [("WAIT", 2)]),
        (
            {"version": (8, 2, 3), "appendfsync": "everysec"},
            {"durability": "fsync"},
            [("WAITAOF", 1, 0)],
        ),
        (
            {"version": (8, 2, 3), "appendfsync": None},
            {"durability": "fsync", "assume_appendfsync": "everysec", "replicas": 1},
            [("WAITAOF", 1, 0), ("WAIT", 1)],
        ),
    ],
)
def test_what_must_be_waited_for(
    facts: dict[str, Any], settings: dict[str, Any], expected: list[tuple[Any, ...]]
) -> None:
    assert confirming(facts, **settings) == expected


def test_fsync_without_always_needs_a_server_whose_waitaof_waits() -> None:
    check("fsync", version=(8, 0), appendfsync="everysec")
    for facts in ({"version": (7, 4, 9)}, {"version": (8, 1), "is_valkey": True}):
        with pytest.raises(DurabilityError, match="`appendfsync always`"):
            check("fsync", appendfsync="everysec", **facts)


def test_fsync_is_not_promised_by_a_server_that_pauses_it() -> None:
    check("aof", pauses_fsync=True)
    with pytest.raises(DurabilityError, match="`no-appendfsync-on-rewrite no`"):
        check("fsync", pauses_fsync=True)


@pytest.mark.parametrize(
    ("facts", "topology", "replicas", "warned"),
    [
        ({"connected_replicas": 1}, "sentinel", 0, "min-replicas-to-write 1"),
        ({"connected_replicas": 1}, "cluster", 0, "min-replicas-to-write 1"),
        ({"connected_replicas": 1}, "sentinel", 1, None),
        ({"connected_replicas": 1, "min_replicas_to_write": 1}, "sentinel", 0, None),
        ({"connected_replicas": 1}, "standalone", 0, None),
        ({}, "sentinel", 0, None),
        ({"maxmemory": 100, "used_memory": 95}, "standalone", 0, "95% of its maxmemory"),
        ({"maxmemory": 100, "used_memory": 90}, "standalone", 0, None),
        ({"used_memory": 95}, "standalone", 0, None),
    ],
)
def test_what_is_unsafe_is_warned_of(
    facts: dict[str, Any], topology: Topology, replicas: int, warned: str | None
) -> None:
    told = warnings_about(ServerFacts(**vars(ABLE) | facts), topology=topology, replicas=replicas)
    assert len(told) == (warned is not None)
    assert (warned or "") in "".join(told.values())


@pytest.mark.parametrize("url", ["redis://a", "redis+cluster://a,b"])
def test_each_server_is_warned_of_once_however_full_it_gets(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = SinkSettings.build(url, "run", {})
    first, second = Address(uuid.uuid4().hex, 1), Address(uuid.uuid4().hex, 2)
    for place, used in ((first, 91), (first, 92), (second, 91), (second, 99)):
        agree(ServerFacts(**vars(ABLE) | {"maxmemory": 100, "used_memory": used}), made, place)
    assert len(caplog.messages) == 2
    assert all("91% of its maxmemory" in told for told in caplog.messages)
    assert (str(first) in caplog.messages[0]) == ("cluster" in url)


# How long a server may still be getting back what it forgot

SETTLE_S = 5.0
PRIMARY = "a" * 40


class Meetings:
    """A process that meets servers, at times of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000.0
        self.seen = ServersSeen()
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def left_s(self, run_id: str = "1", place: str = "here", **facts: Any) -> float:
        met = ServerFacts(**vars(ABLE) | {"run_id": run_id} | facts)
        return max(0.0, self.seen.meet(place, met, settle_s=SETTLE_S) - self.now_s)


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> Meetings:
    return Meetings(monkeypatch)


@pytest.mark.parametrize(("uptime_s", "left_s"), [(0.0, 5.0), (2.0, 3.0), (5.0, 0.0), (500.0, 0.0)])
def test_a_server_that_was_just_started_is_young(meetings: Meetings, uptime_s: float, left_s: float) -> None:
    assert meetings.left_s(uptime_s=uptime_s) == left_s


def test_a_server_grows_older_between_two_connections(meetings: Meetings) -> None:
    assert meetings.left_s(uptime_s=0.0) == SETTLE_S
    meetings.now_s += 1.5
    assert meetings.left_s(uptime_s=1.0) == SETTLE_S - 1.5  # its own clock has whole seconds


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_a_promoted_server_is_young_from_its_first_meeting_on(meetings: Meetings, place: str) -> None:
    assert meetings.left_s(uptime_s=500.0) == 0.0
    assert meetings.left_s("2", place, uptime_s=500.0, followed=PRIMARY) == SETTLE_S
    meetings.now_s += 2.0
    assert meetings.left_s("2", place, uptime_s=502.0, followed=PRIMARY) == SETTLE_S - 2.0
    meetings.now_s += 3.0
    assert meetings.left_s("2", place, uptime_s=505.0, followed=PRIMARY) == 0.0


def test_a_server_in_the_place_of_another_is_young_however_long_it_ran(meetings: Meetings) -> None:
    assert meetings.left_s("1", uptime_s=500.0) == 0.0
    assert meetings.left_s("2", uptime_s=500.0) == SETTLE_S
    assert meetings.left_s("3", "elsewhere", uptime_s=500.0) == 0.0


def test_the_time_that_it_takes_to_load_its_data_does_not_count(meetings: Meetings) -> None:
    meetings.seen.meet_starting("here")
    meetings.now_s += 60.0
    assert meetings.left_s(uptime_s=60.0) == SETTLE_S


@pytest.mark.parametrize(("replid2", "followed"), [("0" * 40, ""), (PRIMARY, PRIMARY)])
def test_age_and_promotion_are_read_from_info(replid2: str, followed: str) -> None:
    info = f"# Server\r\nuptime_in_seconds:17\r\nmaster_replid2:{replid2}\r\n".encode()
    facts = ServerFacts.parse(info, None)
    assert (facts.uptime_s, facts.followed) == (17.0, followed)


@pytest.mark.parametrize(
    ("followed", "changes"),
    [
        (("", ""), [False]),
        (("", PRIMARY), [True]),
        ((PRIMARY, PRIMARY), [False]),
        ((PRIMARY, "b" * 40), [True]),
        # Without a replica for an hour it forgets whom it followed, and loses nothing by that.
        ((PRIMARY, "", PRIMARY), [False, False]),
        ((PRIMARY, "", "b" * 40), [False, True]),
    ],
)
def test_only_a_promotion_gives_a_process_another_name(
    followed: tuple[str, ...], changes: list[bool]
) -> None:
    seen = ServersSeen()
    names = [seen.name(ServerFacts(**vars(ABLE) | {"followed": primary})) for primary in followed]
    assert [name != before for before, name in pairwise(names)] == changes


@pytest.mark.parametrize(
    ("url", "durability", "forgets"),
    [
        ("redis://a", "memory", True),
        ("redis://a", "aof", True),
        ("redis://a", "fsync", False),
        ("embedded:", "fsync", False),
        ("redis+sentinel://a/s", "fsync", True),
        ("redis+cluster://a", "fsync", True),
        ("fakeredis://a", "memory", False),
    ],
)
def test_which_servers_may_come_back_without_acknowledged_steps(
    url: str, durability: str, forgets: bool
) -> None:
    assert SinkSettings.build(url, "run", {"durability": durability}).server_may_forget == forgets


def test_config_that_is_forbidden_is_told_from_a_server_that_is_busy_just_then() -> None:
    info = b"redis_version:7.0.15"
    forbidden = ResponseError("NOPERM this user has no permissions to run the 'config|get' command")
    assert read_facts(SERVER, info, forbidden).appendfsync is None
    with pytest.raises(ResponseError, match="BUSY"):
        read_facts(SERVER, info, ResponseError("BUSY Redis is busy running a script"))


@pytest.mark.parametrize(
    ("info", "config"),
    [(5, []), ([], []), (None, []), (b"redis_version:7.2", 5), (b"redis_version:7.2", b"x")],
)
def test_replies_that_are_out_of_step_with_the_questions_cost_the_connection(info: Any, config: Any) -> None:
    with pytest.raises(InvalidResponse) as caught:
        read_facts(SERVER, info, config)
    assert is_transient(caught.value)
