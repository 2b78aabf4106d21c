"""The fused operators of a layer and of the optimizer: what they refuse and what they compute.

Formulas and rules are those of the vendor's documentation: of npu_rms_norm, npu_rotary_mul and npu_swiglu in the package
itself, and of aclnnRmsNorm(Grad), aclnnRotaryPositionEmbedding(Grad), aclnnSwiGlu(Grad) and aclnnApplyAdamWV2, for Atlas A2
and A3. Results are computed in fp32 and rounded once, to the type of the output; AdamW is computed in the type of the
weights, by the order of operations in CANN's public kernel. That step counts the steps before this one is not in the
documentation, but in that kernel, which adds one, and in torch_npu, which subtracts one.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tests.host_cann.cann_rule import need

TYPES = (torch.float16, torch.bfloat16, torch.float32)

WIDEST_ROTATION = 896  # D is below
MOST_ROTATED = 1000  # B and N are below
MODES = {"half": 0, "interleave": 1}

#: Calls that were computed, by the operator's name, for tests.
calls: collections.Counter[str] = collections.Counter()


class Question(Protocol):
    """What is asked of an operator (oracle_abi.Asked)."""

    arguments: Mapping[str, Any]
    compute: bool

    def __getitem__(self, name: str) -> Any: ...

    def take(self, name: str) -> Tensor | None: ...

    def give(self, /, **results: Tensor) -> None: ...


def _taken(asked: Question, *names: str) -> list[Tensor]:
    tensors = [asked.take(name) for name in names]
    need(all(x is not None for x in tensors), f"{', '.join(names)} are needed")
    return [x for x in tensors if x is not None]


def _whole(asked: Question, names: Sequence[str]) -> None:
    """Neither empty nor with gaps; strides are looked at where they are told, in the description."""
    for name in names:
        shape, stride = asked[name]["shape"], asked[name]["stride"]
        need(0 not in shape, f"{name} is empty")
        dense = [int(torch.Size(shape[i + 1 :]).numel()) for i in range(len(shape))]
        is_dense = all(n == 1 or step == other for n, step, other in zip(shape, stride, dense, strict=True))
        need(is_dense, f"{name} must be contiguous, and has shape {shape} and strides {stride}")


def _one_type(x: Tensor, *others: Tensor) -> None:
    need(x.dtype in TYPES, f"{x.dtype}: must be float16, bfloat16 or float32")
    need(all(y.dtype == x.dtype for y in others), f"types {[str(y.dtype) for y in (x, *others)]} must be equal")


# --- RMSNorm


def _norm_rules(asked: Question, x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    """The dimensions over which the norm is taken."""
    need(x.dtype in TYPES and gamma.dtype in (x.dtype, torch.float32), f"types {x.dtype} and {gamma.dtype}")
    need(0 < gamma.dim() < x.dim() <= 8, f"shapes {list(x.shape)} and {list(gamma.shape)}")
    need(x.shape[-gamma.dim() :] == gamma.shape, f"gamma {list(gamma.shape)} must be the end of {list(x.shape)}")
    return tuple(range(x.dim() - gamma.dim(), x.dim()))


def rms_norm(asked: Question) -> None:
    """aclnnRmsNorm."""
    x, gamma = _taken(asked, "self", "gamma")
    _whole(asked, ("self", "gamma"))
    dims = _norm_rules(asked, x, gamma)
    need(asked["epsilon"] >= 0, f"epsilon is {asked['epsilon']}")
    if not asked.compute:
        return
    calls["aclnnRmsNorm"] += 1
    rstd = (x.float().square().mean(dims, keepdim=True) + asked["epsilon"]).rsqrt()
    asked.give(y=x.float() * rstd * gamma.float(), rstd=rstd)


def rms_norm_grad(asked: Question) -> None:
    """aclnnRmsNormGrad."""
    dy, x, rstd, gamma = _taken(asked, "dy", "self", "rstd", "gamma")
    _whole(asked, ("dy", "self", "rstd", "gamma"))
    dims = _norm_rules(asked, x, gamma)
    need(dy.shape == x.shape and dy.dtype == x.dtype, f"dy is {list(dy.shape)} {dy.dtype}, x {list(x.shape)} {x.dtype}")
    need(
        rstd.dtype == torch.float32 and rstd.numel() * gamma.numel() == x.numel(), f"rstd is {rstd.shape} {rstd.dtype}"
    )
    need(asked["dgamma"]["type"] == 0, "dgamma must be float32")
    if not asked.compute:
        return
    calls["aclnnRmsNormGrad"] += 1
    normal = x.float() * rstd.view(*x.shape[: dims[0]], *[1] * gamma.dim())
    scaled = dy.float() * gamma.float()
    mean = (scaled * normal).mean(dims, keepdim=True)
    dx = (scaled - normal * mean) * rstd.view(*x.shape[: dims[0]], *[1] * gamma.dim())
    asked.give(dx=dx, dgamma=(dy.float() * normal).sum(tuple(range(dims[0]))))


# --- SwiGLU


def _swiglu_rules(asked: Question, x: Tensor) -> int:
    """The dimension that is cut."""
    dim = asked["dim"]
    need(0 < x.dim() < 8 and -x.dim() <= dim < x.dim(), f"shape {list(x.shape)}, dim {dim}")
    need(x.shape[dim] % 2 == 0, f"dimension {dim} of {list(x.shape)} must be even")
    return int(dim)


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    first, second = x.float().chunk(2, dim)
    return first, second


def swiglu(asked: Question) -> None:
    """aclnnSwiGlu."""
    (x,) = _taken(asked, "self")
    _whole(asked, ("self",))
    _one_type(x)
    dim = _swiglu_rules(asked, x)
    if not asked.compute:
        return
    calls["aclnnSwiGlu"] += 1
    gate, linear = _halves(x, dim)
    asked.give(out=gate * gate.sigmoid() * linear)


def swiglu_grad(asked: Question) -> None:
    """aclnnSwiGluGrad."""
    dy, x = _taken(asked, "grad_output", "self")
    _whole(asked, ("grad_output", "self"))
    _one_type(x, dy)
    dim = _swiglu_rules(asked, x)
    if not asked.compute:
        return
    calls["aclnnSwiGluGrad"] += 1
    gate, linear = _halves(x, dim)
    sigmoid = gate.sigmoid()
    parts = (dy.float() * linear * (sigmoid + gate * sigmoid * (1 - sigmoid)), dy.float() * gate * sigmoid)
    asked.give(out=torch.cat(parts, dim))


# --- rotary positions


def _rotary_rules(asked: Question, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _one_type(x, cos, sin)
    need(x.dim() == cos.dim() == 4 and cos.shape == sin.shape, f"shapes {list(x.shape)}, {list(cos.shape)}")
    need(0 not in x.shape, "empty")
    width = x.shape[-1]
    need(width % 2 == 0 and width < WIDEST_ROTATION and cos.shape[-1] == width, f"D is {width}")
    mode = asked["mode"]
    need(mode in MODES.values(), f"mode is {mode}")
    need(any(_fits(list(x.shape), list(cos.shape), mode, *order) for order in ((0, 1, 2), (0, 2, 1), (1, 2, 0))),
         f"cos {list(cos.shape)} fits x {list(x.shape)} in none of BNSD, BSND and SBND")  # fmt: skip


def _fits(x: list[int], cos: list[int], mode: int, b: int, n: int, s: int) -> bool:
    """cos is one for all heads in the layout whose B, N and S are these dimensions, or (half) one for each."""
    if cos[s] != x[s] or cos[b] not in (1, x[b]) or cos[n] not in (1, x[n]):
        return False
    if mode == MODES["interleave"]:
        return x[b] * x[n] < MOST_ROTATED and cos[b] == cos[n] == 1
    return x[b] < MOST_ROTATED and x[n] < MOST_ROTATED and not (cos[b] == 1 != x[b] and cos[n] == x[n] != 1)


def _turned(x: Tensor, mode: int) -> Tensor:
    """(-b, a) for each pair (a, b)."""
    if mode == MODES["half"]:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def rotary(asked: Question) -> None:
    """aclnnRotaryPositionEmbedding."""
    x, cos, sin = _taken(asked, "self", "r1", "r2")
    _rotary_rules(asked, x, cos, sin)
    if not asked.compute:
        return
    calls["aclnnRotaryPositionEmbedding"] += 1
    turned = _turned(x.float(), asked["mode"])
    asked.give(result=x.float() * cos.float() + turned * sin.float())


def rotary_grad(asked: Question) -> None:
    """aclnnRotaryPositionEmbeddingGrad; without x there are no gradients of cos and sin."""
    dy, cos, sin = _taken(asked, "grad", "r1", "r2")
    _rotary_rules(asked, dy, cos, sin)
    x = asked.take("x")
    if x is not None:
        need(x.shape == dy.shape and x.dtype == dy.dtype, f"x is {list(x.shape)}, dy {list(dy.shape)}")
    if not asked.compute:
        return
    calls["aclnnRotaryPositionEmbeddingGrad"] += 1
    back = -_turned(dy.float() * sin.float(), asked["mode"])  # the rotation's transpose
    results = {"dx": dy.float() * cos.float() + back}
    if x is not None:
        for name, factor in (("dcos", x.float()), ("dsin", _turned(x.float(), asked["mode"]))):
            if asked[name] is not None and 0 not in asked[name]["shape"]:
                results[name] = (dy.float() * factor).sum_to_size(asked[name]["shape"])
    asked.give(**results)


# --- AdamW


def adamw(asked: Question) -> None:
    """aclnnApplyAdamWV2, which changes weight, m and v in place."""
    weight, m, v, grad, step = _taken(asked, "self", "exp_avgs", "exp_avg_sqs", "grads", "step")
    need(weight.dtype in TYPES and m.dtype == v.dtype == weight.dtype, f"types {weight.dtype}, {m.dtype}, {v.dtype}")
    need(grad.dtype in TYPES and step.dtype in (torch.float32, torch.int64), f"types {grad.dtype} and {step.dtype}")
    need(all(x.shape == weight.shape for x in (m, v, grad)), "weight, m, v and gradient must have one shape")
    need(step.numel() == 1, f"step has {step.numel()} elements")
    need(not asked["amsgrad"], "not modelled: amsgrad")
    if not asked.compute:
        return
    calls["aclnnApplyAdamWV2"] += 1
    lr, decay, eps = asked["lr"], asked["weight_decay"], asked["eps"]
    beta1, beta2 = asked["beta1"], asked["beta2"]
    number = float(step) + 1
    g = grad.to(weight.dtype) * (-1 if asked["maximize"] else 1)
    decayed = weight * (1 - lr * decay)
    new_m = m + (g - m) * (1 - beta1)
    new_v = v * beta2 + g * g * (1 - beta2)
    denominator = new_v.sqrt() * (1 - beta2**number) ** -0.5 + eps
    new = decayed - new_m / denominator * (lr / (1 - beta1**number))
    asked.give(**{"self": new, "exp_avgs": new_m, "exp_avg_sqs": new_v})


HANDLERS: dict[str, Callable[[Any], None]] = {
    "aclnnRmsNorm": rms_norm,
    "aclnnRmsNormGrad": rms_norm_grad,
    "aclnnRotaryPositionEmbedding": rotary,
    "aclnnRotaryPositionEmbeddingGrad": rotary_grad,
    "aclnnSwiGlu": swiglu,
    "aclnnSwiGluGrad": swiglu_grad,
    "aclnnApplyAdamWV2": adamw,
}
