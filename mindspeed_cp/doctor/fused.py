"""Check of the fused operators of torch-npu against torch's own operations in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.doctor.operator import DTYPES, MAX_DIFFERENCE
from mindspeed_cp.doctor.reference import relative_difference
from mindspeed_cp.ops.fused import OPERATORS, missing_operators, npu, plain

_MISSING = "not in this torch-npu"

#: Of each operator: the call, given the module that has it, and shapes of the inputs that get gradients.
_LAYERS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (lambda module, cos, sin, x, weight: module.rms_norm(x, weight, 1e-5), ((37, 1, 192), (192,))),
    "rotary_mul": (lambda module, cos, sin, x: module.rotary_mul(x, cos, sin), ((37, 6, 64),)),
    "swiglu": (lambda module, cos, sin, x: module.swiglu(x), ((37, 1, 384),)),
}


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
    rows: list[dict[str, Any]] = []
    for operator in missing.values():
        rows.append(
            {"operator": operator, "dtype": "", "difference": None, "limit": None, "error": _MISSING, "ok": True}
        )
    runs = [(name, dtype, _layer) for name in _LAYERS for dtype in DTYPES] + [("adamw", "fp32", _adamw)]
    for name, dtype, results in runs:
        if name in missing:
            continue
        row: dict[str, Any] = {"operator": OPERATORS[name], "dtype": dtype, "limit": MAX_DIFFERENCE[dtype]}
        try:
            computed = results(name, npu, torch.Generator().manual_seed(seed), DTYPES[dtype])
            exact = results(name, plain, torch.Generator().manual_seed(seed), DTYPES[dtype])
            largest = max(relative_difference(x, y) for x, y in zip(computed, exact, strict=True))
        except Exception as error:  # whatever it is, the other operators must still run
            rows.append({**row, "difference": None, "error": " ".join(str(error).split()), "ok": False})
            continue
        rows.append({**row, "difference": largest, "error": None, "ok": largest <= MAX_DIFFERENCE[dtype]})
    return rows


def _place(x: Tensor, module: Any, dtype: torch.dtype) -> Tensor:
    """Return inputs for a module: of the type on the NPU, or the same numbers in fp64."""
    x = x.to(dtype)
    return x.to("npu") if module is npu else x.double()


def _layer(name: str, module: Any, generator: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
    """Return output and gradients, on the host."""
    function, shapes = _LAYERS[name]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    angles = random(37, 1, 32).repeat(1, 1, 2) * 6
    cos, sin = (_place(table(angles), module, dtype) for table in (torch.cos, torch.sin))
    leaves = [_place(random(*shape), module, dtype).requires_grad_() for shape in shapes]
    out = function(module, cos, sin, *leaves)
    gradients = torch.autograd.grad(out, leaves, _place(random(*out.shape), module, dtype))
    return [x.detach().cpu() for x in (out, *gradients)]


def _adamw(name: str, module: Any, generator: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
    """Return a weight and its moments after three steps."""
    start, *gradients = (torch.randn(1237, generator=generator) for _ in range(4))
    weight = torch.nn.Parameter(_place(start, module, dtype))
    adam = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=module is npu)
    for gradient in gradients:
        weight.grad = _place(gradient, module, dtype)
        adam.step()
    return [x.detach().cpu() for x in (weight, *(adam.state[weight][key] for key in ("exp_avg", "exp_avg_sq")))]
