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
from benchmarks.cluster import show, validate
from benchmarks.cluster.fabric import ENDING, ClusterError, clean, cluster, leftovers, missing, run_ranks, terminated
from benchmarks.cluster.scale import BASE, IN_NODE, USUAL, VARIANTS, Batch, Scale, batches_of, plan_for
from benchmarks.cluster.worker import Job
from benchmarks.data import REAL_LENGTHS
from mindspeed_cp import AttentionConfig
from mindspeed_cp.errors import ConfigError

MEASUREMENTS = ("mesh", "layer")
MESH = (BASE, "direct, even split, all at once", "all_gather", "hierarchical + routing")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options, checked as far as they can be alone."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cluster", description=benchmarks.cluster.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("what", nargs="*", metavar="mesh|layer|clean", help="default: mesh layer")
    parser.add_argument("--preset", help="a cluster of configs/clusters, or a file; default: a800, for mesh a2")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of an emulated NIC")
    parser.add_argument("--in-node", choices=IN_NODE, help="limits of links in a node; default: preset")
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
    parser.add_argument("--linear", action="store_true", help="the layer's linear part takes its modelled time too")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", help=f"of: {'; '.join(VARIANTS)}")
    parser.add_argument("--kernels", choices=("modelled", "run"), default="modelled")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument(
        "--validate", action="store_true", help="only: the simulator's layer times beside measured ones"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[25.0, 12.5], help="of --validate, Mbit/s")
    args = parser.parse_args(argv)
    for what in args.what:
        if what not in (*MEASUREMENTS, "clean"):
            parser.error(f"{what!r} is no measurement; valid: {', '.join(MEASUREMENTS)}, clean")
    for name in ("nodes", "ranks_per_node", "batches", "tokens", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; valid: 1 or more")
    args.what = args.what or list(MEASUREMENTS)
    return args


def scale_of(args: argparse.Namespace, preset: str) -> Scale:
    """Return the cluster and its time."""
    attention = AttentionConfig(args.heads, args.kv_heads, args.head_dim)
    rate = round(args.rate * 1e6)
    return Scale(args.preset or preset, args.ranks_per_node, attention, args.wire_dim, rate)


def measure(job: Job, console: Any) -> list[show.Row]:
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
        scale = scale_of(argparse.Namespace(**{**vars(args), "rate": rate}), "a800")
        shape = scale.shape(args.nodes, "preset")
        tokens = shape.ranks * args.tokens
        sets = [batches_of(name, args.batches, tokens, args.lengths_folder, args.seed) for name in args.sets]
        batches = [batch for batches_of_set in sets for batch in batches_of_set]
        console.print(scale.told(args.nodes, "preset"), highlight=False)
        empty = Job(shape, scale, "", (validate.empty_batch(shape.ranks),), (BASE,), 5 * args.repeat)
        rows = measure(empty, console)
        turn = validate.turn_seconds(rows, shape.ranks)
        console.print(f"a turn with almost no bytes takes {1e3 * turn:.2f} ms", highlight=False)
        rows += measure(Job(shape, scale, "", tuple(batches), validate.COMPARED, args.repeat), console)
        cases += validate.cases_of(rows, batches, scale, args.nodes)
        busy = show.busy_machine(rows, os.cpu_count() or 1)
        if busy is not None:
            console.print(busy, highlight=False)
    console.print(validate.error_table(cases))
    console.print(validate.verdict(cases), highlight=False)
    return {"what": "validate", "cases": [dataclasses.asdict(case) for case in cases]}


def known(names: list[str], batch: Batch, scale: Scale, nodes: int, console: Any) -> list[str]:
    """Return the variants that this version can plan; print a line for each of the others."""
    out = []
    for name in names:
        try:
            plan_for(name, batch, scale, nodes)
        except ConfigError as error:
            console.print(f"{name}: left out: {error}", highlight=False)
        else:
            out.append(name)
    return out


def layers(
    args: argparse.Namespace, console: Any, what: str, preset: str, nodes: int, in_node: str, variants: list[str]
) -> list[dict[str, Any]]:
    """Measure one layer by several plans, on every set."""
    scale = scale_of(args, preset)
    shape = scale.shape(nodes, in_node)
    tokens, folder = shape.ranks * args.tokens, args.lengths_folder
    sets = {name: batches_of(name, args.batches, tokens, folder, args.seed) for name in args.sets}
    first = next(iter(sets.values()))[0]
    console.print(scale.told(nodes, in_node), highlight=False)
    timed = "take their modelled time" if args.kernels == "modelled" else "run on this machine's cores"
    origin = f"from {folder}" if folder else "from the project's bins"
    console.print(f"lengths of documents {origin}", highlight=False)
    console.print(f"kernels {timed}{'; so does the linear part' if args.linear else ''}", highlight=False)
    names = known(variants, first, scale, nodes, console)
    batches = tuple(batch for batches_of_set in sets.values() for batch in batches_of_set)
    job = Job(shape, scale, "", batches, tuple(names), args.repeat, args.kernels, args.linear)
    rows = measure(job, console)
    out = []
    for name, batches_of_set in sets.items():
        rows_of_batch = [row for row in rows if row["batch"] == name]
        documents = [len(batch.lengths) for batch in batches_of_set]
        title = (
            f"{name}: {len(batches_of_set)} batches of {shape.ranks} x {args.tokens} tokens, {min(documents)} to "
            f"{max(documents)} documents; medians of {args.repeat}"
        )
        figures = show.figures(rows_of_batch, shape, BASE)
        factor = scale.seconds if args.kernels == "modelled" else None
        console.print(show.layer_table(title, figures, factor, BASE))
        out.append(
            {
                "what": what, "set": name, "preset": scale.cluster.name, "nodes": nodes, "in_node": in_node,
                "factor": scale.seconds, "kernels": args.kernels, "linear": args.linear,
                "figures": [dataclasses.asdict(figure) for figure in figures], "rows": rows_of_batch,
                "lengths": [batch.lengths for batch in batches_of_set],
            }
        )  # fmt: skip
    busy = show.busy_machine(rows, os.cpu_count() or 1)
    if busy is not None:
        console.print(busy, highlight=False)
    wrong = show.wrong_bytes(rows)
    if wrong:
        raise ClusterError(f"bytes are not those of the plan: {'; '.join(wrong)}")
    console.print("Every rank handed over just the bytes that its plan says.\n")
    return out


def run(args: argparse.Namespace) -> None:
    """Run the measurements that were asked for."""
    console = show.console()
    lack = missing()
    if lack is not None:
        raise ClusterError(lack)
    if "clean" in args.what:
        console.print(f"removed: {', '.join(clean()) or 'nothing'}")
    elif leftovers():
        console.print(f"left by runs that were killed, `clean` removes it: {', '.join(leftovers())}")
    out: list[dict[str, Any]] = []
    console.print(f"{os.cpu_count()} cores")
    if args.validate:
        out.append(validation(args, console))
        args.what = []
    if "mesh" in args.what:
        names = args.only or list(MESH)
        out += layers(args, console, "mesh", "a2", 1, args.in_node or "mesh", names)
    if "layer" in args.what:
        names = args.only or USUAL
        out += layers(args, console, "layer", "a800", args.nodes, args.in_node or "preset", names)
    if args.json:
        args.json.write_text(json.dumps(out))


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
