"""Bytes that the engine's own tensor operations move beside its kernels and messages: no device, no clock.

    python -m benchmarks.engine_bytes [--backend cuda|npu] [--lengths wikipedia] [--algorithms ring,ulysses] [--ranks 8]
        [--tokens 16384] [--heads 8] [--kv-heads 8] [--dim 32] [--operations] [--json FILE]

All ranks of a plan run in this process, forward and backward, with an attention kernel that computes nothing. What
every other operation reads and writes is added up: copies, conversions, merges, sums, packing of messages. Views and
new memory cost nothing, nor do the messages themselves. Merges and sums of parts
(`mindspeed_cp.ascend_kernels`) count as the one kernel that each is on a device.

The unit is what a perfect kernel must touch once, of an equal share of the tokens: q, k, v, out and lse forward; q, k,
v, out, dout, lse, dq, dk and dv backward. 0.00 is an engine that adds nothing to its kernels.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.arguments import Arguments, new_file, positive
from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan
from mindspeed_cp.cli.lengths import draw_batches
from mindspeed_cp.comm import in_memory
from mindspeed_cp.engine import Stepping
from mindspeed_cp.ops.attention.cuda.flash_attention import CudaFlashAttention
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from tests.engine.all_ranks import attend_all_ranks

ALGORITHMS = "ulysses,hierarchical,hybrid,all_gather,direct,ring"

#: Operations that read only the rows that they return, and those that touch only the rows that they are given.
GATHERS, SCATTERS = ("index", "index_select"), ("index_add_", "index_copy_", "index_put_")

#: Kernels of the package whose results are among their arguments, once to be read and once to be written.
FUSED = ("merge_parts", "sum_parts")

#: Operations that write without reading what was there.
STORES = ("copy_", "fill_", "zero_")


class Bytes(TorchDispatchMode):
    """Counts what operations read and write.

    Attributes:
        moved: bytes by operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0]
        if _counts:
            self.moved[name] += moved_bytes(name, _tensors((args, kwargs)), _tensors(result))
        return result


