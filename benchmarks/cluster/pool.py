"""One pool of all ranks against static replicas, measured on the emulated cluster.

    python -m benchmarks.cluster.pool [--replicas 8] [--ranks 8] [--context 32768] [--lengths wikipedia] [--batches 3]
        [--first 0] [--ways "in order" time pool] [--repeat 2] [--slowdown 2000] [--preset a2] [--wire-dim 2]
        [--lengths-folder DIR] [--json FILE]

Needs root and iproute2 (`python -m benchmarks.cluster --help`). Global batches, plans and ways are those of
`python -m benchmarks.balance --only pool` (benchmarks/pool.py), its first batches: one row of --context tokens for each
replica, a replica is a node. A step is one layer: attention forward, linear layers forward and backward, attention
backward. A rank is a process in a namespace of its own, forked from this one (`forked.py`), so that a machine of two
cores has 64 of them; the defaults take 17 minutes there.

in order   row i on replica i, over its own ranks; the step lasts as long as the slowest replica
time       documents assigned to replicas by modelled time; as above
pool       all documents over all ranks, by one plan

Real are processes, plans, engine, messages and their bytes, full NICs and links, waits: every rank hands over just the
bytes of its plan, or the program fails. Modelled: kernels and linear layers sleep for the time of the cost model.
Since all ranks' host work is done by the few cores of this machine, the time of the emulation is stretched (--slowdown)
until it is a small part: `host` is the CPU time of the rank that needed most of it in a step, over the step, `cores`
how many of this machine were busy, whoever kept them so.

"over perfect" is the time over that of perfect balance: all documents' attention in whole tiles and all linear layers,
forward and backward, by the cost model, spread evenly over all ranks; without launches, and nothing exposed. No way can
be faster. Beside it, and beside the ratio to the pool, is the event simulation of the same plans
(mindspeed_cp.simulate): messages share links fairly, as in benchmarks.balance, or first in, first out, as TCP has them
here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.balance import SETS, draw_set, global_batches
from benchmarks.cluster import show
from benchmarks.cluster.fabric import ENDING, ClusterError, cluster, leftovers, missing, terminated
from benchmarks.cluster.forked import fork_ranks
from benchmarks.cluster.pool_ranks import Step, make_step, model_of, run_rank
from benchmarks.cluster.scale import Scale
from benchmarks.cluster.variants import narrowed
from benchmarks.cluster.worker import Job
from benchmarks.pool import WAYS, PlannedBatch, PoolCase, plan_batch, simulated_step
from mindspeed_cp import Documents, build_plan
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import Plan

MEASURED_WAYS = WAYS[:3]
PATIENCE = 100  # seconds that rows may wait in a queue
TRIAL_TOKENS = 64  # of a rank in the step without a clock


@dataclass(frozen=True)
class Measured:
    """A way of computing one batch.

    Attributes:
        number, way: of the batch, and how it is computed.
        seconds: median of the repeats, of the emulation.
        spread: longest over shortest repeat.
        fair, fifo: simulated seconds by the two ways to share a link, of the emulation.
        perfect: seconds of perfect balance, of the emulation.
        busy: share of the time in which the mean rank computes.
        host: CPU time of the rank that needed most, over the time.
    """

    number: int
    way: str
    seconds: float
    spread: float
    fair: float
    fifo: float
    perfect: float
    busy: float
    host: float


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options, checked as far as they can be alone."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cluster.pool", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8, help="context-parallel ranks of a replica")
    parser.add_argument("--context", type=int, default=32768, help="most tokens of a row, and of a document")
    parser.add_argument("--lengths", default="wikipedia", choices=SETS)
    parser.add_argument("--lengths-folder", type=Path, help="of <set>.npz with real lengths; default: as of balance")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--ways", nargs="+", choices=MEASURED_WAYS, default=list(MEASURED_WAYS))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--slowdown", type=float, default=2000.0, help="seconds here for one of the real cluster")
    parser.add_argument("--preset", default="a2")
    parser.add_argument("--wire-dim", type=int, default=2, help="channels of a head that really travel")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args(argv)
    for name, least in (("replicas", 2), ("ranks", 1), ("context", 1), ("batches", 1), ("repeat", 1), ("first", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}; valid: {least} or more")
    return args


def plan_steps(args: argparse.Namespace, case: PoolCase, job: Job) -> tuple[list[PlannedBatch], list[Step]]:
    """Plan all batches in all ways."""
    lengths, _ = draw_set(args.lengths, args.lengths_folder)
    drawn = global_batches(lengths, args.context, args.replicas, args.first + args.batches)[args.first :]
    batches = [plan_batch(case, *batch) for batch in drawn]
    steps = []
    for number, batch in enumerate(batches, args.first):
        for way in args.ways:
            plans = [[narrowed(plan, job.scale) for plan in plans] for plans in groups_of(batch, way)]
            steps.append(make_step(args.lengths, number, way, plans, model_of(job)))
    return batches, steps


def groups_of(batch: PlannedBatch, way: str) -> Sequence[Sequence[Plan]]:
    """Return the plans of each group of ranks."""
    return [[batch.pool]] if way == "pool" else batch.replicas[way]


def trial_step(case: PoolCase, job: Job) -> Step:
    """Return a short step of the pool."""
    pool = case.model().pool
    plan = build_plan(Documents([TRIAL_TOKENS * pool.ranks]), pool, case.attention, "hierarchical")
    return make_step("trial", 0, "pool", [[narrowed(plan, job.scale)]], model_of(job))


def measure(job: Job, first: Step, steps: Sequence[Step], console: Console) -> list[show.Row]:
    """Return what the ranks measured."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-") as folder, cluster(job.shape) as names:
        results = Path(folder, "results.jsonl")
        results.touch()
        printed = 0

        def watch() -> None:
            nonlocal printed
            for row in written_rows(results)[printed:]:
                console.print(f"{row['batch']} {row['number']}, {row['variant']}: {row['seconds']:.2f} s")
                printed += 1

        job = dataclasses.replace(job, folder=folder)
        fork_ranks(names, job.shape, partial(run_rank, job, first, steps), Path(folder), watch)
        return written_rows(results)


