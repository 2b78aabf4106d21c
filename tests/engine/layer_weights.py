"""Calls with sinks and latents: a case's own, its results in fp64, and how far those of the engine are from them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from mindspeed_cp import Plan
from mindspeed_cp.engine import Stepping, attend_in_process
from mindspeed_cp.engine.attention import expanded_rows
from mindspeed_cp.ops.attention.reference import dense_packed_attention
from tests.engine.cases import Case, filled_with_nan


def kv_up_of(case: Case) -> torch.Tensor:
    """The up-projection of a case with latents."""
    assert case.latent is not None
    latent, shared = case.latent
    rows = case.heads * (case.head_dim - shared + case.head_dim_v)
    weight = torch.randn(rows, latent, generator=torch.Generator().manual_seed(case.seed + 1)) / latent**0.5
    return weight.to(case.dtype)


def sink_of(case: Case) -> torch.Tensor:
    """A sink for each head: between 2 and 6, as lse is for 10 to 400 keys."""
    return 4.0 + 2.0 * torch.linspace(-1, 1, case.heads) if case.heads > 1 else torch.full((1,), 4.0)


def exact_results(case: Case, has_sink: bool) -> dict[str, torch.Tensor]:
    """out and the gradients in fp64: dq, dk, dv, and dkv_up and dsink where there are such weights."""
    return _exact(replace(case, ranks=1, nodes=1, algorithm="ring", options=()), has_sink)


@lru_cache(64)
def _exact(case: Case, has_sink: bool) -> dict[str, torch.Tensor]:
    q, k, v, dout = (x.double() for x in case.inputs())
    leaves = {"dq": q, "dk": k, "dv": v}
    if case.latent is not None:
        leaves["dkv_up"] = kv_up_of(case).double()
    if has_sink:
        leaves["dsink"] = sink_of(case).double()
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    if case.latent is not None:
        k, v = expanded_rows(k[:, 0], v[:, 0], leaves["dkv_up"], case.attention)
    key = case.dropout_key if case.dropout else None
    options: dict[str, Any] = {"kv_documents": case.kv_documents, "dropout_key": key, "sink": leaves.get("dsink")}
    out, _ = dense_packed_attention(case.attention, q, k, v, case.documents, **options)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True)
    zeros = [torch.zeros_like(leaf) if x is None else x for x, leaf in zip(gradients, leaves.values(), strict=True)]
    return {"out": out.detach(), **dict(zip(leaves, zeros, strict=True))}


def largest_error(case: Case, results: dict[str, Any]) -> float:
    """The largest error of a result over its largest number, which counts as 1 at least."""
    errors = [0.0]
    for name, wanted in exact_results(case, results.get("dsink") is not None).items():
        assert results[name].shape == wanted.shape and torch.isfinite(results[name]).all(), (name, case)
        if wanted.numel():
            scale = max(1 / (1 - case.dropout), float(wanted.abs().max()))
            errors.append(float((results[name].double() - wanted).abs().max()) / scale)
    return max(errors)


def run(case: Case, stepping: Stepping | None = None, plan: Plan | None = None, **how: Any) -> dict[str, Any]:
    """The results of all ranks together, in this process; with the up-projection of a case with latents."""
    key = case.dropout_key if case.dropout else None
    weights = how | ({"kv_up": kv_up_of(case)} if case.latent else {})
    with filled_with_nan():
        return vars(
            attend_in_process(plan or case.plan(), *case.inputs(), dropout_key=key, stepping=stepping, **weights)
        )
