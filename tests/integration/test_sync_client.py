"""The client for threads: on every kind of server, through restarts, forks and connections that hang."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trustme
from redis import exceptions as redis_errors
from support.cluster import ClusterGroup
from support.polling import wait_until
from support.proxies import Proxy, StallingProxy
from support.sentinel import SentinelGroup
from support.servers import RealServer, free_port

from gym_capture_redis import scripts
from gym_capture_redis.embedded import EmbeddedServer
from gym_capture_redis.errors import (
    BackendUnavailableError,
    ConfigurationError,
    CorruptRecordError,
    DurabilityError,
)
from gym_capture_redis.keys import new_name, rollout_key
from gym_capture_redis.scripts import Reply
from gym_capture_redis.settings import SinkSettings
from gym_capture_redis.subject import Subject
from gym_capture_redis.sync_client import SyncClient
from gym_capture_redis.sync_link import within

pytestmark = pytest.mark.usefixtures("names_as_given")

PATIENCE_S = 30.0
THREADS = 8


class Client(SyncClient):
    """Announces calls and asks for rollouts, in a namespace of its own."""

    def __init__(self, url: str, namespace: str, **settings: Any) -> None:
        self.settings = SinkSettings.build(url, namespace, {"timeout_s": PATIENCE_S} | settings)
        self.namespace = namespace
        super().__init__(self.settings)

    def key(self, rollout: str) -> bytes:
        return rollout_key(self.namespace, rollout)

    def begin(self, rollout: str, call: str = "c") -> Reply:
        # The attempt's name tells whose answer it is.
        step = scripts.begin(self.key(rollout), call, new_incarnation=rollout.encode().hex().rjust(32, "0"))
        return self.run(step, Subject(rollout, call), deadline=self.deadline())

    def peek(self, rollout: str) -> Reply:
        return self.run(scripts.peek(self.key(rollout)), Subject(rollout), deadline=self.deadline())


def connections_of(server: RealServer) -> int:
    """How many there are, without the one that asks."""
    with server.client() as client:
        return len(client.client_list()) - 1


def check(client: Client) -> None:
    assert client.begin("r").code == "OK"
    assert client.begin("r").code == "SAME"
    assert client.peek("r").rest == (1,)
    assert client.peek("other").code == "ABSENT"
    client.close()
    assert client.begin("r").code == "SAME"
    client.close()


# Every kind of server


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_steps_run_on_a_real_server(real_server: RealServer, namespace: str, over: str) -> None:
    client = Client(real_server.url if over == "unix" else real_server.tcp_url, namespace)
    check(client)
    assert client.peek("r").run_id
    client.close()


def test_steps_run_on_the_fake_server(namespace: str) -> None:
    check(Client(f"fakeredis://{namespace}", namespace, durability="memory"))


def test_steps_run_on_an_embedded_server(tmp_path: Path, namespace: str) -> None:
    client = Client(f"embedded://{tmp_path / 'e'}", namespace)
    check(client)
    with EmbeddedServer(tmp_path / "e") as server:
        assert client.peek("r").code == "OK"
        path = server.socket_path
    assert path.exists(), "the client still holds the server"
    asyncio.run(client.close_in_loop())
    assert not path.exists()


def test_a_step_that_the_server_does_not_know_is_sent_with_its_source(
    valkey9: RealServer, namespace: str
) -> None:
    with RealServer(valkey9.binary) as server, server.client() as admin:
        client = Client(server.url, namespace)
        check(client)
        admin.script_flush()
        assert client.peek("r").code == "OK"
        client.close()


def test_steps_wait_for_the_replicas_that_are_promised(sentinel_group: SentinelGroup, namespace: str) -> None:
    check(Client(sentinel_group.url, namespace, replicas=1))
    client = Client(sentinel_group.url, namespace, replicas=2, timeout_s=1.5)
    with pytest.raises(DurabilityError, match=r"call 'c' of rollout r2.*replicas=2 was not confirmed"):
        client.begin("r2")
    assert client.peek("r2").code == "OK"
    client.close()


def test_after_a_failover_steps_go_to_the_new_primary(sentinel_group: SentinelGroup, namespace: str) -> None:
    client = Client(sentinel_group.url, namespace, timeout_s=2 * PATIENCE_S)
    assert client.begin("r").code == "OK"
    sentinel_group.kill_primary()
    try:
        assert client.begin("after").code == "OK"
    finally:
        sentinel_group.revive()
        client.close()


def test_each_step_goes_to_the_node_of_its_slot(cluster_group: ClusterGroup, namespace: str) -> None:
    client = Client(cluster_group.url, namespace)
    rollouts = [f"r{number}" for number in range(30)]
    for rollout in rollouts:
        assert client.begin(rollout).code == "OK"
    assert {client.peek(rollout).seq for rollout in rollouts} == {1}
    assert len({cluster_group.node_of(client.key(rollout)).port for rollout in rollouts}) == 3
    client.close()


def test_steps_follow_a_slot_that_moves(cluster_group: ClusterGroup, namespace: str) -> None:
    client = Client(cluster_group.url, namespace)
    client.begin("r")
    slot = cluster_group.slot_of(client.key("r"))
    source = cluster_group.node_of_slot(slot)
    target = next(node for node in cluster_group.primaries() if node is not source)
    announced: list[str] = []

    def announce() -> None:
        announced.append(client.begin("r", f"during{len(announced)}").code)

    cluster_group.migrate_slot(slot, target, between=announce)
    assert client.begin("r", "after").code == "OK"
    assert announced
    assert set(announced) == {"OK"}
    assert client.peek("r").seq == 2 + len(announced)
    client.close()


def test_steps_go_on_when_a_primary_of_the_cluster_dies(cluster_group: ClusterGroup, namespace: str) -> None:
    client = Client(cluster_group.url, namespace, timeout_s=2 * PATIENCE_S)
    client.begin("r")
    cluster_group.kill_primary(cluster_group.node_of(client.key("r")))
    try:
        assert client.begin("r", "after").code == "OK"
    finally:
        cluster_group.revive()
        client.close()


def test_steps_go_over_tls_and_an_unknown_authority_is_refused(
    redis7: RealServer, tmp_path: Path, namespace: str
) -> None:
    authority, key_and_chain = tmp_path / "authority.pem", tmp_path / "server.pem"
    issuer = trustme.CA()
    issuer.cert_pem.write_to_path(str(authority))
    issuer.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(key_and_chain))
    port, files = free_port(), str(key_and_chain)
    with RealServer(
        redis7.binary,
        tls_port=str(port),
        tls_cert_file=files,
        tls_key_file=files,
        tls_ca_cert_file=str(authority),
        tls_auth_clients="no",
    ):
        check(Client(f"rediss://localhost:{port}/0", namespace, tls={"ca_certs_path": str(authority)}))
        with pytest.raises(ConfigurationError, match="certificate that is not trusted"):
            Client(f"rediss://localhost:{port}/0", namespace).peek("r")


# Servers that refuse, or are not there


def test_a_server_that_cannot_keep_the_promise_is_refused(valkey9: RealServer, namespace: str) -> None:
    with RealServer(valkey9.binary, appendonly="no") as server:
        with pytest.raises(DurabilityError, match="set `appendonly yes`"):
            Client(server.url, namespace).peek("r")
        client = Client(server.url, namespace, durability="memory")
        assert client.peek("r").code == "ABSENT"
        client.close()


def test_a_refused_password_is_an_error_at_once(valkey9: RealServer, namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="refused the user or password"):
        Client(valkey9.tcp_url, namespace, username="nobody", password="wrong").peek("r")


def test_errors_say_which_rollout_and_leave_the_connection_as_it_was(
    valkey9: RealServer, namespace: str
) -> None:
    client = Client(valkey9.url, namespace)
    with valkey9.client() as admin:
        admin.set(client.key("r"), "x")
    client.peek("warm")
    before = connections_of(valkey9)
    with pytest.raises(CorruptRecordError, match=r"holds a value that is no hash.*rollout r\)"):
        client.peek("r")
    assert client.peek("warm").code == "ABSENT"
    assert connections_of(valkey9) == before
    client.close()


def test_a_server_that_is_away_is_an_error_at_the_deadline(namespace: str) -> None:
    client = Client(f"redis://127.0.0.1:{free_port()}/0", namespace, timeout_s=0.3)
    with pytest.raises(
        BackendUnavailableError, match=r"within 0\.3 s \(last: ConnectionError.*rollout r was not sent"
    ):
        client.peek("r")


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_nobody_who_knows_the_server_is_an_error_at_the_deadline(namespace: str, kind: str) -> None:
    url = f"redis+{kind}://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    client = Client(url + ("/service" if kind == "sentinel" else ""), namespace, timeout_s=0.3)
    with pytest.raises(BackendUnavailableError, match=r"within 0\.3 s \(last: ConnectionError"):
        client.peek("r")


def test_a_server_that_is_killed_and_comes_back_is_found_again(valkey9: RealServer, namespace: str) -> None:
    with RealServer(valkey9.binary) as server:
        client = Client(server.url, namespace)
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(client.begin, [f"r{number}" for number in range(THREADS)]))
        server.kill()
        restart = threading.Thread(target=server.start)
        restart.start()
        replies = [client.begin(f"r{number}").code for number in range(THREADS)]
        restart.join()
        client.close()
    assert set(replies) <= {"OK", "SAME"}


# Connections that hang


class DrippingProxy(Proxy):
    """Answers a byte at a time, and never to the end: every one of them comes within any time-out."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(1)
            writer.write(b"$9999\r\n")
            while not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0.01)
        finally:
            writer.transport.abort()


