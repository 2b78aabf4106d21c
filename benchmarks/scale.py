"""Planning at every scale: time, memory and quality of `algorithm: hierarchical`, beside the targets.

    python -m benchmarks.scale [--ranks 16 64 128 256 1024 4096 16384] [--simulated-up-to 1024] [--batches 6]
                               [--lengths wikipedia prolong] [--heads mha gqa8] [--tokens 4096] [--cluster a800]
                               [--json FILE]

One layer of 32 heads of 128 channels, forward and backward. Planning is measured, in CPU seconds of one process on this
machine: the search, the programs of all ranks and, up to --simulated-up-to ranks, the simulations that a plan without
options has. Every size has a process of its own. Memory is what its resident memory grows by at most while it plans, in
MB (Linux alone). The fraction of the bound (perfect balance, nothing exposed) is modelled.

There are --batches batches of each set of lengths and kind of heads, fewer on more than 128 ranks: one from 1,024 on.
Batch i of set s is drawn by default_rng([i, s, 0]), one that is planned without simulations by default_rng([i, s, 1]).
A line is printed for each size, and at last a line for each target that is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import Arguments, new_file, positive
from benchmarks.data import HEADS, SETS, place_of, real_lengths_folder
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.simulate.simulator import simulate_plan

#: All batches are taken on up to so many ranks; on k times as many a k-th of them.
ALL_BATCHES_UP_TO = 128

#: Targets by ranks: milliseconds with simulations and without, MB, and the mean fraction of the bound.
SIMULATED_MS = {16: 40.0, 64: 150.0, 128: 300.0, 1024: 3000.0}
UNSIMULATED_MS = {4096: 1000.0, 16384: 5000.0}
MEGABYTES = {4096: 200.0}
BOUND = {256: 0.88, 1024: 0.88}


@dataclass(frozen=True)
class Problem:
    """What is planned.

    Attributes:
        lengths: documents of each batch.
        attention: attention of a layer.
        topology: context-parallel ranks.
        simulated: with the simulations of a plan without options; otherwise by the planner's model alone.
    """

    lengths: tuple[np.ndarray, ...]
    attention: AttentionConfig
    topology: Topology
    simulated: bool


@dataclass(frozen=True)
class Planned:
    """Figures of one batch.

    Attributes:
        documents: number of documents.
        seconds: CPU seconds of planning.
        megabytes: growth of the resident memory at its peak; None if the system does not say.
        fraction: bound over the modelled time of the plan; None without simulations.
    """

    documents: int
    seconds: float
    megabytes: float | None
    fraction: float | None


@dataclass(frozen=True)
class SizeRow:
    """Figures of all batches of a number of ranks, with or without simulations.

    Attributes:
        ranks: number of ranks.
        simulated: as in :class:`Problem`.
        batches: figures of each batch.
    """

    ranks: int
    simulated: bool
    batches: tuple[Planned, ...]

    @property
    def milliseconds(self) -> float:
        """Median CPU milliseconds of planning."""
        return 1e3 * float(np.median([batch.seconds for batch in self.batches]))

    @property
    def megabytes(self) -> float | None:
        """Most growth of the memory."""
        known = [batch.megabytes for batch in self.batches if batch.megabytes is not None]
        return max(known, default=None)

    @property
    def fractions(self) -> list[float]:
        """Fractions of the bound; empty without simulations."""
        return [batch.fraction for batch in self.batches if batch.fraction is not None]

    def missed(self) -> list[str]:
        """Return a line for each target that the row misses."""
        scale, out = f"{self.ranks:,} ranks", []
        target = (SIMULATED_MS if self.simulated else UNSIMULATED_MS).get(self.ranks)
        if target is not None and self.milliseconds > target:
            part = self.milliseconds / target - 1
            out.append(f"{scale}: {self.milliseconds:,.1f} ms, target {target:,.0f} ms: missed by {part:.1%}")
        most, target = self.megabytes, None if self.simulated else MEGABYTES.get(self.ranks)
        if target is not None and most is not None and most > target:
            out.append(f"{scale}: {most:,.0f} MB, target {target:,.0f} MB: missed by {most / target - 1:.1%}")
        mean, target = np.mean(self.fractions) if self.fractions else np.inf, BOUND.get(self.ranks)
        if target is not None and mean < target:
            out.append(f"{scale}: {mean:.3f} of the bound, target {target}: missed by {target - mean:.3f}")
        return out


def plan_batches(problem: Problem) -> list[Planned]:
    """Plan all batches, one after the other, in this process."""
    build_plan(Documents([3000, 1000, 96]), Topology(1, 2, problem.topology.cluster), problem.attention, "hierarchical")
    return [_plan(Documents(lengths), problem) for lengths in problem.lengths]


def _plan(documents: Documents, problem: Problem) -> Planned:
    options: dict[str, Any] = {} if problem.simulated else {"simulated_placements": 1}
    before = _reset_peak()
    began = time.process_time()
    plan = build_plan(documents, problem.topology, problem.attention, "hierarchical", **options)
    seconds = time.process_time() - began
    peak = resident_megabytes("VmHWM")
    fraction = None
    if problem.simulated:
        bound = choose_placement(documents, documents, problem.topology, problem.attention).bound
        fraction = bound / simulate_plan(plan, cluster_of(problem.topology)).total
    return Planned(len(documents), seconds, None if before is None or peak is None else peak - before, fraction)


def _reset_peak() -> float | None:
    """Set the peak of the resident memory to what it is now, and return this in MB; None if the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return resident_megabytes("VmRSS")


