"""The help of ``scripts/test``, which comes before it makes anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_shown_and_nothing_is_made(option: str) -> None:
    done = subprocess.run(
        [SCRIPT, option],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHON": "python-of-nowhere"},  # which would be refused
    )

    assert (done.returncode, done.stderr) == (0, "")
    for said in ("20 minutes on 2 cores", "several hundred MB", "all go to pytest", ".venv-test"):
        assert said in done.stdout
