"""The Triton kernels on one device: bandwidth of the copies beside the device's own, attention beside flash attention.

    python -m benchmarks.kernels [--device cuda] [--tokens 65536] [--heads 32] [--kv-heads 32] [--dim 128] [--repeat 20]
                                 [--bias-tokens 8192] [--only copies attention bias] [--json FILE]

Copies: bytes that must be read and written, over the time, as a share of a plain copy of as many bytes in the same run.
Attention: one causal document of --tokens in bf16: flash attention of torch, and our kernel of tiles without and with
ALiBi, each forward and forward + backward. Bias: ALiBi at --bias-tokens through our kernel, through a dense bias in
torch's scaled_dot_product_attention, and through torch's FlexAttention, with the memory that each takes; no head is
shared there, whatever --kv-heads.

On a CPU (--device cpu) the kernels' torch implementations run: only to see that the program works.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.arguments import Arguments
from benchmarks.clock import in_turn, machine, peak_bytes
from mindspeed_cp.ascend_kernels.merge import merge_parts_
from mindspeed_cp.ascend_kernels.rope import rope_gather
from mindspeed_cp.ascend_kernels.spans import Runs, gather_spans, scatter_spans
from mindspeed_cp.layout import SPAN, Documents
from mindspeed_cp.ops.attention import BackwardState, ForwardState, Heads, backend_named
from mindspeed_cp.ops.attention.cuda import CudaAttention
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import tiles_between


def copies(shape: tuple[int, int, int], device: torch.device, repeat: int) -> list[dict[str, Any]]:
    """Figures of merge, gather, scatter and rope on q, k and v of this shape."""
    tokens, _, dim = shape
    q, k, v, *to = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(6))
    out, lse = torch.zeros(shape, device=device), torch.zeros(shape[:2], device=device)
    parts, part_lse = (
        torch.randn(2, *shape, device=device, dtype=torch.bfloat16),
        torch.randn(2, *shape[:2], device=device),
    )
    lengths = np.random.default_rng(1).integers(20, 2000, size=max(1, tokens // 1000))
    lengths = np.append(lengths[np.cumsum(lengths) < tokens], 0)
    lengths[-1] = tokens - lengths.sum()
    offsets = np.cumsum(lengths) - lengths
    order = np.random.default_rng(2).permutation(len(lengths))
    targets = np.zeros(len(lengths), np.int64)
    targets[order] = np.cumsum(lengths[order]) - lengths[order]
    runs = Runs.of(offsets, targets, lengths, device)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    shuffled = torch.randperm(tokens, device=device, dtype=torch.int32)
    frequencies = 10_000.0 ** -torch.linspace(0, 1, dim // 2, device=device)
    each, statistic = q.numel() * q.element_size(), lse.numel() * 4
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * each, lambda: to[0].copy_(q)),
        "merge, 1 part": (
            2 * 4 * out.numel() + each + 3 * statistic, lambda: merge_parts_(out, lse, parts[:1], part_lse[:1])
        ),
        "merge, 2 parts": (
            2 * 4 * out.numel() + 2 * each + 4 * statistic, lambda: merge_parts_(out, lse, parts, part_lse)
        ),
        "gather, one tensor": (2 * each, lambda: gather_spans([q], to[:1], runs)),
        "gather, two tensors": (4 * each, lambda: gather_spans([q, k], to[:2], runs)),
        "gather, three tensors": (6 * each, lambda: gather_spans([q, k, v], to, runs)),
        "scatter, one tensor": (2 * each, lambda: scatter_spans([q], to[:1], runs)),
        "scatter, added in fp32": (each + 2 * 4 * out.numel(), lambda: scatter_spans([q], [out], runs, add=True)),
        "rope with gather": (2 * each + 8 * tokens, lambda: rope_gather(q, positions, frequencies, shuffled)),
    }  # fmt: skip
    times = in_turn({name: run for name, (_, run) in cases.items()}, device, repeat)
    speed = {name: cases[name][0] / times[name] / 1e6 for name in cases}
    return [
        {"what": name, "ms": times[name], "gigabytes_per_second": speed[name], "of_copy": speed[name] / speed["copy"]}
        for name in cases
    ]


class Work:
    """Forward and backward of causal attention over one document by a backend."""

    def __init__(self, backend: Any, attention: AttentionConfig, tokens: int, device: torch.device) -> None:
        documents = Documents([tokens])
        span = np.zeros(1, SPAN)
        span["stop"] = tokens
        tiles = tiles_between(span, span, documents, attention)
        self.backend, self.attention = backend, attention
        dtype = torch.bfloat16
        backend.check(attention, dtype)
        self.calls = [
            lower(tiles, tokens, attention, dtype)[0, 0] for lower in (backend.lower_forward, backend.lower_backward)
        ]
        shapes = [(tokens, n, attention.head_dim) for n in (attention.heads, attention.kv_heads, attention.kv_heads)]
        self.q, self.k, self.v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        self.out = torch.zeros(shapes[0], device=device)
        self.lse = torch.empty(shapes[0][:2], device=device)
        self.grads = [torch.zeros(shape, device=device) for shape in shapes]
        for calls in self.calls:
            backend.place(calls, attention, Heads.all(attention), device)

    def forward(self) -> None:
        """Fills out and lse."""
        self.lse.fill_(-torch.inf)
        state = ForwardState(self.q, self.out, self.lse, Heads.all(self.attention))
        self.backend.forward(self.calls[0], self.attention, state, self.k, self.v)

    def both(self) -> None:
        """And the gradients."""
        self.forward()
        out = self.out.to(self.q.dtype)
        state = BackwardState(self.q, out, self.lse, out, self.grads[0], Heads.all(self.attention))
        self.backend.backward(self.calls[1], self.attention, state, self.k, self.v, *self.grads[1:])


def attention(config: AttentionConfig, tokens: int, device: torch.device, repeat: int) -> list[dict[str, Any]]:
    """One causal document: flash attention of torch, and our kernel without and with ALiBi."""
    biased = AttentionConfig(config.heads, config.kv_heads, config.head_dim, alibi=True)
    flash: Any = CudaAttention("flash") if device.type == "cuda" else backend_named("cpu")
    works = {
        "flash attention, causal": Work(flash, config, tokens, device),
        "ours, causal": Work(CudaAttention("tiles"), config, tokens, device),
        "ours, causal, ALiBi": Work(CudaAttention("tiles"), biased, tokens, device),
    }
    work = (
        4 * tokens * tokens / 2 * config.heads * config.head_dim
    )  # of the forward; the backward has 2.5 times as much
    rows = []
    for direction, share in (("forward", 1.0), ("both", 3.5)):
        times = in_turn({name: getattr(one, direction) for name, one in works.items()}, device, repeat)
        base = times["flash attention, causal"]
        rows += [
            {
                "what": name,
                "direction": direction,
                "ms": ms,
                "teraflops": share * work / ms / 1e9,
                "of_flash": base / ms,
            }
            for name, ms in times.items()
        ]
    return rows


def bias(config: AttentionConfig, tokens: int, device: torch.device, repeat: int) -> list[dict[str, Any]]:
    """ALiBi of heads without groups by three routes, forward and backward. "held" is what a route keeps from call to
    call: the matrix, or ours' accumulators in fp32; "bytes" the most that a call takes beside."""
    biased = AttentionConfig(config.heads, config.heads, config.head_dim, alibi=True)
    ours = Work(CudaAttention("tiles"), biased, tokens, device)
    leaves = [x.transpose(0, 1)[None].detach().clone().requires_grad_() for x in (ours.q, ours.k, ours.v)]
    dout = leaves[0].detach()
    assert biased.slopes is not None
    slopes = torch.from_numpy(biased.slopes.astype(np.float32)).to(device)
    i = torch.arange(tokens, device=device)
    matrix = torch.empty(1, biased.heads, tokens, tokens, dtype=torch.bfloat16, device=device)
    for head, slope in enumerate(slopes):  # one after the other: fp32 for all would be twice the matrix
        matrix[0, head] = (slope * (i - i[:, None])).masked_fill(i > i[:, None], -torch.inf)

    def dense() -> None:
        found = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=matrix)
        torch.autograd.grad(found, leaves, dout)

    runs: dict[str, Callable[[], object]] = {"ours": ours.both, "scaled_dot_product_attention, dense bias": dense}
    if device.type == "cuda":
        runs["FlexAttention"] = flex(leaves, dout, slopes, tokens)
    held = {"ours": sum(4 * x.numel() for x in (ours.out, ours.lse, *ours.grads)), **dict.fromkeys([*runs][1:], 0)}
    held["scaled_dot_product_attention, dense bias"] = 2 * matrix.numel()
    times = in_turn(runs, device, repeat)
    return [
        {"what": name, "ms": times[name], "held": held[name], "bytes": peak_bytes(run, device)}
        for name, run in runs.items()
    ]


