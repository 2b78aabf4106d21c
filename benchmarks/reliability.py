"""What the checks that are always on cost: a share of a step of the quick start, and of a call of attention.

    python -m benchmarks.reliability [--tokens 16384] [--ranks 4] [--repeat 15] [--steps 12] [--only engine]

Each row compares the same work with and without one check, in turn on the same inputs, barrier to barrier, as the
median of the ratios of neighbours: the speed of shared machines drifts. Such a ratio is no better than the noise of a
step, so the last columns give what one rank spends in the check itself: the median of its calls, to which all ranks
come together, times their number in a step; in the step of the quick start, that of its micro-batches. CHECKS lists
the checks; a new one is a name, what leaves it out and what it calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.arguments import Arguments
from benchmarks.runs import DIM, HEADS
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, context_parallel_attention
from mindspeed_cp.data import stream
from mindspeed_cp.engine.call_agreement import CallAgreement
from mindspeed_cp.megatron.patches.swap import replaced
from mindspeed_cp.ops.host_memory import keep_freed_memory

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


class Check(NamedTuple):
    """A check: its name, the object and attribute that it calls, what that does without it, and whether it takes time
    of the thread that trains."""

    name: str
    owner: Any
    attributes: tuple[str, ...]
    without: Callable[..., Any]
    in_step: bool


CHECKS = [
    Check("plans compared in every call", CallAgreement, ("check", "announce"), lambda *given: None, True),
    Check("contents digested (in the loader's thread)", stream, ("rows_digest",), lambda rows: 0, False),
]


@contextmanager
def timed(check: Check, seconds: list[float]) -> Iterator[None]:
    """Record the seconds of each call of a check within the block."""
    name = check.attributes[0]
    function = getattr(check.owner, name)

    def call(*given: Any) -> Any:
        start = time.perf_counter()
        result = function(*given)
        seconds.append(time.perf_counter() - start)
        return result

    with replaced(check.owner, name, call):
        yield


@contextmanager
def left_out(check: Check) -> Iterator[None]:
    """Run the block without a check."""
    with ExitStack() as stack:
        for name in check.attributes:
            stack.enter_context(replaced(check.owner, name, check.without))
        yield


def barrier_to_barrier(run: Callable[[], object]) -> float:
    """Return the seconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def compare(check: Check, run: Callable[[], object], repeat: int) -> tuple[list[float], list[float]]:
    """Return the seconds of runs with the check, and their ratios to runs without it; the order alternates."""
    seconds, ratios = [], []
    for number in range(repeat):
        times = {}
        for is_on in (True, False) if number % 2 else (False, True):
            with nullcontext() if is_on else left_out(check):
                times[is_on] = barrier_to_barrier(run)
        seconds.append(times[True])
        ratios.append(times[True] / times[False])
    return seconds, ratios


def engine_worker(rank: int, folder: str, ranks: int, tokens: int, repeat: int) -> None:
    """Run one causal document of `tokens` tokens on a ring, forward and backward."""
    keep_freed_memory()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    plan = build_plan(Documents([tokens]), Topology(1, ranks), AttentionConfig(HEADS, head_dim=DIM), "ring")
    rows = int(plan.layout.token_counts[rank])
    q, k, v = (torch.randn(rows, HEADS, DIM, requires_grad=True) for _ in range(3))
    dout = torch.randn(rows, HEADS, DIM)

    def call() -> None:
        torch.autograd.grad(context_parallel_attention(q, k, v, plan), (q, k, v), dout)

    for _ in range(2):
        call()
    check = CHECKS[0]
    seconds, ratios = compare(check, call, repeat)
    alone = seconds_together(plan)
    if rank == 0:
        row = (f"{tokens} tokens, causal, ring of {ranks}: {check.name}", seconds, ratios, statistics.median(alone))
        Path(folder, "engine.json").write_text(json.dumps([row]))
    dist.destroy_process_group()


def seconds_together(plan: Any, calls: int = 200) -> list[float]:
    """Return the seconds of comparisons for which all ranks arrive together."""
    agreement = CallAgreement(None, 600.0, torch.device("cpu"))
    seconds: list[float] = []
    with timed(CHECKS[0], seconds):
        for _ in range(calls):
            dist.barrier()
            agreement.check(plan, torch.float32)
    return seconds