async def test_a_reply_that_comes_byte_by_byte_ends_at_the_deadline(
    valkey9: RealServer, namespace: str
) -> None:
    async with DrippingProxy(valkey9.socket_path) as proxy:
        client = Client(proxy.url, namespace, timeout_s=0.5)
        async with asyncio.timeout(PATIENCE_S / 2):
            with pytest.raises(BackendUnavailableError, match=r"within 0\.5 s \(last: TimeoutError"):
                await asyncio.to_thread(client.peek, "r")
        client.close()


async def test_a_connection_that_fell_silent_leaves_time_for_another(
    valkey9: RealServer, namespace: str
) -> None:
    async with StallingProxy(valkey9.socket_path) as proxy:
        client = Client(proxy.url, namespace, timeout_s=8)
        await asyncio.to_thread(client.begin, "r")
        proxy.stall()
        assert (await asyncio.to_thread(client.begin, "r")).code == "SAME"
        client.close()


def test_a_name_that_is_looked_up_for_ever_ends_at_the_deadline(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def hang(*_: Any) -> Any:
        release.wait()
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        with pytest.raises(BackendUnavailableError, match=r"within 0\.3 s"):
            Client("redis://somewhere/0", namespace, timeout_s=0.3).peek("r")
    finally:
        release.set()


def test_a_connection_that_comes_too_late_is_closed() -> None:
    release, undone = threading.Event(), threading.Event()

    def work() -> str:
        release.wait()
        return "late"

    with pytest.raises(redis_errors.TimeoutError):
        within(time.monotonic() + 0.05, work, undo=lambda result: undone.set() if result == "late" else None)
    release.set()
    assert undone.wait(PATIENCE_S)


# Threads


def test_many_threads_get_their_own_answers_and_few_connections_stay(
    valkey9: RealServer, namespace: str
) -> None:
    client = Client(valkey9.url, namespace)
    before = connections_of(valkey9)
    met = threading.Barrier(THREADS)

    def work(number: int) -> None:
        met.wait()
        for turn in range(50):
            rollout = f"{number}.{turn}"
            assert client.begin(rollout).incarnation == rollout.encode().hex().rjust(32, "0")
            assert client.peek(rollout).incarnation == rollout.encode().hex().rjust(32, "0")

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))
    # A server notices a closed connection when it comes to it.
    wait_until(
        lambda: connections_of(valkey9) <= before + client.settings.connections,
        "few are left",
        timeout_s=PATIENCE_S,
    )
    client.close()
    wait_until(lambda: connections_of(valkey9) == before, "none is left", timeout_s=PATIENCE_S)


