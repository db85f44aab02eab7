"""A soak runs, counts, and ends with 1 where a law was broken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from soak import __main__ as command
from support.ledger import Kind
from typer.testing import CliRunner

APP = typer.Typer()
APP.command()(command.soak)


def run(*options: str) -> Any:
    return CliRunner().invoke(APP, ["--seed", "7", *options])


def row(output: str, what: str) -> int:
    (line,) = [line for line in output.splitlines() if f" {what} " in line]
    return int(line.split()[-2].replace(",", ""))


def test_a_short_soak_breaks_no_law_and_counts_what_it_did() -> None:
    done = run("--minutes", "0.1")
    assert done.exit_code == 0, done.output
    assert "--seed 7" in done.output
    assert row(done.output, "violations") == 0
    assert row(done.output, "acknowledged puts") > 0
    assert row(done.output, "rollouts complete") > 0


def test_a_broken_law_is_shown_with_what_is_needed_to_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: Path, directory: Path, *__: object) -> tuple[Any, list[str]]:
        nothing: dict[Any, int] = dict.fromkeys(Kind, 0)
        return SimpleNamespace(counts={}, acknowledged=nothing), [
            f"rollout r: is not whole ({directory.name})"
        ]

    monkeypatch.setattr(command, "_play", broken)
    done = run()
    assert done.exit_code == 1
    assert row(done.output, "violations") == 1
    assert "VIOLATION rollout r: is not whole" in done.output
    assert "scripts/soak --minutes 5 --seed 7 --url-kind standalone" in done.output
