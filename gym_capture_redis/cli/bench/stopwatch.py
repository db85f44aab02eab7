"""Where the processor time of this process goes, while it does its ordinary work.

Functions are replaced by ones that note when they begin and end, and so is nothing else: a profiler would
make small functions look expensive. What the noting itself takes is measured too, and taken off.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

NANOSECONDS = 1e9
_CALIBRATING_LAPS = 5_000

_clock = time.thread_time_ns
"""Of the running thread alone: another one that takes the processor or the interpreter costs nothing."""


@dataclass(frozen=True)
class Watched:
    """A function, by the module or class that has it, and the part that its time belongs to."""

    owner: Any
    name: str
    part: str


@dataclass
class Spent:
    """Time of one part without what it called of other parts; how often it, and they, were entered."""

    ns: int = 0
    laps: int = 0
    inner_laps: int = 0


class _Thread(threading.local):
    """What one thread is in the middle of; ``all_spent`` has the sums of every thread."""

    def __init__(self, all_spent: list[dict[str, Spent]]) -> None:
        self.stack: list[Spent] = []
        self.since = 0
        self.spent: dict[str, Spent] = defaultdict(Spent)
        all_spent.append(self.spent)


class Stopwatch:
    """Gives the time of each thread to the part that it entered last."""

    def __init__(self) -> None:
        self._all_spent: list[dict[str, Spent]] = []
        self._thread = _Thread(self._all_spent)

    def begin(self, part: str) -> None:
        """Enter a part; the one that is entered already stands still meanwhile."""
        thread, now = self._thread, _clock()
        if thread.stack:
            outer = thread.stack[-1]
            outer.ns += now - thread.since
            outer.inner_laps += 1
        thread.stack.append(thread.spent[part])
        thread.since = now

    def end(self) -> None:
        """Leave the part that was entered last."""
        thread, now = self._thread, _clock()
        spent = thread.stack.pop()
        spent.ns += now - thread.since
        spent.laps += 1
        thread.since = now

    def spent(self) -> dict[str, Spent]:
        """The sums of all threads."""
        sums: dict[str, Spent] = defaultdict(Spent)
        for of_thread in self._all_spent:
            for part, spent in of_thread.items():
                total = sums[part]
                total.ns += spent.ns
                total.laps += spent.laps
                total.inner_laps += spent.inner_laps
        return dict(sums)

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same function, with its time given to ``part``; of a coroutine, only while it runs."""

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.begin(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        @functools.wraps(function)
        async def watched_steps(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(function(*args, **kwargs), self, part)

        return watched_steps if inspect.iscoroutinefunction(function) else watched

    @contextlib.contextmanager
    def watching(self, functions: Sequence[Watched], collector: str) -> Iterator[None]:
        """Watch the functions, and the garbage collector as the part of this name, while it lasts."""

        def on_collection(phase: str, _: dict[str, int]) -> None:
            self.begin(collector) if phase == "start" else self.end()

        originals = [(one, vars(one.owner)[one.name]) for one in functions]
        try:
            for one, original in originals:
                if isinstance(original, classmethod):
                    replaced: Any = classmethod(self.around(original.__func__, one.part))
                else:
                    replaced = self.around(original, one.part)
                setattr(one.owner, one.name, replaced)
            gc.callbacks.append(on_collection)
            yield
        finally:
            with contextlib.suppress(ValueError):  # where not even that was reached
                gc.callbacks.remove(on_collection)
            for one, original in originals:
                setattr(one.owner, one.name, original)


class _Steps:
    """Awaits a coroutine; the clock runs in each of its steps, and not while it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], stopwatch: Stopwatch, part: str) -> None:
        self._coroutine = coroutine
        self._stopwatch = stopwatch
        self._part = part

    def __await__(self) -> Generator[Any, Any, Any]:
        step = functools.partial(self._coroutine.send, None)
        while True:
            self._stopwatch.begin(self._part)
            try:
                waiting_for = step()
            except StopIteration as end:
                return end.value
            finally:
                self._stopwatch.end()
            try:
                step = functools.partial(self._coroutine.send, (yield waiting_for))
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's to handle
                step = functools.partial(self._coroutine.throw, error)


@dataclass(frozen=True)
class LapCost:
    """What one lap of a stopwatch adds: to the part that is entered, and to whatever called it."""

    inside_ns: float
    outside_ns: float

    @classmethod
    def measured(cls) -> LapCost:
        """Watch a function that does nothing."""

        def nothing() -> None:
            pass

        stopwatch = Stopwatch()
        watched = stopwatch.around(nothing, "inner")
        stopwatch.begin("bare")
        for _ in range(_CALIBRATING_LAPS):
            nothing()
        stopwatch.end()
        stopwatch.begin("outer")
        for _ in range(_CALIBRATING_LAPS):
            watched()
        stopwatch.end()
        spent = stopwatch.spent()
        outside_ns = max(0, spent["outer"].ns - spent["bare"].ns)
        return cls(spent["inner"].ns / _CALIBRATING_LAPS, outside_ns / _CALIBRATING_LAPS)


@dataclass
class Split:
    """Wall time and processor time of this process over a stretch of work, in seconds, by parts."""

    wall_s: float
    cpu_s: float
    parts_s: dict[str, float]
    rest_s: float
    """Processor time of no part."""
    noting_s: float
    """What the noting took. It is in wall and processor time, and in no part and not in the rest."""

    @property
    def waiting_s(self) -> float:
        """How long this process did nothing; none where several threads made up for it."""
        return max(0.0, self.wall_s - self.cpu_s)


class Splitting:
    """A context that splits the work done in it; afterwards there is a ``split``."""

    split: Split

    def __init__(self, functions: Sequence[Watched], collector: str, cost: LapCost) -> None:
        self._cost = cost
        self._stopwatch = Stopwatch()
        self._watching = self._stopwatch.watching(functions, collector)
        self._wall_s = self._cpu_s = 0.0

    def __enter__(self) -> None:
        """Begin."""
        self._watching.__enter__()
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        """End, and add up."""
        wall_s, cpu_s = time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s
        self._watching.__exit__(*error)  # type: ignore[arg-type]
        self.split = split_up(wall_s, cpu_s, self._stopwatch.spent(), self._cost)


def split_up(wall_s: float, cpu_s: float, spent: dict[str, Spent], cost: LapCost) -> Split:
    """Take the noting off each part, and find what is left for the rest."""
    parts_s = {
        part: max(0.0, one.ns - one.laps * cost.inside_ns - one.inner_laps * cost.outside_ns) / NANOSECONDS
        for part, one in spent.items()
    }
    laps = sum(one.laps for one in spent.values())
    outermost_laps = laps - sum(one.inner_laps for one in spent.values())
    watched_s = sum(one.ns for one in spent.values()) / NANOSECONDS
    rest_s = cpu_s - watched_s - outermost_laps * cost.outside_ns / NANOSECONDS
    noting_s = laps * (cost.inside_ns + cost.outside_ns) / NANOSECONDS
    return Split(wall_s, cpu_s, parts_s, max(0.0, rest_s), noting_s)
