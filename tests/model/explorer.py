"""Every history within the bounds of a scenario, the shortest first: a fault has its shortest trace."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field

from model.actors import Broken, Scenario, World, moves


@dataclass
class Explored:
    """What a scenario led to."""

    worlds: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    """What happened, and how often."""
    broken: str = ""
    """The first promise that was broken."""
    trace: tuple[str, ...] = ()
    """What led to it."""


def explore(scenario: Scenario) -> Explored:
    """Visit every world that can be reached, until a promise is broken."""
    gc.disable()  # worlds have no cycles, and there are very many: looking for some takes most of the time
    try:
        return _explore(scenario)
    finally:
        gc.enable()


def _explore(scenario: Scenario) -> Explored:
    explored = Explored()
    first = _canonical(scenario.first())
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    layer = [first]
    while layer:
        following = []
        for world in layer:
            steps = moves(world, scenario)
            while True:
                try:
                    label, after = next(steps)
                except StopIteration:
                    break
                except Broken as broken:
                    explored.broken = str(broken)
                    explored.trace = _trace(came_from, world)
                    return explored
                explored.labels[label] += 1
                after = _canonical(after)
                if after not in came_from:
                    came_from[after] = (world, label)
                    following.append(after)
        layer = following
        explored.worlds = len(came_from)
    return explored


def _canonical(world: World) -> World:
    """The same world with its readers in a fixed order: nothing tells them apart."""
    if len(world.readers) == 2 and hash(world.readers[0]) > hash(world.readers[1]):
        return world._replace(readers=world.readers[::-1])
    return world


def _trace(came_from: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    labels = []
    step = came_from[world]
    while step:
        world, label = step
        labels.append(label)
        step = came_from[world]
    return tuple(reversed(labels))
