"""python -m benchmarks.cluster: see the package's description."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmarks.cluster
from benchmarks.cluster import validate
from benchmarks.cluster.fabric import ENDING, ClusterError, clean, cluster, leftovers, missing, run_ranks, terminated
from benchmarks.cluster.scale import BASE, VARIANTS, Scale, batches_of
from benchmarks.cluster.worker import Job
from benchmarks.data import REAL_LENGTHS
from mindspeed_cp import AttentionConfig
from mindspeed_cp.errors import ConfigError


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options, checked as far as they can be alone."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cluster", description=benchmarks.cluster.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("what", nargs="?", choices=["clean"], help="remove what killed runs left, and nothing else")
    parser.add_argument("--preset", default="a800", help="a cluster of configs/clusters, or a file")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument(
        "--sets", nargs="+", default=["wikipedia", "prolong", "one"], help="of lengths; one: one document"
    )
    parser.add_argument("--batches", type=int, default=5, help="of each set")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument(
        "--lengths-folder", type=Path, default=REAL_LENGTHS if REAL_LENGTHS.is_dir() else None,
        help="of <set>.npz with real lengths; default: ../shared/data/lengths, if there; else the project's own bins",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--wire-dim", type=int, default=2, help="channels of a head that really travel")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--rates", type=float, nargs="+", default=[25.0, 12.5], help="of an emulated NIC, Mbit/s")
    args = parser.parse_args(argv)
    for name in ("nodes", "ranks_per_node", "batches", "tokens", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; valid: 1 or more")
    return args


def measure(job: Job, console: Any) -> list[validate.Row]:
    """Return what the ranks of a cluster measured."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-") as folder:
        job = dataclasses.replace(job, folder=folder)
        path = Path(folder, "job")
        path.write_bytes(pickle.dumps(job))
        results = Path(folder, "results.jsonl")
        results.touch()
        with cluster(job.shape) as names, console.status("starting ranks") as status:
            total = len(job.batches) * len(job.variants) * job.repeat

            def watch() -> None:
                done = results.read_text().count("\n")
                if done:
                    status.update(f"{done} of {total or '?'} runs")

            command = [sys.executable, "-m", "benchmarks.cluster.worker", str(path)]
            run_ranks(names, job.shape, lambda rank: [*command, str(rank)], Path(folder), watch)
        return [json.loads(line) for line in results.read_text().splitlines()]


def validation(args: argparse.Namespace, console: Any) -> dict[str, Any]:
    """Compare the simulator with the emulated cluster."""
    cases: list[validate.Case] = []
    for rate in args.rates:
        attention = AttentionConfig(args.heads, args.kv_heads, args.head_dim)
        scale = Scale(args.preset, args.ranks_per_node, attention, args.wire_dim, round(rate * 1e6))
        shape = scale.shape(args.nodes, "preset")
        tokens = shape.ranks * args.tokens
        sets = [batches_of(name, args.batches, tokens, args.lengths_folder, args.seed) for name in args.sets]
        batches = [batch for batches_of_set in sets for batch in batches_of_set]
        console.print(scale.told(args.nodes, "preset"), highlight=False)
        empty = Job(shape, scale, "", (validate.empty_batch(shape.ranks),), (BASE,), 5 * args.repeat)
        rows = measure(empty, console)
        turn = validate.turn_seconds(rows, shape.ranks)
        console.print(f"a turn with almost no bytes takes {1e3 * turn:.2f} ms", highlight=False)
        rows += measure(Job(shape, scale, "", tuple(batches), tuple(VARIANTS), args.repeat), console)
        cases += validate.cases_of(rows, batches, scale, args.nodes)
        wrong = validate.wrong_bytes(rows)
        if wrong:
            raise ClusterError(f"bytes are not those of the plan: {'; '.join(wrong)}")
        busy = validate.busy_machine(rows, os.cpu_count() or 1)
        if busy is not None:
            console.print(busy, highlight=False)
    console.print(validate.error_table(cases))
    console.print(validate.verdict(cases), highlight=False)
    return {"cases": [dataclasses.asdict(case) for case in cases]}


def run(args: argparse.Namespace) -> None:
    """Compare, or clean."""
    console = validate.console()
    lack = missing()
    if lack is not None:
        raise ClusterError(lack)
    if args.what == "clean":
        console.print(f"removed: {', '.join(clean()) or 'nothing'}")
        return
    if leftovers():
        console.print(f"left by runs that were killed, `clean` removes it: {', '.join(leftovers())}")
    console.print(f"{os.cpu_count()} cores")
    report = validation(args, console)
    if args.json:
        args.json.write_text(json.dumps(report))


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    for number in ENDING:
        signal.signal(number, terminated)
    try:
        run(args)
    except (ClusterError, ConfigError) as error:
        sys.exit(f"benchmarks.cluster: {error}")
    except KeyboardInterrupt:
        sys.exit("benchmarks.cluster: stopped; everything it made is removed")


if __name__ == "__main__":
    main()
