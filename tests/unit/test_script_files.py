"""Each script carries the shared functions that it needs, and no others."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gym_capture_redis.script_files import read
from gym_capture_redis.scripts import CAN_BE_LOST, Dialect, Step

SCRIPTS = [(step, False) for step in Step if step.is_script] + [(step, True) for step in CAN_BE_LOST]
DEFINED = re.compile(r"^local function (\w+)\(", re.MULTILINE)
SHARED = DEFINED.findall(read("_rollout"))


def code(script: bytes) -> str:
    return re.sub(r"--[^\n]*", "", script.decode())


@pytest.mark.parametrize(("step", "healing"), SCRIPTS, ids=lambda value: getattr(value, "name", value))
def test_a_script_defines_what_it_calls_before_it_does_and_nothing_else(step: Step, healing: bool) -> None:
    script = code(step.source(Dialect(), healing=healing))
    defined = DEFINED.findall(script)
    for name in SHARED:
        places = [match.start() for match in re.finditer(rf"(?<![.\w]){name}\b", script)]
        assert (name in defined) == bool(places), name
        if places:
            assert script.startswith(f"function {name}(", places[0] - len("function ")), name
            assert len(places) > 1, f"{name} is defined and never called"
    assert len(defined) == len(set(defined))


def test_the_functions_stay_in_the_order_in_which_they_build_on_each_other() -> None:
    script: Any = code(Step.FREEZE.source(Dialect()))
    shared = [name for name in DEFINED.findall(script) if name in SHARED]
    assert shared == [name for name in SHARED if name in shared]
    assert "collect_rows" in shared
    assert "mark_failure" not in shared
