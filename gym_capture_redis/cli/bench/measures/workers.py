"""Many worker processes on one server: all their puts in a second, against what bounds them."""

from __future__ import annotations

from statistics import median

from gym_capture_redis.cli.bench.context import Bench
from gym_capture_redis.cli.bench.goals import Figure
from gym_capture_redis.cli.bench.rounds import rotated
from gym_capture_redis.cli.bench.section import Grid, Section
from gym_capture_redis.cli.bench.server_benchmark import find_program, hset_rate
from gym_capture_redis.cli.bench.worker_crew import crew_of
from gym_capture_redis.cli.bench.worker_process import Assignment, Job

NAME = "workers"
REQUESTS, QUICK_REQUESTS = 10_000, 1_000
GOAL_WORKERS = 8

Rates = dict[Job, list[float]]


async def measure(bench: Bench) -> Section:
    """The rollouts of the workload, shared out to 1, 2, … processes; each job in every round."""
    sizes = await bench.stored_sizes()
    stored_bytes = round(sum(sizes.values()) / len(sizes))
    program, why_not = find_program(bench.servers.main)
    counts = sorted({min(count, len(bench.workload.rollouts)) for count in bench.options.workers})
    rounds = bench.options.rounds
    rates: dict[int, Rates] = {}
    c_client: list[float] = []
    with bench.progress(f"Worker processes ({', '.join(map(str, counts))})", rounds * len(counts)) as advance:
        for count in counts:
            async with crew_of(_shares(bench, count, stored_bytes)) as crew:
                rates[count] = {job: [] for job in Job}
                for number in range(rounds):
                    for job in rotated(list(Job), number):
                        rates[count][job].append(await crew.run(job))
                    if program and count == counts[-1]:
                        c_client.append(await _c_client_rate(bench, program, stored_bytes))
                    advance()
    section = Section(NAME, grids=[_grid(rates, c_client)])
    section.figures["workers"] = _figure(rates, c_client)
    section.data = {
        "puts_per_s": {
            str(count): {job.value: of_job for job, of_job in one.items()} for count, one in rates.items()
        },
        "server_benchmark_hset_per_s": c_client,
        "stored_bytes": stored_bytes,
    }
    if not program:
        section.notes.append(f"The bare limit is that of redis-py processes: {why_not}.")
    if (rollouts := len(bench.workload.rollouts)) < max(bench.options.workers):
        section.notes.append(f"No more workers than rollouts: {rollouts}.")
    return section


def _shares(bench: Bench, count: int, stored_bytes: int) -> list[Assignment]:
    numbers = range(len(bench.workload.rollouts))
    return [
        Assignment(
            bench.servers.main.url,
            bench.mark,
            bench.options.recipe,
            tuple(numbers[worker::count]),
            stored_bytes,
        )
        for worker in range(count)
    ]


async def _c_client_rate(bench: Bench, program: str, stored_bytes: int) -> float:
    requests = QUICK_REQUESTS if bench.options.quick else REQUESTS
    return await hset_rate(
        program, bench.servers.main, mark=bench.mark, nbytes=stored_bytes, requests=requests
    )


def _figure(rates: dict[int, Rates], c_client: list[float]) -> Figure:
    """Total puts/s, against the lower of what the bare server takes and what the processes can pack."""
    count = GOAL_WORKERS if GOAL_WORKERS in rates else max(rates)
    ours, packing = rates[count][Job.PUT], rates[count][Job.PACK]
    bare = c_client or rates[count][Job.BARE]
    rounds = tuple(put / min(pack, hset) for put, pack, hset in zip(ours, packing, bare, strict=True))
    bare_name = "a C client" if c_client else Job.BARE.value
    detail = (
        f"{count} processes: {median(ours):,.0f} puts/s against the lower of {median(packing):,.0f} "
        f"(packing) and {median(bare):,.0f} ({bare_name})"
    )
    return Figure(median(rounds), detail, rounds)


def _grid(rates: dict[int, Rates], c_client: list[float]) -> Grid:
    rows = [
        (
            str(count),
            *(f"{median(one[job]):,.0f}" for job in Job),
            f"{median(c_client):,.0f}" if c_client else "",
        )
        for count, one in rates.items()
    ]
    columns = ("processes", *(job.value for job in Job), "server's benchmark")
    return Grid("Calls per second of all worker processes together (medians)", columns, rows)
