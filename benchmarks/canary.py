"""What the canary of attention adds to a step, as a share of it.

    python -m benchmarks.canary [--steps 30] [--tokens 16384] [--repeat 7] [--json FILE]

Quick start: configs/quickstart.yaml is trained with the check in every step; the median of its seconds is divided by
the median of the step's other seconds, and by the interval of the settings. Engine: forward and backward of one causal
document in bf16 on 2 ranks; the canary sees that call. Every time is from barrier to barrier, so that it is that of the
slowest rank; steps and checks take turns, because the speed of shared machines drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.arguments import Arguments
from benchmarks.runs import DIM, HEADS
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, context_parallel_attention
from mindspeed_cp.config.settings import load_settings
from mindspeed_cp.engine.canary import AttentionCanary
from mindspeed_cp.ops.host_memory import keep_freed_memory

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
ENGINE_RANKS, CANARY = 2, "canary of attention"


def quickstart_settings(folder: str, steps: int) -> Any:
    changes = [
        *(f"output.folder={folder}/run", "output.log_interval=0", "train.compare=[]", "checkpoint.save_interval=0"),
        *(f"train.train_iters={steps}", "train.check_attention_interval=1"),
    ]
    return load_settings(QUICKSTART, changes)


def train_rank(rank: int, folder: str, steps: int, ranks: int) -> None:
    """Train as a rank of the quick start, and write the median seconds of a step and of the check."""
    environment = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in environment.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    from mindspeed_cp.train.launch import uncompiled_megatron

    with uncompiled_megatron():
        from mindspeed_cp.megatron import megatron_compat
        from mindspeed_cp.train import loop, step
    from mindspeed_cp.train.world import join_ranks

    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, function: Callable[..., Any], synchronizes: bool = True) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if synchronizes:
                dist.barrier()
            began = time.perf_counter()
            result = function(*arguments)
            if synchronizes:
                dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            return result

        return run

    loop.run_step = timed("step", loop.run_step)
    step.check_canary = timed(CANARY, step.check_canary)
    AttentionCanary.observe = timed("observe", AttentionCanary.observe, False)  # type: ignore[method-assign]
    settings = quickstart_settings(folder, steps)
    with megatron_compat(), join_ranks(settings, store_file=Path(folder, "train-store")) as world:
        loop.train(settings, world)
        observed = world.gather([statistics.median(seconds["observe"])]).max()
        if world.is_first:
            medians = {name: statistics.median(times[2:]) for name, times in seconds.items()}
            medians[CANARY] += float(observed)
            medians["step"] -= medians[CANARY]
            Path(folder, "quickstart.json").write_text(json.dumps(medians))


def barrier_time() -> float:
    """Return the time when the slowest rank is there."""
    dist.barrier()
    return time.perf_counter()


def engine_rank(rank: int, folder: str, tokens: int, repeat: int) -> None:
    keep_freed_memory()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ENGINE_RANKS)
    plan = build_plan(Documents([tokens]), Topology(1, ENGINE_RANKS), AttentionConfig(HEADS, HEADS, DIM))
    rows = int(plan.layout.token_counts[rank])
    q, k, v = (torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(repeat + 1):
        watched, times = AttentionCanary(1, (turn,)), [barrier_time()]
        out = context_parallel_attention(q, k, v, plan)
        times.append(barrier_time())
        watched.observe(q, k, v, out, plan, rank, None)
        times.append(barrier_time())
        torch.autograd.grad(out, (q, k, v), out.detach())
        times.append(barrier_time())
        assert watched.check(dist.group.WORLD) is None
        times.append(barrier_time())
        forward, observing, backward, checking = np.diff(times).tolist()
        if turn:  # the first round warms up
            seconds["step"].append(forward + backward)
            seconds[CANARY].append(observing + checking)
    if rank == 0:
        medians = {name: statistics.median(x) for name, x in seconds.items()}
        Path(folder, "engine.json").write_text(json.dumps(medians))
    dist.destroy_process_group()


def main() -> None:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of the quick start")
    parser.add_argument("--tokens", type=int, default=16384, help="of the engine's document")
    parser.add_argument("--repeat", type=int, default=7, help="of the engine's step")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    settings = load_settings(QUICKSTART)
    interval, ranks = settings.train.check_attention_interval, settings.context_parallel_suite.context_parallel_size
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_rank, (folder, args.steps, ranks), nprocs=ranks)
        mp.spawn(engine_rank, (folder, args.tokens, args.repeat), nprocs=ENGINE_RANKS)
        for name in ("quickstart", "engine"):
            figures[name] = json.loads(Path(folder, f"{name}.json").read_text())
    for name, medians in figures.items():
        share = medians[CANARY] / medians["step"] / interval
        print(
            f"{name:10}  {CANARY:22}  {medians[CANARY] * 1e3:8.1f} ms, every {interval} steps of "
            f"{medians['step'] * 1e3:8.1f} ms: {share:.3%} of a step"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
