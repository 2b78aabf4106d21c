"""The Triton kernels on one device: bandwidth of the copies beside the device's own, attention beside flash attention.

    python -m benchmarks.kernels [--device cuda] [--tokens 65536] [--heads 32] [--kv-heads 32] [--dim 128] [--repeat 20]
                                 [--bias-tokens 8192] [--only copies attention bias] [--json FILE]

Copies: bytes that must be read and written per second, relative to a plain copy in the same run. Attention: one causal
document of --tokens in bf16: flash attention of torch, and our tile kernel without and with ALiBi, forward, and forward
+ backward. Bias: ALiBi at --bias-tokens by our kernel, by a dense bias in torch's scaled_dot_product_attention, and by
torch's FlexAttention, with the memory of each; without grouped heads, whatever --kv-heads.

On a CPU (--device cpu) the torch implementations of the kernels run, only to test the program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.arguments import Arguments, new_file, positive
from benchmarks.timing import machine_name, peak_bytes, time_in_turn
from mindspeed_cp.ascend_kernels.merge import merge_parts
from mindspeed_cp.layout import TOKEN_SPAN, Documents
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, OutputAccumulator
from mindspeed_cp.ops.attention.backends import get_backend
from mindspeed_cp.ops.attention.contract import BackwardState, ForwardState, Heads
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import tiles_between


class AttentionWork:
    """Forward and backward of self-attention in bf16.

    Args:
        backend: attention backend.
        attention: configuration of the attention.
        documents: the packed batch.
        device: device of the tensors.
        calls: calls of the forward and of the backward; None: as the backend lowers them.

    Attributes:
        calls: calls of both directions; may be replaced.
        qkv: inputs.
    """

    def __init__(
        self,
        backend: Any,
        attention: AttentionConfig,
        documents: Documents,
        device: torch.device,
        calls: Sequence[Sequence[Any]] | None = None,
    ) -> None:
        self._backend, self._attention = backend, attention
        backend.check(attention, torch.bfloat16)
        if calls is None:
            tiles = document_tiles(documents, attention)
            calls = [
                backend.lower(direction, tiles, documents.tokens, attention, torch.bfloat16)[0, 0]
                for direction in ("forward", "backward")
            ]
        self.calls = list(calls)
        heads = Heads.all(attention)
        for calls_of_direction in self.calls:
            backend.prepare(calls_of_direction, attention, heads, device)
        shapes = [(documents.tokens, n, attention.head_dim) for n in (attention.heads, *[attention.kv_heads] * 2)]
        self.qkv = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
        dout = torch.randn(shapes[0], device=device, dtype=torch.bfloat16)
        self._dout, self._heads, self._key = dout, heads, (0, 0) if attention.dropout else None
        self.forward()

    def forward(self) -> None:
        """Run the forward."""
        q, k, v = self.qkv
        self._forward_state = ForwardState(q, OutputAccumulator(q, v.shape[-1]), self._heads, self._key)
        self._backend.forward(self.calls[0], self._attention, self._forward_state, k, v)

    def backward(self) -> None:
        """Run the backward, and round the gradients."""
        q, k, v = self.qkv
        out, lse = self._forward_state.output.result(q.dtype)
        dq, dk, dv = (GradientAccumulator(x) for x in self.qkv)
        saved = self._forward_state.saved
        state = BackwardState(q, out, lse, self._dout, dq, self._heads, self._key, saved)
        self._backend.backward(self.calls[1], self._attention, state, k, v, dk, dv)
        for gradient in (dq, dk, dv):
            gradient.result(q.dtype)

    def both(self) -> None:
        """Run the forward, round its output, and run the backward."""
        self.forward()
        self.backward()


def document_tiles(documents: Documents, attention: AttentionConfig) -> np.ndarray:
    """Return the tiles of self-attention over whole documents, none of which is empty."""
    spans = np.zeros(len(documents), TOKEN_SPAN)
    spans["doc"], spans["start"] = np.arange(len(documents)), documents.offsets[:-1]
    spans["stop"] = documents.offsets[1:]
    return tiles_between(spans, spans, documents, attention)


def copies(shape: tuple[int, int, int], device: torch.device, repeat: int) -> list[dict[str, Any]]:
    """Return times and rates of merges on tensors of this shape, beside a copy."""
    x, target = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    out, lse = torch.zeros(shape, device=device), torch.zeros(shape[:2], device=device)
    parts, part_lse = (
        torch.randn(2, *shape, device=device, dtype=torch.bfloat16),
        torch.randn(2, *shape[:2], device=device),
    )

    def merge(count: int) -> None:
        runs: list[Any] = [None] * count, [0] * count
        merge_parts((out, lse), list(parts[:count]), list(part_lse[:count]), *runs, (out, lse))

    each, statistic = x.numel() * x.element_size(), lse.numel() * 4
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * each, lambda: target.copy_(x)),
        "merge, 1 part": (
            2 * 4 * out.numel() + each + 3 * statistic, lambda: merge(1)
        ),
        "merge, 2 parts": (
            2 * 4 * out.numel() + 2 * each + 4 * statistic, lambda: merge(2)
        ),
    }  # fmt: skip
    times = time_in_turn({name: run for name, (_, run) in cases.items()}, device, repeat)
    speed = {name: cases[name][0] / times[name] / 1e6 for name in cases}
    return [
        {"what": name, "ms": times[name], "gigabytes_per_second": speed[name], "of_copy": speed[name] / speed["copy"]}
        for name in cases
    ]


def attention(config: AttentionConfig, tokens: int, device: torch.device, repeat: int) -> list[dict[str, Any]]:
    """Time one causal document: flash attention of torch, and our kernel without and with ALiBi."""
    documents = Documents([tokens])
    biased = AttentionConfig(config.heads, config.kv_heads, config.head_dim, alibi=True)
    flash: Any = CudaAttention("flash") if device.type == "cuda" else get_backend("cpu")
    works = {
        "flash attention, causal": AttentionWork(flash, config, documents, device),
        "ours, causal": AttentionWork(CudaAttention("tiles"), config, documents, device),
        "ours, causal, ALiBi": AttentionWork(CudaAttention("tiles"), biased, documents, device),
    }
    forward_flops = 4 * tokens * tokens / 2 * config.heads * config.head_dim  # the backward has 2.5 times as many
    rows = []
    for direction, factor in (("forward", 1.0), ("both", 3.5)):
        times = time_in_turn({name: getattr(work, direction) for name, work in works.items()}, device, repeat)
        base = times["flash attention, causal"]
        rows += [
            {
                "what": name,
                "direction": direction,
                "ms": ms,
                "teraflops": factor * forward_flops / ms / 1e9,
                "of_flash": base / ms,
            }
            for name, ms in times.items()
        ]
    return rows


def bias(config: AttentionConfig, tokens: int, device: torch.device, repeat: int) -> list[dict[str, Any]]:
    """Time ALiBi, with as many kv heads as heads, by three implementations, forward and backward. "held" are the bytes
    that an implementation keeps between calls: the matrix, or our accumulators in fp32; "bytes" is the peak of a
    call beside them."""
    biased = AttentionConfig(config.heads, config.heads, config.head_dim, alibi=True)
    ours = AttentionWork(CudaAttention("tiles"), biased, Documents([tokens]), device)
    leaves = [x.transpose(0, 1)[None].detach().clone().requires_grad_() for x in ours.qkv]
    dout = leaves[0].detach()
    assert biased.slopes is not None
    slopes = torch.from_numpy(biased.slopes.astype(np.float32)).to(device)
    i = torch.arange(tokens, device=device)
    matrix = torch.empty(1, biased.heads, tokens, tokens, dtype=torch.bfloat16, device=device)
    for head, slope in enumerate(slopes):  # head by head: fp32 for all would be twice the matrix
        matrix[0, head] = (slope * (i - i[:, None])).masked_fill(i > i[:, None], -torch.inf)

    def dense() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=matrix)
        torch.autograd.grad(out, leaves, dout)

    runs: dict[str, Callable[[], object]] = {"ours": ours.both, "scaled_dot_product_attention, dense bias": dense}
    if device.type == "cuda":
        runs["FlexAttention"] = flex(leaves, dout, slopes, tokens)
    held = dict.fromkeys(runs, 0)
    held["scaled_dot_product_attention, dense bias"] = 2 * matrix.numel()
    times = time_in_turn(runs, device, repeat)
    return [
        {"what": name, "ms": times[name], "held": held[name], "bytes": peak_bytes(run, device)}
        for name, run in runs.items()
    ]


def flex(leaves: list[Tensor], dout: Tensor, slopes: Tensor, tokens: int) -> Callable[[], object]:
    """Return a call of FlexAttention, compiled, with the bias computed from positions."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=str(dout.device))
    compiled = torch.compile(flex_attention)

    def biased(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return x - slopes[h] * (i - j)

    def run() -> None:
        out = compiled(*leaves, score_mod=biased, block_mask=mask)
        torch.autograd.grad(out, leaves, dout)

    return run


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=positive, default=65536)
    parser.add_argument("--heads", type=positive, default=32)
    parser.add_argument("--kv-heads", type=positive, default=32)
    parser.add_argument("--dim", type=positive, default=128)
    parser.add_argument("--bias-tokens", type=positive, default=8192)
    parser.add_argument("--repeat", type=positive, default=20)
    parser.add_argument(
        "--only", nargs="+", choices=("copies", "attention", "bias"), default=("copies", "attention", "bias")
    )
    parser.add_argument("--json", type=new_file, help="write all figures there")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device; valid here: --device cpu, which times torch and no kernel")
    device = torch.device(args.device)
    config = AttentionConfig(args.heads, args.kv_heads, args.dim)
    figures: dict[str, Any] = {"machine": machine_name(device)}
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
            peak = "" if row["bytes"] is None else f", {row['bytes'] / 2**20:,.0f} MiB in a call"
            print(
                f"ALiBi, {args.bias_tokens} tokens: {row['what']:42} {row['ms']:9.2f} ms, "
                f"{row['held'] / 2**20:,.0f} MiB held{peak}"
            )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
