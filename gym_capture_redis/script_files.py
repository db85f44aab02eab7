"""Puts a script together from the files in ``lua/``, with those of the shared functions that it needs.

A script makes its functions anew whenever it runs, so that each one it does not need would cost every call.
No I/O but reading the package's own files.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end\n", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"(?<![.\w])\w+")
"""Not after a dot: ``table.remove`` is none of ours."""


def script(first_lines: list[str], step: str, last_lines: list[str], *, runner: str) -> bytes:
    """The source of a script: what all share (``_rollout.lua``), the step as a function, and its runner.

    ``first_lines`` and ``last_lines`` (before the runner) define what the others use.
    """
    own = [f"local function step()\n{read(step)}end", *last_lines, read(runner)]
    constants, functions = _shared()
    return "\n".join([*first_lines, constants, *_needed(functions, "\n".join(own)), *own]).encode()


@cache
def read(name: str) -> str:
    """The text of a file, given without its ending."""
    return (resources.files("gym_capture_redis") / "lua" / f"{name}.lua").read_text("utf-8")


@cache
def _shared() -> tuple[str, dict[str, str]]:
    """What stands before the shared functions, and each of these by name, in order."""
    text = read("_rollout")
    functions = {match[1]: match[0] for match in _FUNCTION.finditer(text)}
    return text[: text.index("local function")], functions


def _needed(functions: dict[str, str], using: str) -> list[str]:
    """The functions that a text names, and those that they name, in their order."""
    names: set[str] = set()
    waiting = [using]
    while waiting:
        named = functions.keys() & set(_NAME.findall(waiting.pop())) - names
        names |= named
        waiting += [functions[name] for name in named]
    return [text for name, text in functions.items() if name in names]