def written_rows(results: Path) -> list[show.Row]:
    """Return the rows of a file that are written to their end; its last one may be half written while ranks run."""
    return [json.loads(line) for line in results.read_text().split("\n")[:-1]]


def measured(
    rows: Sequence[show.Row], number: int, way: str, simulated: tuple[float, float], perfect: float
) -> Measured:
    """Return the figures of one batch in one way.

    Args:
        rows: of all runs.
        number, way: of the batch, and how it is computed.
        simulated: seconds of the emulation with fair links, and first in, first out.
        perfect: seconds of the emulation.
    """
    rows = [row for row in rows if (row["number"], row["variant"]) == (number, way)]
    seconds = [row["seconds"] for row in rows]
    return Measured(
        number, way, statistics.median(seconds), max(seconds) / min(seconds), *simulated, perfect,
        statistics.median(statistics.mean(row["busy"]) / row["seconds"] for row in rows),
        statistics.median(max(rank["own"] for rank in row["ranks"]) for row in rows),
    )  # fmt: skip


def figures_of(
    args: argparse.Namespace, case: PoolCase, scale: Scale, batches: Sequence[PlannedBatch], rows: Sequence[show.Row]
) -> list[Measured]:
    """Return the figures of all batches in all ways."""
    figures = []
    for number, batch in enumerate(batches, args.first):
        for way in args.ways:
            groups = groups_of(batch, way)
            fair, fifo = (simulated_step(case, groups, sharing) * scale.seconds for sharing in ("fair", "fifo"))
            figures.append(measured(rows, number, way, (fair, fifo), batch.perfect * scale.seconds))
    return figures


