"""Pictures: throughput against workers, latencies, bytes against turns, where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gym_capture_redis.cli.bench.measures import growth, latency, time_spent, workers
from gym_capture_redis.cli.bench.section import Section
from gym_capture_redis.errors import ConfigurationError

INSTALL_HINT = "pip install 'gym-capture-redis[plot]'"
SIZE_INCHES = (7.5, 4.5)
KIB = 1024
BAR, NARROW_BAR = 0.6, 0.12
PART_COLORS = {time_spent.COLLECTOR: "black", time_spent.REST: "tan", time_spent.WAITING: "whitesmoke"}
"""The others take matplotlib's colors in turn."""
TICKS_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


def load_matplotlib() -> Any:
    """Matplotlib's figure class; it needs no display.

    Raises:
        ConfigurationError: it is not installed.

    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigurationError(f"--plot needs matplotlib: {INSTALL_HINT}") from None
    return Figure


def draw(sections: Sequence[Section], directory: Path) -> list[Path]:
    """Draw what can be drawn of these sections, as SVG; the files that were written."""
    make_figure = load_matplotlib()
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for section in sections:
        if section.name not in _PICTURES:
            continue
        file_name, picture = _PICTURES[section.name]
        figure = make_figure(figsize=SIZE_INCHES, layout="constrained")
        picture(figure.add_subplot(), section.data)
        drawn.append(directory / file_name)
        figure.savefig(drawn[-1])
    return drawn


def _throughput(axes: Any, data: dict[str, Any]) -> None:
    counts = [int(count) for count in data["puts_per_s"]]
    for job in next(iter(data["puts_per_s"].values())):
        rates = [median(data["puts_per_s"][str(count)][job]) for count in counts]
        axes.plot(counts, rates, marker="o", label=job)
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    title = "Calls put by all worker processes"
    if c_client := data["server_benchmark_hset_per_s"]:
        title += f"\nthe server's own benchmark: {median(c_client):,.0f} HSET/s"
    _label(axes, title, "worker processes", "calls/s")


def _latencies(axes: Any, data: dict[str, Any]) -> None:
    for name, rounds in data["put_us"].items():
        values = sorted(value / 1000 for one in rounds for value in one)
        shares = [(rank + 1) / len(values) for rank in range(len(values))]
        axes.plot(values, shares, label=name)
    axes.set_xscale("log")
    axes.set_xticks(TICKS_MS, [f"{tick:g}" for tick in TICKS_MS])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1)
    _label(axes, "Latency of a put, one call at a time", "milliseconds", "share of puts that took no longer")


def _bytes(axes: Any, data: dict[str, Any]) -> None:
    for name, sizes in data["bytes_after_turn"].items():
        axes.plot(range(1, len(sizes) + 1), [size / KIB for size in sizes], label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _label(axes, f"Bytes kept for one rollout\n{data['shape']}", "turns", "KiB")


def _time_spent(axes: Any, data: dict[str, Any]) -> None:
    """Draw a bar of parts for each way, and a narrow one of the server below it."""
    names = list(data)
    places = range(len(names))
    ends = [0.0] * len(names)
    parts = dict.fromkeys((*time_spent.PARTS_OF_PUT, *time_spent.PARTS_OF_FREEZE))
    for part in sorted(parts, key=PART_COLORS.__contains__):  # those of both at the end
        widths = [data[name]["parts_us"].get(part, 0.0) for name in names]
        axes.barh(places, widths, BAR, left=ends, label=part, color=PART_COLORS.get(part))
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    below = [place + (BAR + NARROW_BAR) / 2 for place in places]
    server = [data[name]["server_us"] for name in names]
    axes.barh(
        below, server, NARROW_BAR, label=time_spent.SERVER, color="white", edgecolor="black", hatch="////"
    )
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    _label(axes, "Where the time of a call goes", "microseconds", "")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def _label(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


_PICTURES: dict[str, tuple[str, Callable[[Any, dict[str, Any]], None]]] = {
    workers.NAME: ("throughput-against-workers.svg", _throughput),
    latency.NAME: ("latency-of-a-put.svg", _latencies),
    growth.NAME: ("bytes-against-turns.svg", _bytes),
    time_spent.NAME: ("where-the-time-goes.svg", _time_spent),
}
