"""Builds an emulated cluster on this machine, runs a process in each rank's namespace, and removes it all again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.cluster.network import Command, Names, Shape, commands, remove, trial

PREFIX = "mindspeed-cp-"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ClusterError(RuntimeError):
    """What went wrong, in one line."""


def missing() -> str | None:
    """Return what this machine lacks for an emulated cluster; None if nothing."""
    needs = []
    if os.geteuid() != 0:
        needs.append("root")
    if shutil.which("ip") is None or shutil.which("tc") is None:
        needs.append("iproute2 (ip and tc)")
    if needs:
        return f"an emulated cluster needs {' and '.join(needs)}, which is missing here"
    try:
        with _namespaces(Names(f"{PREFIX}{os.getpid()}-try-"), trial):
            return None
    except ClusterError as error:
        return f"an emulated cluster needs namespaces, veth, bridge, htb and u32 of the kernel: {error}"


def leftovers() -> list[str]:
    """Return the namespaces that killed runs of this program left behind: those whose process has ended."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    names = []
    for name in (line.split()[0] for line in listed.splitlines() if line.strip()):
        number = name.removeprefix(PREFIX).split("-")[0]
        if name.startswith(PREFIX) and number.isdigit() and not Path("/proc", number).exists():
            names.append(name)
    return names


def clean() -> list[str]:
    """Remove what finished runs left behind, and return its names."""
    names = leftovers()
    for command in remove(names):
        run(command)
    return names


@contextmanager
def cluster(shape: Shape) -> Iterator[Names]:
    """Yield the cluster's namespaces, and remove them when the context ends, however it ends.

    Raises:
        ClusterError: root or iproute2 is missing, or a command failed.
    """
    lack = missing()
    if lack is not None:
        raise ClusterError(lack)
    with _namespaces(Names(f"{PREFIX}{os.getpid()}-"), lambda names: commands(shape, names)) as names:
        yield names


@contextmanager
def _namespaces(names: Names, make: Callable[[Names], Iterable[Command]]) -> Iterator[Names]:
    """Run the commands that make namespaces of those names, and remove these when the context ends."""
    if made(names):
        raise ClusterError(f"namespaces {', '.join(made(names))} exist, and are not of this run; `clean` removes them")
    try:
        run_all(make(names))
        yield names
    finally:
        with unbroken():
            for command in remove(made(names)):
                run(command)


def made(names: Names) -> list[str]:
    """Return the existing namespaces of a run, sorted."""
    return sorted(path.name for path in Path("/run/netns").glob(f"{names.prefix}*"))


def run(command: Sequence[str], lines: str | None = None) -> None:
    """Run one command to its end.

    Args:
        command: with its arguments.
        lines: its input; None: it has none.

    Raises:
        ClusterError: it failed.
    """
    # A session of its own: Ctrl-C is for this program, which then stops between two commands.
    done = subprocess.run(command, input=lines, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {' '.join((done.stderr or done.stdout).split())}")


def run_all(commands: Iterable[Command]) -> None:
    """Run commands in their order; those of ip or tc that follow each other in one namespace by one process.

    Raises:
        ClusterError: a command failed.
    """
    for prefix, group in groupby(commands, _batch_prefix):
        if prefix is None:
            for command in group:
                run(command)
        else:
            run([*prefix, "-batch", "-"], "".join(" ".join(command[len(prefix) :]) + "\n" for command in group))


def _batch_prefix(command: Command) -> tuple[str, ...] | None:
    """Return what commands have in common that one process of ip or tc runs; None: the command runs by itself."""
    if command[:2] == ["ip", "netns"]:
        return None
    return tuple(command[:3] if command[1] == "-n" else command[:1])


def run_ranks(
    names: Names,
    shape: Shape,
    command: Callable[[int], Sequence[str]],
    folder: Path,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Run one process for each rank, in its namespace, until all have ended; none outlives this call.

    Args:
        names: of the namespaces.
        shape: of the cluster.
        command: of a rank.
        folder: gets what each rank writes, as rank<r>.log.
        watch: called a few times a second.

    Raises:
        ClusterError: a rank failed; names it, with the last line that it wrote.
    """
    settings = {"GLOO_SOCKET_IFNAME": "nic", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(shape.ranks):
            inside = ["ip", "netns", "exec", names.rank(rank), *command(rank)]
            with Path(folder, f"rank{rank}.log").open("wb") as log:
                how: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
                processes.append(subprocess.Popen(inside, env={**os.environ, **settings}, **how))
        while True:
            codes = [process.poll() for process in processes]
            watch()
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                raise ClusterError(failure_line(folder, failed, codes))
            if all(code == 0 for code in codes):
                return
            time.sleep(0.1)
    finally:
        with unbroken():
            _end(processes)


def failure_line(folder: Path, failed: list[int], codes: Sequence[int | None]) -> str:
    """Return a line that names the first rank that failed by itself, or else the first that failed, and its error."""
    lines = {rank: Path(folder, f"rank{rank}.log").read_text(errors="replace").strip().splitlines() for rank in failed}
    last = {rank: text[-1] if text else f"ended with {codes[rank]}" for rank, text in lines.items()}
    first = next((rank for rank in failed if "PeerError" not in last[rank]), failed[0])
    return f"rank {first} failed: {last[first]}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


@contextmanager
def unbroken() -> Iterator[None]:
    """Block signals until the context ends, so that cleaning up is not interrupted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def terminated(number: int, frame: object) -> None:
    """Handle SIGINT, SIGTERM and SIGHUP: the first ends the program, later ones are ignored while it cleans up."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
