"""python -m benchmarks.published: see the package's description."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from functools import partial

import benchmarks.published
from benchmarks.arguments import Arguments, natural, new_file, positive
from benchmarks.data import FURTHER_SETS, real_lengths_folder
from benchmarks.published.bases import (
    HEADS,
    RANKS,
    Bench,
    Place,
    Timed,
    bound,
    four_rows,
    further_row,
    further_rows,
    one_row,
    pool_of,
)
from benchmarks.published.systems import OURS, SYSTEMS
from benchmarks.published.table import Row, assumptions, header, line, markdown, summary, target_text
from mindspeed_cp import Documents
from mindspeed_cp.data.lengths import load_lengths
from mindspeed_cp.errors import ConfigError

Batches = Callable[[str, int], list[Documents]]
Changes = dict[str, tuple[tuple[str, float], ...]]

#: What the planner does not know of, by name: factors of the preset's values.
UNCHANGED = "as the preset"
CHANGES: Changes = {
    UNCHANGED: (),
    "NIC x 0.7": (("nic_bandwidth", 0.7),),
    "compute x 1.1": (("peak_flops", 1.1),),
    "both": (("nic_bandwidth", 0.7), ("peak_flops", 1.1)),
}
PLAIN: Changes = {UNCHANGED: ()}

#: Rows in which ranks hold no more tokens than --token-bound times the mean.
BOUNDED = "tokens bounded"

#: Tables of further sets of lengths: batches of both bases.
FURTHER: dict[str, Batches] = {
    f"further sets: one row over {RANKS} ranks": further_row,
    f"further sets: 64K contexts on {RANKS} ranks": further_rows,
}

#: Least part of the fastest published system's speed that ours should have in every batch of further sets of lengths.
FURTHER_TARGET = 0.98


def measure(
    options: argparse.Namespace, sets: Sequence[str], ranks: int, count: int, batches: Batches, changes: Changes
) -> dict[str, list[Row]]:
    """Return rows of all clusters, heads and sets of lengths on so many ranks, of `count` batches each, by change of
    the clusters, half as many where there is one, and with the bound of tokens; those of unchanged ones are printed as
    they are done. A set whose batches are equal has one."""
    dtype = "bfloat16" if options.bf16 else "float32"
    places = [
        (change, Place(cluster, heads, ranks, factors, dtype))
        for cluster in options.clusters
        for heads in options.heads
        for change, factors in changes.items()
    ]
    if options.token_bound:
        unchanged = [place for change, place in places if change == UNCHANGED]
        places += [(BOUNDED, dataclasses.replace(place, tokens_over_mean=options.token_bound)) for place in unchanged]
    rows: dict[str, list[Row]] = {name: [] for name, _ in places}
    for lengths in sets:
        row_of_place = {place: _row(place, lengths) for _, place in places}
        drawn: list[list[Documents]] = []
        for seed in range(options.seed, options.seed + count):
            documents, bench = batches(lengths, seed), Bench()
            if documents in drawn:
                continue
            drawn.append(documents)
            for place, row in row_of_place.items():
                if place.changed and seed - options.seed >= half(count):
                    continue
                timed = {name: bench.time(name, documents, place) for name in SYSTEMS}
                _add(row, documents, timed, bound(documents, place), seed)
        for change, place in places:
            rows[change].append(row_of_place[place])
            if change == UNCHANGED:
                print(line(row_of_place[place], list(SYSTEMS)), flush=True)
    return rows


def half(batches: int) -> int:
    """Return half the number of batches, at least one."""
    return max(1, batches // 2)


def _row(place: Place, lengths: str) -> Row:
    """Return a row without batches."""
    seconds: dict[str, list[float | None]] = {name: [] for name in SYSTEMS}
    return Row(place.name, place.heads, lengths, place.ranks, seconds, [], {name: [] for name in SYSTEMS})


def _add(row: Row, documents: Sequence[Documents], by_system: dict[str, Timed | None], least: float, seed: int) -> None:
    """Add a batch to its row."""
    lengths = pool_of(documents).lengths
    row.seeds.append(seed)
    row.documents.append((len(lengths), int(lengths.max())))
    able = {name: timed_system for name, timed_system in by_system.items() if timed_system is not None}
    row.bound.append(least)
    for name, system in able.items():
        row.fullest.setdefault(name, []).append(system.fullest * row.ranks / int(lengths.sum()))
    for name in by_system:
        row.seconds[name].append(able[name].seconds if name in able else None)
        row.ways[name].append(_way(able[name]) if name in able else "")
    name = min((name for name in able if name != OURS), key=lambda name: able[name].seconds)
    if able[name].seconds < able[OURS].seconds:
        setting = f"{row.cluster} {row.lengths} {row.heads} {row.ranks} ranks, seed {seed}"
        row.why.append(
            f"{setting}: {name} ({_way(able[name])}): ours {_took(able[OURS])}; it {_took(able[name])}; bound "
            f"{1e3 * least:.2f}"
        )


def _way(timed: Timed) -> str:
    labels = list(dict.fromkeys(chosen.label for chosen in timed.chosen))
    return " / ".join(labels) + ("" if timed.pooled else f" x {len(timed.chosen)}")


def _took(timed: Timed) -> str:
    """Return the time of a layer, and what its ranks do in it."""
    busy, exposed = 1e3 * timed.slowest.busy, 1e3 * timed.slowest.exposed
    return (
        f"{1e3 * timed.seconds:.2f} ms: busy {busy.mean():.2f} on average, {busy.max():.2f} at most, waits "
        f"{exposed.mean():.2f}"
    )


def show(options: argparse.Namespace, rows: list[Row]) -> None:
    """Print the summaries of rows, and where ours is not first."""
    for heads in options.heads:
        print(summary(heads, [row for row in rows if row.heads == heads]))
    lost = [said for row in rows for said in row.why]
    print(f"\nours is not first in {len(lost)} of {sum(len(row.bound) for row in rows)} batches" + ":" * bool(lost))
    for said in lost:
        print(f"  {said}")


def show_both(options: argparse.Namespace, basis: str, rows_by_change: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Print the summaries of unchanged rows, then the rows with the bound of tokens; return both by title."""
    show(options, rows_by_change[UNCHANGED])
    if BOUNDED not in rows_by_change:
        return {basis: rows_by_change[UNCHANGED]}
    title = f"{basis}, no rank with more than {options.token_bound:g} times the mean of the tokens"
    print(f"\n{title}\n{header(list(SYSTEMS))}")
    for row in rows_by_change[BOUNDED]:
        print(line(row, list(SYSTEMS)))
    show(options, rows_by_change[BOUNDED])
    return {basis: rows_by_change[UNCHANGED], title: rows_by_change[BOUNDED]}


