"""Kernels of all ranks of a plan, one rank after the other on one device, against one flash call on an equal share.

    python -m benchmarks.engine --device cuda --virtual-ranks 8 [--tokens 65536] [--heads 32] [--kv-heads 32]
        [--dim 128] [--algorithm ring] [--lengths wikipedia] [--repeat 9] [--skip-packed] [--json FILE]

The time of a rank is its attention in all steps, with merges and copies of rows. It excludes messages, filling their
buffers, summing gradients of keys over steps, and the last rounding of gradients. Ideal: the flash attention of the
device, once on the whole batch with 1/ranks of the heads (on a CPU, whose kernel has no packed sequences, once for each
document). Efficiency: time of the ideal over that of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import Arguments, natural, positive
from benchmarks.host import host_rows
from benchmarks.isolated_rank import IsolatedRank
from benchmarks.timing import machine_name, time_in_turn
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator
from mindspeed_cp.ops.attention.backends import get_backend
from mindspeed_cp.ops.attention.cuda.flash_attention import AtenFlashOperator, FlashArguments
from mindspeed_cp.plan import document_mask

DIRECTIONS = ("forward", "backward")

#: torch's flash attention on CPUs, the kernel of the cpu backend; tensors are [1, heads, rows, dim].
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class RankWork:
    """Attention of one rank with filled slots, of the whole plan or of its parts one after the other."""

    def __init__(self, plan: Any, rank: int, backend: Any, inputs: list[torch.Tensor]) -> None:
        lengths = plan.documents.lengths
        self.parts = [
            PartWork(part, rank, backend, tensors_of_part(part, lengths, inputs)) for part in plan.parts_or_self
        ]

    @property
    def steps(self) -> int:
        """Number of (step, slot)s of the forward."""
        return sum(len(part.slot_calls["forward"]) for part in self.parts)

    def forward(self) -> None:
        """Run the forward of all steps."""
        for part in self.parts:
            part.forward()

    def both(self) -> None:
        """Run forward and backward of all steps."""
        for part in self.parts:
            part.both()


def tensors_of_part(part: Any, lengths: np.ndarray, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the rows of the documents of a part, of a batch of documents of these lengths; the tensors themselves if
    the part has all documents."""
    in_part = document_mask(part)
    if in_part.all():
        return tensors
    rows = torch.from_numpy(np.flatnonzero(np.repeat(in_part, lengths))).to(tensors[0].device)
    return [x[rows] for x in tensors]


class PartWork:
    """Attention of one rank in a plan without parts."""

    def __init__(self, plan: Any, rank: int, backend: Any, inputs: list[torch.Tensor]) -> None:
        self.plan, self.backend = plan, backend
        self.rank = IsolatedRank(plan, rank, backend, *inputs, None)
        self.slot_calls = {direction: list(self.rank.slot_calls(direction)) for direction in DIRECTIONS}

    def forward(self) -> None:
        """Run the forward of all steps."""
        self.rank.start()
        for calls, k, v, *_ in self.slot_calls["forward"]:
            self.backend.forward(calls, self.plan.attention, self.rank.state, k, v)

    def both(self) -> None:
        """Run forward and backward of all steps."""
        self.forward()
        state = self.rank.backward_state()
        for calls, k, v, *_ in self.slot_calls["backward"]:
            dk, dv = GradientAccumulator(k), GradientAccumulator(v)
            self.backend.backward(calls, self.plan.attention, state, k, v, dk, dv)


class IdealWork:
    """Flash attention of the device on an equal share of the heads, without conversion of the results."""

    def __init__(self, documents: Documents, attention: AttentionConfig, inputs: list[torch.Tensor]) -> None:
        self.q, self.k, self.v = inputs
        device, longest = self.q.device, int(documents.lengths.max())
        self.rows = [slice(a, b) for a, b in pairwise(documents.offsets.tolist())]
        cu = torch.from_numpy(documents.offsets.astype(np.int32)).to(device)
        self.arguments = FlashArguments(cu, cu, longest, longest, (-1, 0), attention.softmax_scale, 0.0)
        self.flash = AtenFlashOperator() if device.type == "cuda" else None

    def forward(self) -> list[Any]:
        """Run the forward."""
        if self.flash is not None:
            return [self.flash.forward(self.q, self.k, self.v, self.arguments)]
        return [CPU_FLASH(*self._document(rows), 0.0, True, scale=self.arguments.scale) for rows in self.rows]

    def both(self) -> None:
        """Run forward and backward."""
        results = self.forward()
        if self.flash is not None:
            ((out, lse, rng_state),) = results
            self.flash.backward(self.q, self.k, self.v, out, out, lse, rng_state, self.arguments)
            return
        for rows, (out, lse) in zip(self.rows, results, strict=True):
            CPU_FLASH_BACKWARD(out, *self._document(rows), out, lse, 0.0, True, scale=self.arguments.scale)

    def _document(self, rows: slice) -> list[torch.Tensor]:
        """Return q, k and v of a document with as many kv heads as query heads, as the kernel for CPUs requires."""
        group = self.q.shape[1] // self.k.shape[1]
        q, k, v = (x[rows].transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        return [q, *(x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))]