def moved_bytes(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    if name.startswith(("empty", "new_empty")):
        return 0
    if name in FUSED:
        return sum(x.nbytes for x in inputs)
    if name in SCATTERS:
        rows = sum(x.nbytes for x in inputs[1:] if x.is_floating_point())
        target = rows * inputs[0].element_size() // inputs[-1].element_size()
        return rows + target * (2 if name == "index_add_" else 1)
    known = {x.untyped_storage()._cdata for x in inputs}
    written = sum(x.nbytes for x in outputs if x.untyped_storage()._cdata not in known)
    if name in GATHERS:
        return 2 * written
    in_place = name.endswith("_") and not name.startswith("_")
    if not written and not in_place:
        return 0  # a view
    read = sum(x.nbytes for x in inputs[name in STORES :])
    return read + (inputs[0].nbytes if in_place else written)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


_counts = True


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing inside the block."""
    global _counts
    before, _counts = _counts, False
    try:
        yield
    finally:
        _counts = before


class EmptyFlash:
    """A FlashOperator that computes nothing."""

    dtypes = (torch.bfloat16, torch.float16)
    max_head_dim = 256

    def forward(self, q: Tensor, k: Tensor, v: Tensor, arguments: Any) -> tuple[Tensor, Tensor, tuple[()]]:
        """See FlashOperator."""
        with uncounted():
            return torch.zeros_like(q), torch.zeros(q.shape[1], len(q)), ()

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        """See FlashOperator."""
        with uncounted():
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class EmptyFused:
    """A FusedOperator that computes nothing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, arguments: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See FusedOperator."""
        with uncounted():
            rows = torch.zeros(*q.shape[:-1], 8)
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), rows, rows + 1, (0, 0, 0)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        """See FusedOperator."""
        with uncounted():
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def update(self, before: Any, part: Any) -> tuple[Tensor, ...]:
        """See FusedOperator."""
        raise NotImplementedError


@contextmanager
def silent_network() -> Iterator[None]:
    """Do not count messages."""

    def quietly(function: Any) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with uncounted():
                return function(*args, **kwargs)

        return run

    message, network = in_memory.InMemoryPending, in_memory.InMemoryTransport
    with (
        patch.object(message, "_copy", quietly(message._copy)),
        patch.object(network, "post", quietly(network.post)),
    ):
        yield


def measure(plan: Plan, backend: str) -> list[Bytes]:
    """Return what each rank of a plan moves, forward and backward, in bf16."""
    a = plan.attention
    runner: Any = CudaFlashAttention("cpu", EmptyFlash())
    if backend == "npu":
        runner = NpuAttention(merge="triton", operator=EmptyFused())
    shapes = (a.heads, a.head_dim), (a.kv_heads, a.head_dim), (a.kv_heads, a.head_dim_v)
    counts = plan.layout.token_counts.tolist()
    leaves = [
        [torch.zeros(rows, *shape, dtype=torch.bfloat16, requires_grad=True) for rows in counts] for shape in shapes
    ]
    douts = [torch.zeros(rows, a.heads, a.head_dim_v, dtype=torch.bfloat16) for rows in counts]
    for _ in range(2):  # the first pass places row numbers on the device
        modes = [Bytes() for _ in range(plan.ranks)]
        with silent_network():
            outs = attend_all_ranks(*leaves, plan, runner, stepping=Stepping(lazy=True, around=modes.__getitem__))
            torch.autograd.grad(outs, [x for of_kind in leaves for x in of_kind], douts)
    return modes


def unit(plan: Plan) -> float:
    """Return the bytes that a perfect kernel touches of an equal share of the tokens, forward and backward, in bf16."""
    a = plan.attention
    q, out = a.heads * a.head_dim, a.heads * a.head_dim_v
    kv = a.kv_heads * (a.head_dim + a.head_dim_v)
    row = 2 * (q + kv + out) + 2 * (2 * q + 2 * kv + 2 * out) + 2 * 4 * a.heads
    return row * plan.documents.tokens / plan.ranks


def main() -> None:
    """Print a line for each algorithm and row."""
    parser = Arguments(__doc__)
    parser.add_argument("--backend", choices=("cuda", "npu"), default="cuda", help="whose calls; nothing runs there")
    parser.add_argument("--lengths", default="wikipedia", help="of the packed row; as `mindspeed-cp plan` takes them")
    parser.add_argument("--algorithms", default=ALGORITHMS)
    parser.add_argument("--ranks", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=16384)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--kv-heads", type=positive, default=8)
    parser.add_argument("--dim", type=positive, default=32)
    parser.add_argument("--operations", action="store_true", help="name what moves most")
    parser.add_argument("--json", type=new_file, metavar="FILE")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        attention = AttentionConfig(args.heads, args.kv_heads, args.dim)
        packed = draw_batches(args.lengths, args.tokens, 1, 0)[0].lengths.tolist()
        for title, lengths in (("one document", [args.tokens]), (f"packed, {args.lengths}", packed)):
            for algorithm in args.algorithms.split(","):
                plan = build_plan(Documents(lengths), Topology(1, args.ranks), attention, algorithm)
                counts = [mode.moved for mode in measure(plan, args.backend)]
                of_ranks = [sum(moved.values()) / unit(plan) for moved in counts]
                mean, worst = sum(of_ranks) / len(of_ranks), max(of_ranks)
                rows.append(dict(row=title, documents=len(lengths), algorithm=algorithm, mean=mean, worst=worst))
                line = (
                    f"{title:18} {len(lengths):4} documents  {algorithm:13} mean {mean:6.2f}  worst rank {worst:6.2f}"
                )
                if args.operations:
                    most = sum(counts, Counter()).most_common(6)
                    line += "  " + ", ".join(f"{name} {n / unit(plan) / args.ranks:.2f}" for name, n in most)
                print(line, flush=True)
    except ConfigError as error:
        parser.error(str(error))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