def seconds_of_micro_batch(plan: Any, calls: int, repeat: int = 60) -> list[float]:
    """Return the seconds that the comparisons of a micro-batch take: its announcement, and its calls of attention.

    All ranks begin together and compute for some 15 ms before the first call and between calls, as layers do.
    """
    agreement = CallAgreement(None, 600.0, torch.device("cpu"))
    x = torch.randn(512, 512)

    def layer() -> None:
        until = time.process_time() + 0.015
        while time.process_time() < until:
            x @ x

    result = []
    for _ in range(repeat):
        dist.barrier()
        start = time.perf_counter()
        agreement.announce([plan])
        seconds = time.perf_counter() - start
        for _ in range(calls):
            layer()
            start = time.perf_counter()
            agreement.check(plan, torch.float32)
            seconds += time.perf_counter() - start
        result.append(seconds)
    return result


def training_worker(rank: int, folder: str, ranks: int, steps: int) -> None:
    """Run steps of the quick start; each step's micro-batches run with and without each check."""
    environment = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in environment.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    from mindspeed_cp.config.settings import load_settings
    from mindspeed_cp.megatron import megatron_compat
    from mindspeed_cp.train import loop
    from mindspeed_cp.train.launch import uncompiled_megatron
    from mindspeed_cp.train.world import join_ranks

    overrides = [f"output.folder={folder}/run", "output.log_interval=0", f"train.train_iters={steps}"]
    settings = load_settings(QUICKSTART, [*overrides, "train.compare=[]", "train.lr_warmup_iters=2"])
    timings: dict[str, tuple[list[float], list[float], list[float]]] = {check.name: ([], [], []) for check in CHECKS}
    run_step, plans = loop.run_step, []

    def measured(training: Any, batches: Any, *given: Any) -> Any:
        first = next(batches)
        micro_batches = [first, *(next(batches) for _ in range(len(first.global_batch.rows) - 1))]
        plans.append(first.params.plan)
        micro_batches_per_step.append(len(micro_batches))
        for check in CHECKS:
            if check.in_step:
                for into, values in zip(
                    timings[check.name],
                    compare(check, lambda: run_step(training, iter(micro_batches), *given), 1),
                    strict=False,
                ):
                    into.extend(values)
        start, calls = time.perf_counter(), []
        with timed(CHECKS[0], calls):
            result = run_step(training, iter(micro_batches), *given)
        steps_seconds.append(time.perf_counter() - start)
        calls_per_step.append(len(calls))
        return result

    steps_seconds: list[float] = []
    calls_per_step: list[int] = []
    micro_batches_per_step: list[int] = []
    digest_seconds: list[float] = []
    with (
        uncompiled_megatron(),
        megatron_compat(),
        replaced(loop, "run_step", measured),
        timed(CHECKS[1], digest_seconds),
        join_ranks(settings, store_file=Path(folder, "train-store")) as world,
    ):
        loop.train(settings, world)
        calls = statistics.median(calls_per_step) / micro_batches_per_step[-1]
        alone = statistics.median(seconds_of_micro_batch(plans[-1], round(calls))) * micro_batches_per_step[-1]
    if rank == 0:
        seconds, ratios, _ = timings[CHECKS[0].name]
        rows = [
            (f"step of the quick start, {ranks} ranks: {CHECKS[0].name}", seconds, ratios, alone),
            (
                f"step of the quick start, {ranks} ranks: {CHECKS[1].name}",
                steps_seconds,
                [],
                sum(digest_seconds) / len(digest_seconds) * 2,  # rows, and the chunk that all ranks read
            ),
        ]
        Path(folder, "training.json").write_text(json.dumps(rows))


def print_rows(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Print the table and return it."""
    print(f"{'':82}{'ms':>9}{'with/without':>14}{'check, ms':>11}{'share':>9}")
    table = []
    for name, seconds, ratios, alone in rows:
        total = statistics.median(seconds)
        ratio = statistics.median(ratios) if ratios else None
        table.append({"name": name, "seconds": total, "ratio": ratio, "check_seconds": alone, "share": alone / total})
        shown = "-" if ratio is None else f"{ratio:.4f}"
        print(f"{name:82}{total * 1e3:9.1f}{shown:>14}{alone * 1e3:11.3f}{alone / total:9.3%}")
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of the document")
    parser.add_argument("--ranks", type=int, default=4, help="of the ring")
    parser.add_argument("--repeat", type=int, default=15, help="pairs of calls of attention")
    parser.add_argument("--steps", type=int, default=12, help="of the quick start")
    parser.add_argument("--only", nargs="+", default=["engine", "training"], help="engine, training")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    rows: list[Any] = []
    jobs = (
        ("engine", engine_worker, (arguments.ranks, arguments.tokens, arguments.repeat)),
        ("training", training_worker, (4, arguments.steps)),
    )
    for name, worker, given in jobs:
        if name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (folder, *given), nprocs=given[0])
            rows += json.loads(Path(folder, f"{name}.json").read_text())
    table = print_rows(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
