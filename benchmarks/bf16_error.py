"""Error of attention in bf16 on several ranks, relative to that on one rank.

    python -m benchmarks.bf16_error [--ranks 2 8 16] [--tokens 2000] [--algorithms ring direct] [--masks causal full]
        [--seeds 2] [--backend cpu|cuda|npu|npu-fp16|npu-fp32] [--kernel auto|flash|tiles] [--round-weights]
        [--reduce-dtype float32|bfloat16]

The inputs are random and rounded to bf16; the reference is dense attention in fp64 of the same inputs. A figure is the
L2 error over that of one rank, for out, dq, dk and dv: root mean squares over the seeds. 1.00 means that the ranks add
nothing to the rounding of the inputs of each product and of the result. All ranks run in this process, on one device.

--backend cpu computes in fp32.

--backend npu runs the npu backend over the tests' stand-in for CANN's operators, whose arithmetic is in fp32 and which
rounds the result of each call. With --round-weights it also rounds weights and gradients of scores to the type of the
call, on one rank as on many, as CANN's public kernels do. npu-fp16, npu-fp32: the same with this npu_precision.
--backend cuda needs a GPU; --kernel is its kernel (docs/gpu.md).

The last lines are two tables: the largest figure of each mask and algorithm, and the range of each result.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.ops.attention.cuda.backend import KERNELS, CudaAttention
from mindspeed_cp.ops.attention.reference import dense_packed_attention
from mindspeed_cp.plan.program import REDUCE_BYTES
from tests.engine.all_ranks import attend_all_ranks

NAMES = ("out", "dq", "dk", "dv")
_CPU = torch.device("cpu")

_WIDTHS = {"head_dim": 32, "head_dim_v": 32}
#: Masks and features by name.
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"heads": 4, "kv_heads": 4, **_WIDTHS},
    "full": {"heads": 4, "kv_heads": 4, "mask": "full", **_WIDTHS},
    "window": {"heads": 4, "kv_heads": 4, "window": (299, 0), **_WIDTHS},
    "full window": {"heads": 4, "kv_heads": 4, "mask": "full", "window": (150, 150), **_WIDTHS},
    "ALiBi": {"heads": 4, "kv_heads": 4, "alibi": True, **_WIDTHS},
    "GQA": {"heads": 8, "kv_heads": 2, **_WIDTHS},
    "MLA": {"heads": 4, "kv_heads": 4, "head_dim": 48, "head_dim_v": 32},
    "dropout": {"heads": 4, "kv_heads": 4, "dropout": 0.1, **_WIDTHS},
}


#: Errors of NAMES over those of one rank, by mask, algorithm and number of ranks: one array for each kind of row.
Ratios = Mapping[tuple[str, str, int], Sequence[np.ndarray]]


def lengths_of(tokens: int) -> dict[str, tuple[int, ...]]:
    """Return lengths of documents: one document, and a packed row of the same number of tokens."""
    packed = (tokens // 2, tokens // 5, 3, 0, tokens // 8)
    return {"one document": (tokens,), "packed": (*packed, tokens - sum(packed))}


def draw_inputs(attention: AttentionConfig, tokens: int, seed: int) -> list[torch.Tensor]:
    """Return q, k, v and dout in bf16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (attention.heads, attention.head_dim),
        (attention.kv_heads, attention.head_dim),
        (attention.kv_heads, attention.head_dim_v),
        (attention.heads, attention.head_dim_v),
    )
    return [torch.randn(tokens, *shape, generator=generator).bfloat16() for shape in shapes]