def pool_table(title: str, figures: Sequence[Measured], factor: float) -> Table:
    """Return the table of all batches, and of their means.

    Args:
        title: what was measured.
        figures: batch by batch.
        factor: emulated seconds for a real one.
    """
    table = Table(title=title, title_justify="left", caption="* modelled", caption_justify="left")
    heads = (
        "batch", "", "s here", "longest/shortest", "ms at full speed", "over perfect", "fair*", "fifo*", "x pool",
        "fair*", "fifo*", "busy*", "host",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head in ("batch", "") else "right")
    ways = list(dict.fromkeys(figure.way for figure in figures))
    pools = {figure.number: figure for figure in figures if figure.way == "pool"}
    cells: dict[str, list[list[float]]] = {way: [] for way in ways}
    for figure in figures:
        pool = pools.get(figure.number)
        seconds = figure.seconds, figure.fair, figure.fifo
        over_pool = [float("nan")] * 3
        if pool is not None:
            over_pool = [x / y for x, y in zip(seconds, (pool.seconds, pool.fair, pool.fifo), strict=True)]
        cells[figure.way].append(
            [
                figure.seconds, figure.spread, figure.seconds / factor * 1e3, *(x / figure.perfect for x in seconds),
                *over_pool, figure.busy, figure.host,
            ]
        )  # fmt: skip
        table.add_row(str(figure.number), figure.way, *_formatted(cells[figure.way][-1]))
        if figure.way == ways[-1]:
            table.add_section()
    for way in ways:
        table.add_row("mean", way, *_formatted([statistics.mean(column) for column in zip(*cells[way], strict=True)]))
    return table


def _formatted(values: Sequence[float]) -> list[str]:
    formats = ("{:.2f}", "{:.3f}", "{:.2f}", *["{:.3f}"] * 6, "{:.1%}", "{:.2%}")
    return ["-" if value != value else text.format(value) for text, value in zip(formats, values, strict=True)]


def run(args: argparse.Namespace) -> None:
    """Plan, measure, print.

    Raises:
        ClusterError: the cluster cannot be made, a rank failed, or bytes are not those of the plan.
        ConfigError: of a setting.
    """
    console = show.console()
    lack = missing()
    if lack is not None:
        raise ClusterError(lack)
    if leftovers():
        console.print(f"left by runs that were killed, `benchmarks.cluster clean` removes it: {', '.join(leftovers())}")
    case = PoolCase(args.replicas, args.ranks, args.context, args.preset, None)
    scale = Scale(args.preset, args.ranks, case.attention, args.wire_dim, 1_000_000_000).with_seconds(args.slowdown)
    shape = dataclasses.replace(scale.shape(args.replicas, "preset"), patience=PATIENCE)
    job = Job(shape, scale, "", repeat=args.repeat, linear=True)
    batches, steps = plan_steps(args, case, job)
    console.print(f"{os.cpu_count()} cores", highlight=False)
    console.print(scale.told(args.replicas, "preset"), highlight=False)
    rows = measure(job, trial_step(case, job), steps, console)
    figures = figures_of(args, case, scale, batches, rows)
    documents = [len(batch.lengths) for batch in batches]
    title = (
        f"{args.replicas} replicas of {args.ranks} ranks of {scale.cluster.name}, one row of {args.context} tokens a "
        f"replica, {args.lengths} ({draw_set(args.lengths, args.lengths_folder)[1]}), {min(documents)} to "
        f"{max(documents)} documents; one layer; medians of {args.repeat}"
    )
    console.print(pool_table(title, figures, scale.seconds))
    busy = show.busy_machine(rows, os.cpu_count() or 1)
    cores = statistics.mean(row["ranks"][0]["cores"] for row in rows)
    own = statistics.mean(sum(rank["own"] for rank in row["ranks"]) for row in rows)
    console.print(f"cores: {own:.2f} busy for the ranks, {cores:.2f} in all", highlight=False)
    if busy is not None:
        console.print(busy, highlight=False)
    if args.json:
        out = {"figures": [dataclasses.asdict(figure) for figure in figures], "rows": rows, "factor": scale.seconds}
        args.json.write_text(json.dumps(out))
    wrong = show.wrong_bytes(rows)
    if wrong:
        raise ClusterError(f"bytes are not those of the plan: {'; '.join(wrong)}")
    console.print("Every rank handed over just the bytes that its plan says.")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    for number in ENDING:
        signal.signal(number, terminated)
    try:
        run(args)
    except (ClusterError, ConfigError) as error:
        sys.exit(f"benchmarks.cluster.pool: {error}")
    except KeyboardInterrupt:
        sys.exit("benchmarks.cluster.pool: stopped; everything it made is removed")


if __name__ == "__main__":
    main()
