"""The options of `python -m benchmarks.published`, checked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import benchmarks.published
from benchmarks.data import real_lengths_folder
from benchmarks.length_sets import FURTHER_SETS
from benchmarks.published.bases import HEADS, RANKS, Place
from mindspeed_cp.data.lengths import load_lengths
from mindspeed_cp.errors import ConfigError

#: Options that name a file to be written.
FILES = ("markdown", "json", "csv")


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options.

    Raises:
        ConfigError: a cluster or set of lengths is not known, or a number is out of range.
    """
    parser = argparse.ArgumentParser(
        "python -m benchmarks.published", description=benchmarks.published.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--clusters", nargs="+", default=["a800", "h200", "a2", "a3"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128], help="of basis 1")
    parser.add_argument("--lengths", nargs="+", default=["wikipedia", "prolong"])
    parser.add_argument(
        "--further", nargs="*", default=list(FURTHER_SETS), help="further sets of lengths; none: no row"
    )
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--batches", type=int, default=4, help="of each row of basis 2; half for basis 1 and --further")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--basis", type=int, nargs="*", default=[1, 2], choices=[1, 2], help="of --lengths, or none")
    parser.add_argument("--placements", type=int, help="simulated_placements of ours; default: its own")
    parser.add_argument("--no-steps", dest="steps", action="store_false")
    parser.add_argument("--bf16", action="store_true", help="others send gradients of keys in bf16")
    parser.add_argument("--no-sensitivity", dest="sensitivity", action="store_false")
    parser.add_argument("--markdown", type=Path, help="write tables for a page of documentation there")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--csv", type=Path, help="write a line for each batch there")
    options = parser.parse_args(argv)
    if options.batches < 1:
        raise ConfigError(f"--batches is {options.batches}; valid: a whole number from 1")
    if options.placements is not None and options.placements < 1:
        raise ConfigError(f"--placements is {options.placements}; valid: a whole number from 1")
    if min(options.ranks) < 1:
        raise ConfigError(f"--ranks has {min(options.ranks)}; valid: whole numbers from 1")
    if options.seed < 0:
        raise ConfigError(f"--seed is {options.seed}; valid: a whole number from 0")
    for switch in FILES:
        file = getattr(options, switch)
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"--{switch} {file}: there is no folder {file.absolute().parent}")
    _check_names(options)
    return options


def _check_names(options: argparse.Namespace) -> None:
    """Raise ConfigError for a cluster or a set of lengths that there is not."""
    for name in options.clusters:
        over_pool = 2 in options.basis or options.further
        for ranks in [*(options.ranks if 1 in options.basis else ()), *([RANKS] if over_pool else ())]:
            Place(name, "mha", ranks).check()
    for name in options.lengths:
        load_lengths(name, real_lengths_folder(name))
    for name in options.further:
        if name not in FURTHER_SETS:
            raise ConfigError(f"--further has {name!r}; valid: {', '.join(FURTHER_SETS)}; --lengths has real ones")