def main(argv: Sequence[str] | None = None) -> None:
    """Print all tables."""
    options = parse_options(argv)
    began = time.perf_counter()
    for text in assumptions(options.clusters, options.lengths, options.bf16):
        print(text)
    rows_of_basis: dict[str, list[Row]] = {}
    if 1 in options.basis:
        print(f"\nbasis 1: one row over all ranks\n{header(list(SYSTEMS))}")
        by_ranks = [
            measure(options, options.lengths, ranks, half(options.batches), partial(one_row, ranks), PLAIN)
            for ranks in options.ranks
        ]
        joined = {change: [row for rows in by_ranks for row in rows[change]] for change in by_ranks[0]}
        rows_of_basis |= show_both(options, "basis 1", joined)
    if 2 in options.basis:
        print(f"\nbasis 2: 64K contexts, the even ring CP16 x DP4 against all {RANKS} ranks\n{header(list(SYSTEMS))}")
        changes = CHANGES if options.sensitivity else PLAIN
        rows_by_change = measure(options, options.lengths, RANKS, options.batches, four_rows, changes)
        rows_of_basis |= show_both(options, f"basis 2, {UNCHANGED}", rows_by_change)
        rows_of_basis |= {f"basis 2, {name}": rows for name, rows in rows_by_change.items() if name in CHANGES}
        if options.sensitivity:
            count = half(options.batches)
            print(f"\nbasis 2 on clusters of which the planner did not know, the first {count} batches of each row")
            for name in CHANGES:
                for heads in options.heads:
                    rows = [row.first(count) for row in rows_by_change[name] if row.heads == heads]
                    print(summary(f"{name}, {heads}", rows))
    for name, batches in FURTHER.items() if options.further else ():
        print(f"\n{name}\n{header(list(SYSTEMS))}")
        both = show_both(options, name, measure(options, options.further, RANKS, half(options.batches), batches, PLAIN))
        for title, rows in both.items():
            print(target_text(title, rows, FURTHER_TARGET))
        rows_of_basis |= both
    print(f"\n{time.perf_counter() - began:.0f} s")
    if options.markdown:
        options.markdown.write_text(
            "\n".join(text for key, rows in rows_of_basis.items() for text in markdown(key, rows)) + "\n"
        )
    if options.json:
        options.json.write_text(
            json.dumps({key: [dataclasses.asdict(row) for row in rows] for key, rows in rows_of_basis.items()})
        )


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options, or end with one line for a cluster or set of lengths that is not known."""
    parser = Arguments(benchmarks.published.__doc__)
    parser.add_argument("--clusters", nargs="+", default=["a800", "h200", "a2", "a3"])
    parser.add_argument("--ranks", type=positive, nargs="+", default=[16, 32, 64, 128], help="of basis 1")
    parser.add_argument("--lengths", nargs="+", default=["wikipedia", "prolong"])
    parser.add_argument("--further", nargs="*", default=list(FURTHER_SETS), choices=list(FURTHER_SETS),
                        help="further sets of lengths; none: no row")  # fmt: skip
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument(
        "--batches", type=positive, default=4, help="of a row of basis 2; half for basis 1 and --further"
    )
    parser.add_argument("--seed", type=natural, default=0, help="of the first batch")
    parser.add_argument("--basis", type=int, nargs="*", default=[1, 2], choices=[1, 2], help="of --lengths, or none")
    parser.add_argument("--bf16", action="store_true", help="others send gradients of keys in bf16")
    parser.add_argument(
        "--token-bound", type=float, default=1.5, help="tokens of a rank over the mean in the bounded tables; 0: none"
    )
    parser.add_argument("--no-sensitivity", dest="sensitivity", action="store_false")
    parser.add_argument("--markdown", type=new_file, help="write tables for a page of documentation there")
    parser.add_argument("--json", type=new_file, help="write every figure there")
    options = parser.parse_args(argv)
    if 0 != options.token_bound < 1:
        parser.error(f"--token-bound: {options.token_bound:g}; valid: 1 or more, or 0")
    try:
        for name in options.clusters:
            over_pool = 2 in options.basis or options.further
            for ranks in [*(options.ranks if 1 in options.basis else ()), *([RANKS] if over_pool else ())]:
                Place(name, "mha", ranks).check()
        for name in options.lengths:
            load_lengths(name, real_lengths_folder(name))
    except ConfigError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
