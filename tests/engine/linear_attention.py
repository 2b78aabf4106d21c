"""Linear attention token by token, as it is defined, and rows for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mindspeed_cp import Documents, StateConfig
from mindspeed_cp.engine.linear_attention import WholeStates
from mindspeed_cp.ops.linear_attention import StateInputs

FAST_DECAY = -13.8155  # log of 1e-6


def draw_rows(state: StateConfig, tokens: int, seed: int, fast: float = 0.1) -> tuple[StateInputs, Tensor]:
    """Draw rows in fp64 and the gradient of the output; a share of the gates decays to 1e-6 in a step."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)

    heads, dim, dim_v = state.heads, state.head_dim, state.head_dim_v
    q, k, v = normal(heads, dim), functional.normalize(normal(heads, dim), dim=-1), normal(heads, dim_v)
    gate = functional.logsigmoid(normal(heads, dim) + 2 if state.has_channel_gates else normal(heads) + 2)
    gate = torch.where(torch.rand(gate.shape, generator=generator) < fast, FAST_DECAY, gate)
    if state.kind == "lightning":
        gate = -torch.rand(heads, generator=generator, dtype=torch.float64)
    beta = None if state.kind == "lightning" else normal(heads).sigmoid()
    return StateInputs(q, k, v, gate, beta), normal(heads, dim_v)


def recurrence(x: StateInputs, documents: Documents, state: StateConfig) -> Tensor:
    """Return the outputs of rows of all tokens, [tokens, heads, head_dim_v]; differentiable."""
    parents = [-1] * len(documents) if documents.trees is None else documents.trees.parents.tolist()
    ends: list[Tensor] = []
    outputs = [x.v[:0]]
    decay = x.gate.exp().expand(len(x.q), -1) if x.gate.dim() == 1 else x.gate.exp()
    for doc, parent in enumerate(parents):
        s = ends[parent] if parent >= 0 else x.v.new_zeros(x.v.shape[1], x.v.shape[2], x.q.shape[2])
        for t in range(int(documents.offsets[doc]), int(documents.offsets[doc + 1])):
            s = s * (decay[t][:, None] if state.has_channel_gates else decay[t][:, None, None])
            value = x.v[t] - torch.einsum("hvk,hk->hv", s, x.k[t]) if state.has_delta else x.v[t]
            value = value if x.beta is None else value * x.beta[t][:, None]
            s = s + value[:, :, None] * x.k[t][:, None]
            outputs.append(state.factor * torch.einsum("hvk,hk->hv", s, x.q[t])[None])
        ends.append(s)
    return torch.cat(outputs)


def token_by_token(x: StateInputs, dout: Tensor, documents: Documents, state: StateConfig) -> WholeStates:
    """Return out and the gradients of all rows; those of the gates of lightning for each token."""
    rows = x._replace(gate=x.gate.expand(len(x.q), -1)) if x.gate.dim() == 1 else x
    leaves = StateInputs(*(None if value is None else value.clone().requires_grad_() for value in rows))  # type: ignore[arg-type]
    out = recurrence(leaves, documents, state)
    given = [value for value in leaves if value is not None]
    gradients = iter(torch.autograd.grad(out, given, dout, allow_unused=True))
    filled = [
        None if value is None else torch.zeros_like(value) if (g := next(gradients)) is None else g for value in leaves
    ]
    return WholeStates(out.detach(), StateInputs(*filled))  # type: ignore[arg-type]


def largest_error(result: WholeStates, wanted: WholeStates) -> float:
    """Return the largest error of out and all gradients, relative to the largest element of each."""
    assert result.gradients is not None and wanted.gradients is not None
    pairs = [(result.out, wanted.out), *zip(result.gradients, wanted.gradients, strict=True)]
    return max(
        float((a.double() - b).abs().max()) / max(float(b.abs().max()), 1e-9)
        for a, b in pairs
        if b is not None and b.numel()
    ) if wanted.out.numel() else 0.0  # fmt: skip
