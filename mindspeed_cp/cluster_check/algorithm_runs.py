"""Runs an algorithm on a batch over all ranks: its time, and its result against the reference. Runs in the workers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.choose.candidates import parse_candidate
from mindspeed_cp.cluster_check.gradient_sums import gradient_sums, wrong_sums
from mindspeed_cp.cluster_check.kernel_timing import TORCH_TYPES
from mindspeed_cp.cluster_check.measuring_rank import MeasuringRank
from mindspeed_cp.engine import context_parallel_attention, prepare
from mindspeed_cp.engine.canary import AttentionCanary
from mindspeed_cp.engine.recorder import Recorder, recording
from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.host_memory import keep_freed_memory
from mindspeed_cp.plan import AttentionConfig, Plan, Topology
from mindspeed_cp.report.files import replace_file


def run_algorithm(context: MeasuringRank, item: dict[str, Any]) -> dict[str, Any]:
    """Run forward and backward of attention; compare a first run with the reference, time others.

    Args:
        context: this rank.
        item: {"algorithm": as a setting, "lengths", "heads", "kv_heads", "head_dim", "dtype", "seed", "repeats",
            "samples": compared runs of queries, "cluster": text of the cluster's file or None, "scratch": folder}.

    Returns:
        {"seconds": of each repeat, "busy": seconds by activity of the engine in one more run, "wrong": text or None,
        "queries": compared queries on this rank, "sent": bytes}; {"refused": reason} if the algorithm cannot run the
        batch.
    """
    keep_freed_memory()
    context.barrier()  # a new worker joins the group here
    launch, dtype = context.launch, TORCH_TYPES[item["dtype"]]
    topology = Topology(launch.nodes, launch.ranks_per_node, _cluster_file(item))
    attention = AttentionConfig(item["heads"], item["kv_heads"], item["head_dim"])
    try:
        candidate = parse_candidate(item["algorithm"])
        plan = candidate.build_plan(Documents(item["lengths"]), topology, attention, {})
    except (ConfigError, PlanError) as error:
        return {"refused": str(error)}
    prepare(plan, launch.rank, dtype=dtype, device=context.device)
    inputs = _inputs(plan, launch.rank, dtype, context.device, item["seed"])
    wrong, queries = _compare(context, plan, inputs, item["samples"], item["seed"])

    def run() -> None:
        q, k, v, dout = inputs
        out = context_parallel_attention(q, k, v, plan, timeout=context.link_seconds)
        torch.autograd.grad(out, (q, k, v), dout)

    seconds = []
    for _ in range(item["repeats"]):
        context.sign()
        seconds.append(context.seconds(run))
    context.barrier()
    with recording(Recorder(context.device)) as recorder:
        run()
    timings = recorder.read()
    busy: defaultdict[str, float] = defaultdict(float)
    for span in timings.spans:
        busy[span.activity] += span.end - span.begin
    sent = sum(message.bytes for message in timings.messages if message.sends)
    return {"seconds": seconds, "busy": dict(busy), "wrong": wrong, "queries": queries, "sent": sent}


def _cluster_file(item: dict[str, Any]) -> str | None:
    """Write the cluster that algorithms decide by, at the same path on every node; return the path."""
    if item["cluster"] is None:
        return None
    folder = Path(item["scratch"])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "cluster.yaml"
    if not path.exists():
        replace_file(path, lambda new: new.write_text(item["cluster"], encoding="utf-8"))
    return str(path)


def _inputs(plan: Plan, rank: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Return random q, k, v and dout of a rank; all but dout get gradients."""
    attention, generator = plan.attention, torch.Generator().manual_seed(1000 * seed + rank)
    rows = int(plan.layout.token_counts[rank])
    shapes = (
        (rows, attention.heads, attention.head_dim),
        (rows, attention.kv_heads, attention.head_dim),
        (rows, attention.kv_heads, attention.head_dim_v),
        (rows, attention.heads, attention.head_dim_v),
    )
    tensors = [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]
    return *(x.requires_grad_() for x in tensors[:3]), tensors[3]


def _compare(
    context: MeasuringRank, plan: Plan, inputs: tuple[Tensor, ...], samples: int, seed: int
) -> tuple[str | None, int]:
    """Return what is wrong, and the number of queries that this rank compared.

    Output and gradient of q of sampled queries are compared with the fp64 reference
    (:mod:`mindspeed_cp.engine.canary`), gradients of all keys and values in sum (:mod:`.gradient_sums`).
    """
    rank = context.launch.rank
    canaries = [AttentionCanary(1, (seed, number), context.link_seconds) for number in range(samples)]
    q, k, v, dout = inputs
    out = context_parallel_attention(q, k, v, plan, timeout=context.link_seconds)
    for canary in canaries:
        canary.observe(q, k, v, out, plan, rank, None)
    queries = sum(canary.queries_of(rank) for canary in canaries)
    out.backward(dout)
    wrong = []
    for canary in canaries:
        context.sign()
        wrong.append(canary.check(None))
    text = next((text for text in wrong if text is not None), None)
    gradients = [x.grad for x in (q, k, v)]
    totals = context.sum(*gradient_sums((q, k, v), out, dout, gradients))
    if text is None and rank == 0:
        text = wrong_sums(totals, q.dtype)
    for x in (q, k, v):
        x.grad = None
    return text, queries
