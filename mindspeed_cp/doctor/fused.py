"""Check of the fused operators of torch-npu against torch's own operations in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.doctor.operator import DTYPES, MAX_DIFFERENCE
from mindspeed_cp.ops.fused import OPERATORS, missing_operators, npu, plain

Inputs = tuple[Tensor, ...]

#: Operator by its name, with the function that a module of operators has for it, and shapes of the inputs that get
#: gradients and of those that do not.
_LAYERS: tuple[
    tuple[str, Callable[[Any], Callable[..., Tensor]], Sequence[Sequence[int]], Sequence[Sequence[int]]], ...
]
_LAYERS = (
    ("rms_norm", lambda module: lambda x, weight: module.rms_norm(x, weight, 1e-5), ((37, 1, 192), (192,)), ()),
    ("rotary_mul", lambda module: module.rotary_mul, ((37, 6, 64),), ((37, 1, 32),)),
    ("swiglu", lambda module: module.swiglu, ((37, 1, 384),), ()),
)


def check_fused_operators(seed: int = 0) -> list[dict[str, Any]]:
    """Run each fused operator on the current NPU, forward and backward.

    Args:
        seed: seed of the random inputs.

    Returns:
        {"operator", "dtype", "difference", "limit", "error", "ok"} for each operator and type: the largest
        difference to fp64 of results and gradients, relative to max(1, largest value). An operator that torch-npu lacks
        is one row without a type; it is no error, as training goes without it.
    """
    missing = missing_operators()
    rows = [
        {
            "operator": operator,
            "dtype": "",
            "difference": None,
            "limit": None,
            "error": "not in this torch-npu",
            "ok": True,
        }
        for operator in missing.values()
    ]
    for name, function, differentiable, given in _LAYERS:
        if name not in missing:
            rows += [_row(OPERATORS[name], dtype, seed, _layer, function, differentiable, given) for dtype in DTYPES]
    if "adamw" not in missing:
        rows.append(_row(OPERATORS["adamw"], "fp32", seed, _adamw))
    return rows


def _row(operator: str, dtype: str, seed: int, differences: Callable[..., list[float]], *given: Any) -> dict[str, Any]:
    row = {"operator": operator, "dtype": dtype, "limit": MAX_DIFFERENCE[dtype]}
    try:
        largest = max(differences(DTYPES[dtype], torch.Generator().manual_seed(seed), *given))
    except Exception as error:  # whatever it is, the other operators must still run
        return {**row, "difference": None, "error": " ".join(str(error).split()), "ok": False}
    return {**row, "difference": largest, "error": None, "ok": largest <= MAX_DIFFERENCE[dtype]}


def _layer(
    dtype: torch.dtype,
    generator: torch.Generator,
    function: Callable[[Any], Callable[..., Tensor]],
    differentiable: Sequence[Sequence[int]],
    given: Sequence[Sequence[int]],
) -> list[float]:
    """Return the differences of the output and of each gradient; angles are given as their cos and sin."""
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in differentiable]
    angles = [torch.rand(shape, generator=generator).repeat(1, 1, 2) * 6 for shape in given]
    tables = [table(x).to(dtype) for x in angles for table in (torch.cos, torch.sin)]
    dout = torch.randn(function(plain)(*inputs, *tables).shape, generator=generator).to(dtype)

    def run(module: Any, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = [place(x).requires_grad_() for x in inputs]
        out = function(module)(*leaves, *map(place, tables))
        return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, place(dout)))]

    return _differences(run(npu, lambda x: x.to("npu")), run(plain, Tensor.double))


def _adamw(dtype: torch.dtype, generator: torch.Generator) -> list[float]:
    """Return the difference of weights after three steps."""
    start, *gradients = (torch.randn(1237, generator=generator) for _ in range(4))

    def run(place: Callable[[Tensor], Tensor], fused: bool) -> list[Tensor]:
        weight = torch.nn.Parameter(place(start))
        adam = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
        for gradient in gradients:
            weight.grad = place(gradient)
            adam.step()
        moments = [adam.state[weight][key] for key in ("exp_avg", "exp_avg_sq")]
        return [x.detach().cpu().double() for x in (weight, *moments)]

    return _differences(run(lambda x: x.to("npu", dtype), True), run(lambda x: x.double(), False))


def _differences(results: list[Tensor], references: list[Tensor]) -> list[float]:
    """Return the largest difference of each result, relative to max(1, largest value); NaN is infinite."""
    pairs = zip(results, references, strict=True)
    differences = [float((x - y).abs().max() / max(1.0, float(y.abs().max()))) for x, y in pairs]
    return [x if x == x else float("inf") for x in differences]
