"""Attention of one backend over packed documents, to be timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mindspeed_cp.layout import TOKEN_SPAN, Documents
from mindspeed_cp.ops.attention import BackwardState, ForwardState, Heads
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
        buffers: accumulators of outputs and gradients, fp32.
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
                lower(tiles, documents.tokens, attention, torch.bfloat16)[0, 0]
                for lower in (backend.lower_forward, backend.lower_backward)
            ]
        self.calls = list(calls)
        heads = Heads.all(attention)
        for calls_of_direction in self.calls:
            backend.prepare(calls_of_direction, attention, heads, device)
        shapes = [(documents.tokens, n, attention.head_dim) for n in (attention.heads, *[attention.kv_heads] * 2)]
        self.qkv = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
        dout = torch.randn(shapes[0], device=device, dtype=torch.bfloat16)
        out, lse = torch.zeros(shapes[0], device=device), torch.empty(shapes[0][:2], device=device)
        dq, dk, dv = (torch.zeros(shape, device=device) for shape in shapes)
        self.buffers = [out, lse, dq, dk, dv]
        key = (0, 0) if attention.dropout else None
        self._forward_state = ForwardState(self.qkv[0], out, lse, heads, key)
        self.forward()
        self._backward_state = BackwardState(self.qkv[0], out.to(dout.dtype), lse, dout, dq, heads, key)

    def forward(self) -> None:
        """Run the forward."""
        self._forward_state.lse.fill_(-torch.inf)
        self._backend.forward(self.calls[0], self._attention, self._forward_state, *self.qkv[1:])

    def backward(self) -> None:
        """Run the backward."""
        self._backend.backward(self.calls[1], self._attention, self._backward_state, *self.qkv[1:], *self.buffers[3:])

    def both(self) -> None:
        """Run the forward, round its output, and run the backward."""
        self.forward()
        self._backward_state.out.copy_(self._forward_state.out)
        self.backward()


def document_tiles(documents: Documents, attention: AttentionConfig) -> np.ndarray:
    """Return the tiles of self-attention over whole documents, none of which is empty."""
    spans = np.zeros(len(documents), TOKEN_SPAN)
    spans["doc"], spans["start"] = np.arange(len(documents)), documents.offsets[:-1]
    spans["stop"] = documents.offsets[1:]
    return tiles_between(spans, spans, documents, attention)
