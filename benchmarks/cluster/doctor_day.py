"""`mindspeed-cp doctor` on the emulated cluster: its rehearsal, with NICs and faults that are known.

    python -m benchmarks.cluster.doctor_day FOLDER [--nodes 2] [--ranks-per-node 2] [--rate 100] [--link-rate 2000]
        [--slow-rank R] [--slow-rate 25] [--cut R S] [--cut-after TEXT] [-- OPTIONS OF DOCTOR]

Needs root and iproute2. Every rank is a process in a network namespace of its own; NICs and links inside nodes are
limited by tc to --rate and --link-rate Mbit/s. --slow-rank gives the NIC of a rank another rate, which the report has
to name. --cut lets all packets between two ranks vanish once the first rank has printed --cut-after: the report has to
name these ranks, and to have everything that was measured before. If rank 0, which serves the store, is cut off from a
rank, that rank counts as lost.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.cluster.fabric import ENDING, ClusterError, cluster, run, run_ranks, terminated
from benchmarks.cluster.network import Names, Shape, limiter

PORT = 29573
RANK = "as-a-rank"  # first argument of the processes that this program starts in the namespaces


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options; what follows `--` is for the doctor."""
    argv = sys.argv[1:] if argv is None else argv
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser("python -m benchmarks.cluster.doctor_day", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of a NIC, each way")
    parser.add_argument("--link-rate", type=float, default=2000.0, help="Mbit/s of a link inside a node")
    parser.add_argument("--slow-rank", type=int, help="rank whose NIC is slow")
    parser.add_argument("--slow-rate", type=float, default=25.0, help="Mbit/s of the slow NIC")
    parser.add_argument("--cut", type=int, nargs=2, help="ranks between which packets vanish")
    parser.add_argument("--cut-after", default="facts:", help="text of the first rank after which they do")
    args = parser.parse_args(own)
    args.doctor = rest
    return args


def limit_nic(names: Names, shape: Shape, rank: int, rate: int) -> None:
    """Give the NIC of a rank another rate, both ways."""
    for device in (f"up{shape.nic(rank)}", f"down{shape.nic(rank)}"):
        run(["tc", "-n", names.fabric, "qdisc", "delete", "dev", device, "root"])
        for command in limiter(names.fabric, device, rate):
            run(command)


def cut_off(names: Names, shape: Shape, first: int, second: int) -> None:
    """Let all packets between two ranks vanish; nobody is told."""
    for rank, other in ((first, second), (second, first)):
        run(["ip", "-n", names.rank(rank), "route", "replace", "blackhole", f"{shape.address(other)}/32"])


def rehearse(args: argparse.Namespace) -> str:
    """Run the doctor on all ranks; return what the first rank printed.

    Raises:
        ClusterError: a rank failed otherwise than by finding something (exit code 1).
    """
    rates = (round(args.rate * 1e6), round(args.link_rate * 1e6))
    shape = Shape(args.nodes, args.ranks_per_node, args.ranks_per_node, rates[0], link_rate=rates[1])
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-") as folder, cluster(shape) as names:
        if args.slow_rank is not None:
            limit_nic(names, shape, args.slow_rank, round(args.slow_rate * 1e6))
        run_ranks(names, shape, _rank_command(args, shape), Path(folder), _cutter(args, names, shape, Path(folder)))
        return Path(folder, "rank0.log").read_text(errors="replace")


def _rank_command(args: argparse.Namespace, shape: Shape) -> Callable[[int], list[str]]:
    def command(rank: int) -> list[str]:
        settings = {
            "RANK": rank, "WORLD_SIZE": shape.ranks, "LOCAL_RANK": rank % shape.ranks_per_node,
            "LOCAL_WORLD_SIZE": shape.ranks_per_node, "MASTER_ADDR": shape.address(0), "MASTER_PORT": PORT,
        }  # fmt: skip
        doctor = ["doctor", "--device", "cpu", "--report", str(args.folder / "report.json"), *args.doctor]
        program = [sys.executable, "-m", "benchmarks.cluster.doctor_day", RANK, *doctor]
        return ["env", *(f"{name}={value}" for name, value in settings.items()), *program]

    return command


def _cutter(args: argparse.Namespace, names: Names, shape: Shape, folder: Path) -> Callable[[], None]:
    """Return what watches the lines of the first rank, and cuts two ranks off once."""
    waiting = [args.cut] if args.cut else []

    def watch() -> None:
        if waiting and args.cut_after in Path(folder, "rank0.log").read_text(errors="replace"):
            cut_off(names, shape, *waiting.pop())

    return watch


def run_rank(options: list[str]) -> int:
    """Run the command line in this process; what the doctor finds (exit code 1) is what a rehearsal is for."""
    from mindspeed_cp.cli.main import run as command_line

    code = command_line(options)
    return 0 if code == 1 else code


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [RANK]:
        sys.exit(run_rank(argv[1:]))
    args = arguments(argv)
    for number in ENDING:
        signal.signal(number, terminated)
    try:
        print(rehearse(args), end="")
    except ClusterError as error:
        sys.exit(f"benchmarks.cluster.doctor_day: {error}")
    except KeyboardInterrupt:
        sys.exit("benchmarks.cluster.doctor_day: stopped; everything it made is removed")


if __name__ == "__main__":
    main()