def measure(
    lengths: list[int], ranks: int, attention: AttentionConfig, algorithm: str, device: torch.device, repeat: int
) -> list[dict[str, Any]]:
    """Return {"direction", "ideal_ms", "rank_ms", "efficiency"} for the forward, and for forward + backward.

    Args:
        lengths: lengths of the documents.
        ranks: ranks of the plan; a divisor of heads and kv heads.
        attention: configuration with all heads.
        algorithm: algorithm of the plan.
        device: device whose backend computes.
        repeat: rounds of the ideal and of each rank.
    """
    documents, backend = Documents(lengths), get_backend(device.type)
    plan = build_plan(documents, Topology(1, ranks), attention, algorithm)
    shapes = [(documents.tokens, n, attention.head_dim) for n in (attention.heads, *[attention.kv_heads] * 2)]
    inputs = [torch.randn(shape, device=device).to(torch.bfloat16) for shape in (*shapes, shapes[0])]
    share = AttentionConfig(attention.heads // ranks, attention.kv_heads // ranks, attention.head_dim)
    ideal = IdealWork(documents, share, [x[:, : x.shape[1] // ranks].contiguous() for x in inputs[:3]])
    times_by_direction: dict[str, list[tuple[float, float]]] = {"forward": [], "both": []}
    for rank in range(ranks):
        work = RankWork(plan, rank, backend, inputs)
        for direction, times in times_by_direction.items():
            runs = {"ideal": getattr(ideal, direction), "rank": getattr(work, direction)}
            medians = time_in_turn(runs, device, repeat)
            times.append((medians["ideal"], medians["rank"]))
        del work
    rows = []
    for direction, times in times_by_direction.items():
        alone = statistics.median(a for a, _ in times)
        rank_ms = [b for _, b in times]
        rows.append({"direction": direction, "ideal_ms": alone, "rank_ms": rank_ms, "efficiency": alone / max(rank_ms)})
    return rows


def step_us(ranks: int, attention: AttentionConfig, device: torch.device, calls: int = 100) -> float:
    """Return the median microseconds of the host for the operator's forward of one ring step on a tiny batch: on a GPU
    the time of launches, on a CPU of the kernels as well. The engine is not included; see `host_rows`."""
    documents, backend = Documents([32 * ranks]), get_backend(device.type)
    plan = build_plan(documents, Topology(1, ranks), attention, "ring")
    shapes = [(documents.tokens, n, attention.head_dim) for n in (attention.heads, *[attention.kv_heads] * 2)]
    inputs = [torch.randn(shape, device=device).to(torch.bfloat16) for shape in (*shapes, shapes[0])]
    work = RankWork(plan, ranks - 1, backend, inputs)
    work.forward()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        work.forward()
        times.append((time.perf_counter() - start) * 1e6 / work.steps)
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
    return statistics.median(times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this module to those of benchmarks.engine."""
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--virtual-ranks", type=natural, default=0, help="of a plan, one after the other on the device")
    parser.add_argument("--heads", type=positive, default=32, help="with virtual ranks, as what follows")
    parser.add_argument("--kv-heads", type=positive, default=32)
    parser.add_argument("--dim", type=positive, default=128)
    parser.add_argument("--algorithm", default="ring")
    parser.add_argument("--lengths", default="wikipedia", help="of the packed row; as `mindspeed-cp plan` takes them")


def report(parser: Arguments, args: argparse.Namespace, cases: dict[str, list[int]]) -> dict[str, Any]:
    """Measure and print the rows of these lengths, by title.

    Raises:
        ConfigError: the algorithm or the backend does not take them.
    """
    ranks, device = args.virtual_ranks, torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device; valid here: --device cpu")
    if args.heads % ranks or args.kv_heads % ranks:
        parser.error(
            f"--virtual-ranks is {ranks}; valid: a divisor of --heads {args.heads} and --kv-heads {args.kv_heads}, so "
            "that the ideal's shares are equal"
        )
    if device.type == "cpu":
        torch.set_num_threads(1)
    attention = AttentionConfig(args.heads, args.kv_heads, args.dim)
    figures: dict[str, Any] = {"machine": machine_name(device), "host": host_rows(ranks, attention, device)}
    kernels = "host time on this CPU, attention operator without the engine"
    figures["host"].append({"what": kernels, "us": step_us(ranks, attention, device)})
    shape = f"bf16, {args.heads} heads ({args.kv_heads} of keys) x {args.dim}, {args.tokens} tokens, {args.algorithm}"
    print(f"{figures['machine']}: {shape}, {ranks} ranks one after the other, no communication")
    for row in figures["host"]:
        print(f"{row['what']:65} {row['us']:6.0f} us")
    for title, lengths in cases.items():
        figures[title] = measure(lengths, ranks, attention, args.algorithm, device, args.repeat)
        for row in figures[title]:
            rank_ms = row["rank_ms"]
            print(
                f"{title:24} {len(lengths):5} documents, {row['direction']:8} ideal {row['ideal_ms']:8.2f} ms, "
                f"ranks {min(rank_ms):8.2f} to {max(rank_ms):8.2f} ms, efficiency {row['efficiency']:.3f}",
                flush=True,
            )
    return figures