def exact(attention: AttentionConfig, documents: Documents, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return out, dq, dk and dv in fp64."""
    q, k, v, dout = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    key = (11, 3) if attention.dropout else None
    out, _ = dense_packed_attention(attention, *leaves, documents, dropout_key=key)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def planned(
    attention: AttentionConfig, documents: Documents, inputs: Sequence[torch.Tensor], algorithm: str, ranks: int,
    backend: Any = None, **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Return out, dq, dk and dv of all ranks, in the order of tokens."""
    nodes = 2 if algorithm in ("double_ring", "hierarchical") and ranks % 2 == 0 else 1
    plan = build_plan(documents, Topology(nodes, ranks // nodes), attention, algorithm, **options)
    layouts = (plan.layout, plan.kv_layout_in, plan.kv_layout_in, plan.layout)
    q, k, v, dout = (
        [layout.shard(x, rank) for rank in range(ranks)] for layout, x in zip(layouts, inputs, strict=True)
    )
    leaves = [[x.requires_grad_() for x in of_ranks] for of_ranks in (q, k, v)]
    key = (11, 3) if attention.dropout else None
    out = attend_all_ranks(*leaves, plan, backend=backend, dropout_key=key)
    gradients = torch.autograd.grad(out, [x for of_ranks in leaves for x in of_ranks], dout)
    results = [[out[rank].detach(), *gradients[rank::ranks]] for rank in range(ranks)]
    layouts = (plan.layout, plan.layout, plan.kv_layout_in, plan.kv_layout_in)
    return [layout.unshard([result[i] for result in results]) for i, layout in enumerate(layouts)]


def l2_errors(
    attention: AttentionConfig, lengths: Sequence[int], algorithms: Sequence[str], ranks: Sequence[int], seeds: int,
    backend: Any = None, device: torch.device = _CPU, **options: Any,
) -> dict[tuple[str, int], np.ndarray]:  # fmt: skip
    """Return the relative L2 errors of out, dq, dk and dv by algorithm and number of ranks, 1 among them; options: of
    build_plan."""
    documents = Documents(list(lengths))
    squares: dict[tuple[str, int], list[list[float]]] = {}
    for seed in range(seeds):
        inputs = [x.to(device) for x in draw_inputs(attention, documents.tokens, seed)]
        wanted = exact(attention, documents, inputs)
        for algorithm in algorithms:
            for count in (1, *ranks):
                results = planned(attention, documents, inputs, algorithm, count, backend, **options)
                errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(results, wanted, strict=True)]
                squares.setdefault((algorithm, count), []).append([error**2 for error in errors])
    return {key: np.sqrt(np.mean(values, axis=0)) for key, values in squares.items()}


def table_of_algorithms(ratios: Ratios, ranks: Sequence[int]) -> list[str]:
    """Return a Markdown table of masks x algorithms: the largest ratio of all results and kinds of rows at each of
    `ranks`."""
    algorithms = list(dict.fromkeys(algorithm for _, algorithm, _ in ratios))
    lines = [
        f"| mask or feature | {' | '.join(f'`{name}`' for name in algorithms)} |",
        "|---" * (len(algorithms) + 1) + "|",
    ]
    for mask in dict.fromkeys(mask for mask, *_ in ratios):
        cells = [
            " / ".join(f"{max(x.max() for x in ratios[mask, algorithm, count]):.2f}" for count in ranks)
            for algorithm in algorithms
        ]
        lines.append(f"| {mask} | {' | '.join(cells)} |")
    return lines


def table_of_results(ratios: Ratios, ranks: Sequence[int]) -> list[str]:
    """Return a Markdown table of masks x results: smallest and largest ratio of all algorithms and kinds of rows at
    `ranks`."""
    lines = [f"| mask or feature | {' | '.join(NAMES)} |", "|---" * (len(NAMES) + 1) + "|"]
    for mask in dict.fromkeys(mask for mask, *_ in ratios):
        rows = [x for (name, _, count), values in ratios.items() if name == mask and count in ranks for x in values]
        smallest, largest = np.min(rows, axis=0), np.max(rows, axis=0)
        cells = [f"{low:.2f} to {high:.2f}" for low, high in zip(smallest, largest, strict=True)]
        lines.append(f"| {mask} | {' | '.join(cells)} |")
    return lines


def make_backend(name: str, round_weights: bool, kernel: str | None) -> Any:
    """Return the backend of arguments of the command line; None: that of the CPU."""
    if name == "cpu":
        return None
    if name == "cuda":
        return CudaAttention(kernel or "auto")
    from mindspeed_cp.ops.attention.npu.backend import NpuAttention
    from tests.host_cann import oracle_math
    from tests.ops.npu_oracle import OracleOperator

    oracle_math.rounds_weights = round_weights

    return NpuAttention(precision=name[4:] or "input", operator=OracleOperator())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--backend", choices=("cpu", "cuda", "npu", "npu-fp16", "npu-fp32"), default="cpu")
    parser.add_argument("--kernel", choices=KERNELS, help="cuda: of CudaAttention (auto)")
    parser.add_argument(
        "--round-weights", action="store_true", help="npu: round operands of second products, as devices do"
    )
    parser.add_argument("--reduce-dtype", choices=REDUCE_BYTES, default="float32", help="of gradients that travel")
    arguments = parser.parse_args()
    options = {"reduce_dtype": arguments.reduce_dtype}
    if arguments.round_weights and not arguments.backend.startswith("npu"):
        parser.error("--round-weights is of the npu backends; valid: with --backend npu, npu-fp16 or npu-fp32")
    if arguments.kernel and arguments.backend != "cuda":
        parser.error("--kernel is of the cuda backend; valid: with --backend cuda")
    backend = make_backend(arguments.backend, arguments.round_weights, arguments.kernel)
    device = torch.device("cuda" if arguments.backend == "cuda" else "cpu")
    ratios: dict[tuple[str, str, int], list[np.ndarray]] = {}
    masks = [name for name in arguments.masks if backend is None or name != "dropout"]  # a device draws its own
    for name in masks:
        attention = AttentionConfig(**MASKS[name])
        for kind, lengths in lengths_of(arguments.tokens).items():
            errors = l2_errors(
                attention, lengths, arguments.algorithms, arguments.ranks, arguments.seeds, backend, device, **options
            )
            for algorithm in arguments.algorithms:
                alone = errors[algorithm, 1]
                cells = []
                for count in arguments.ranks:
                    ratios.setdefault((name, algorithm, count), []).append(errors[algorithm, count] / alone)
                    cells.append(f"cp {count}: " + " ".join(f"{x:.2f}" for x in ratios[name, algorithm, count][-1]))
                alone_text = " ".join(f"{x * 1e3:.2f}" for x in alone)
                print(f"{name:12} {kind:13} {algorithm:13} cp 1: {alone_text} e-3   " + "   ".join(cells), flush=True)
    print(f"largest ratio: {max(float(x.max()) for values in ratios.values() for x in values):.3f}")
    above = [count for count in arguments.ranks if count >= 8] or arguments.ranks
    print("", *table_of_algorithms(ratios, arguments.ranks), "", *table_of_results(ratios, above), sep="\n")


if __name__ == "__main__":
    main()