def resident_megabytes(name: str) -> float | None:
    """Return a line of the process's status, "VmRSS" or "VmHWM", in MB; None where there is no such file."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return next(int(line.split()[1]) * 1024 / 1e6 for line in status.read_text().splitlines() if line.startswith(name))


def in_new_process(problem: Problem) -> list[Planned]:
    """Do as `plan_batches` in a new process, which has planned nothing before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(plan_batches, problem).result()


def draw_batches(options: argparse.Namespace, ranks: int, simulated: bool) -> tuple[np.ndarray, ...]:
    """Draw the batches of a number of ranks, batch by batch, every set of each."""
    count = max(1, min(options.batches, options.batches * ALL_BATCHES_UP_TO // ranks))
    return tuple(
        SETS[name](
            ranks * options.tokens, ranks, np.random.default_rng([i, list(SETS).index(name), int(not simulated)])
        )
        for i in range(count)
        for name in options.lengths
    )


def measure(options: argparse.Namespace, run: Callable[[Problem], list[Planned]] = in_new_process) -> list[SizeRow]:
    """Measure and print all sizes."""
    topologies = {ranks: place_of(options.cluster, ranks) for ranks in options.ranks}
    for name in options.lengths:
        if name in ("wikipedia", "prolong"):
            print(f"{name}: {'real lengths' if real_lengths_folder(name) else 'bins of configs/lengths'}")
    print(
        f"{options.cluster}, {options.tokens} tokens a rank; planning is measured, fractions of the bound are modelled"
    )
    print(f"{'ranks':>7}{'documents':>11}  {'with':11}{'batches':>8}{'median ms':>11}{'most':>10}{'target':>8}", end="")
    print(f"{'MB':>7}{'target':>8}  of the bound: mean, least, target")
    rows = []
    for ranks, topology in topologies.items():
        for simulated in (True, False):
            if simulated and ranks > options.simulated_up_to:
                continue
            lengths = draw_batches(options, ranks, simulated)
            problems = [Problem(lengths, HEADS[heads], topology, simulated) for heads in options.heads]
            batches = [batch for problem in problems for batch in run(problem)]
            rows.append(SizeRow(ranks, simulated, tuple(batches)))
            show(rows[-1])
    for line in (line for row in rows for line in row.missed()):
        print(line)
    return rows


def show(row: SizeRow) -> None:
    """Print the line of a size."""

    def cell(value: float | None, width: int, digits: int = 0) -> str:
        return f"{'-' if value is None else format(value, f',.{digits}f'):>{width}}"

    most = 1e3 * max(batch.seconds for batch in row.batches)
    documents = round(np.mean([batch.documents for batch in row.batches]))
    line = (
        f"{row.ranks:>7,}{documents:>11,}  {'simulations' if row.simulated else 'model alone':11}{len(row.batches):>8}"
    )
    line += cell(row.milliseconds, 11, 1) + cell(most, 10, 1)
    line += cell((SIMULATED_MS if row.simulated else UNSIMULATED_MS).get(row.ranks), 8)
    line += cell(row.megabytes, 7) + cell(None if row.simulated else MEGABYTES.get(row.ranks), 8)
    if row.fractions:
        line += f"  {np.mean(row.fractions):.3f}, {min(row.fractions):.3f}, {BOUND.get(row.ranks, '-')}"
    print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[16, 64, 128, 256, 1024, 4096, 16384])
    parser.add_argument("--simulated-up-to", type=int, default=1024, help="most ranks of plans with simulations")
    parser.add_argument("--batches", type=positive, default=6, help="of each set and kind of heads, on up to 128 ranks")
    parser.add_argument("--lengths", nargs="+", default=["wikipedia", "prolong"], choices=list(SETS))
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--tokens", type=positive, default=4096, help="of each rank")
    parser.add_argument("--cluster", default="a800")
    parser.add_argument("--json", type=new_file, help="write every figure there")
    options = parser.parse_args(argv)
    try:
        rows = measure(options)
    except ConfigError as error:
        parser.error(str(error))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