def flex(leaves: list[Tensor], dout: Tensor, slopes: Tensor, tokens: int) -> Callable[[], object]:
    """FlexAttention, compiled, with the bias from positions."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=str(dout.device))
    compiled = torch.compile(flex_attention)

    def biased(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return x - slopes[h] * (i - j)

    def run() -> None:
        found = compiled(*leaves, score_mod=biased, block_mask=seen)
        torch.autograd.grad(found, leaves, dout)

    return run


def main() -> None:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--bias-tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument(
        "--only", nargs="+", choices=("copies", "attention", "bias"), default=("copies", "attention", "bias")
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device; valid here: --device cpu, which times torch and no kernel")
    device = torch.device(args.device)
    config = AttentionConfig(args.heads, args.kv_heads, args.dim)
    figures: dict[str, Any] = {"machine": machine(device)}
    print(figures["machine"] + ("" if device.type == "cuda" else ": the torch implementations, no Triton kernel"))
    if "copies" in args.only:
        figures["copies"] = copies((args.tokens, args.heads, args.dim), device, args.repeat)
        for row in figures["copies"]:
            print(
                f"{row['what']:24} {row['ms']:9.3f} ms {row['gigabytes_per_second']:8.0f} GB/s, "
                f"{row['of_copy']:.2f} of a copy"
            )
    if "attention" in args.only:
        figures["attention"] = attention(config, args.tokens, device, args.repeat)
        for row in figures["attention"]:
            print(
                f"{row['what']:24} {row['direction']:8} {row['ms']:9.2f} ms {row['teraflops']:7.1f} TFLOP/s, "
                f"{row['of_flash']:.2f} of flash attention"
            )
    if "bias" in args.only:
        figures["bias"] = bias(config, args.bias_tokens, device, args.repeat)
        for row in figures["bias"]:
            beside = "" if row["bytes"] is None else f", {row['bytes'] / 2**20:,.0f} MiB in a call"
            print(
                f"ALiBi, {args.bias_tokens} tokens: {row['what']:42} {row['ms']:9.2f} ms, "
                f"{row['held'] / 2**20:,.0f} MiB held{beside}"
            )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