def test_what_an_error_says_was_not_sent_is_not_sent_later(
    valkey9: RealServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(valkey9.url, namespace, connections=1)
    client.begin("warm")  # the server knows the script
    node = client._of_this_process().node_of(b"", 0.0)
    connecting, go_on = threading.Semaphore(0), threading.Semaphore(0)
    take = node._take

    def take_late() -> Any:
        connecting.release()
        assert go_on.acquire(timeout=PATIENCE_S)
        return take()

    def announce(rollout: str, timeout_s: float = PATIENCE_S) -> str:
        call = scripts.begin(client.key(rollout), "c", new_incarnation=new_name())
        deadline = time.monotonic() + timeout_s
        return client.run_joined([call], Subject(rollout, "c"), deadline=deadline)[0].code

    monkeypatch.setattr(node, "_take", take_late)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(announce, "first")
        assert connecting.acquire(timeout=PATIENCE_S)
        second = threads.submit(announce, "second")
        wait_until(lambda: len(node._turns._waiting) == 1, "the second waits", timeout_s=PATIENCE_S)
        late = threads.submit(announce, "late", 1.0)
        wait_until(lambda: len(node._turns._waiting) == 2, "both wait", timeout_s=PATIENCE_S)
        go_on.release()
        assert connecting.acquire(timeout=PATIENCE_S)  # the second, with the other in its company
        error = late.exception(PATIENCE_S)
        assert isinstance(error, BackendUnavailableError)
        go_on.release()
        assert [first.result(), second.result()] == ["OK", "OK"]
    monkeypatch.undo()
    assert str(error).endswith("was not sent, nothing changed")
    assert client.peek("late").code == "ABSENT"
    client.close()


def test_closing_while_threads_work_fails_none_of_them(valkey9: RealServer, namespace: str) -> None:
    client = Client(valkey9.url, namespace)
    before = connections_of(valkey9)
    done = threading.Event()

    def work(number: int) -> None:
        while not done.is_set():
            client.begin(f"r{number}")

    with ThreadPoolExecutor(THREADS) as threads:
        working = [threads.submit(work, number) for number in range(THREADS)]
        for _ in range(50):
            client.close()
        done.set()
        for each in working:
            each.result()
    client.close()
    wait_until(lambda: connections_of(valkey9) == before, "none is left", timeout_s=PATIENCE_S)


# Processes


def in_child(work: Callable[[], object]) -> int:
    """Do the work in a forked child, which ends with status 0 if it could; return its process id."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_parent_and_child_go_on_after_a_fork(valkey9: RealServer, namespace: str) -> None:
    client = Client(valkey9.url, namespace)

    def rounds(who: str) -> None:
        for turn in range(100):
            rollout = f"{who}.{turn}"
            assert client.begin(rollout).incarnation == rollout.encode().hex().rjust(32, "0")

    rounds("before")
    child = in_child(lambda: rounds("child"))
    rounds("parent")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rounds("after")
    assert client.peek("child.99").code == "OK"
    client.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_amid_other_threads_steps_leaves_no_lock_behind(valkey9: RealServer, namespace: str) -> None:
    client = Client(valkey9.url, namespace)
    done = threading.Event()

    def work(number: int) -> None:
        while not done.is_set():
            client.begin(f"r{number}")

    with ThreadPoolExecutor(THREADS) as threads:
        for number in range(THREADS):
            threads.submit(work, number)
        children = [in_child(lambda: client.begin("child")) for _ in range(10)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        done.set()
    client.close()
    assert set(statuses) == {0}
