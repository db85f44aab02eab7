"""``scripts/demo`` before it installs anything; that it installs is seen wherever it is run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo"


def run_with(python: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHON": python},
    )


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run_with("python-of-nowhere", tmp_path)

    assert done.returncode == 2
    assert done.stderr == (
        "scripts/demo: there is no python-of-nowhere; set PYTHON to a Python 3.11 or newer\n"
    )


def test_a_python_that_is_too_old_is_named_with_its_version(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\ncase $2 in *print*) echo 3.10 ;; *) exit 1 ;; esac\n")
    old.chmod(0o755)

    done = run_with(str(old), tmp_path)

    assert done.returncode == 2
    assert "is Python 3.10; 3.11 or newer is needed" in done.stderr
    assert done.stdout == ""
