"""Keys and values of slots that hold latents: expanded where they are read, and their gradients summed back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.engine.program_run import ProgramRun
from mindspeed_cp.ops.attention import AttentionBackend, BackwardState, ForwardState
from mindspeed_cp.ops.attention.latent import LatentExpansion
from mindspeed_cp.ops.rows import RowIndex, add_rows, take_rows
from mindspeed_cp.plan import AttentionConfig


class SlotReader:
    """Runs the kernel calls of a slot on its keys and values, which it makes from latents if the slot holds these.

    Keys and values that were made are freed after the calls, and made again where a later step or the backward reads
    the same rows.

    Args:
        backend: backend of the attention operator.
        attention: attention of the part.
        expansion: expansion of latents to the heads of this rank; None where slots hold keys and values.
        dkv_up: gradient of the weight of the expansion, fp32; None in the forward.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        attention: AttentionConfig,
        expansion: LatentExpansion | None,
        dkv_up: Tensor | None = None,
    ) -> None:
        self._backend, self._attention = backend, attention
        self._expansion, self._dkv_up = expansion, dkv_up

    def forward(self, run: ProgramRun, slot: int, calls: Any, rows: RowIndex | None, state: ForwardState) -> None:
        """Run calls of the forward; `rows` as in `RankStep.rows_read`."""
        k, v = run.k[slot], run.v[slot]
        if self._expansion is not None:
            assert rows is not None
            k, v = self._expansion.expand(take_rows(k, rows), take_rows(v, rows))
        self._backend.forward(calls, self._attention, state, k, v)

    def backward(self, run: ProgramRun, slot: int, calls: Any, rows: RowIndex | None, state: BackwardState) -> None:
        """Run calls of the backward, and add the gradients of the slot's rows to the slot's."""
        if self._expansion is None:
            self._backend.backward(calls, self._attention, state, run.k[slot], run.v[slot], *run.gradient(slot))
            return
        assert rows is not None and self._dkv_up is not None
        shared, latent = take_rows(run.k[slot], rows), take_rows(run.v[slot], rows)
        k, v = self._expansion.expand(shared, latent)
        dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        self._backend.backward(calls, self._attention, state, k, v, dk, dv)
        gradients = self._expansion.gradient(dk, dv, latent, self._dkv_up)
        for total, gradient in zip(run.gradient(slot), gradients, strict=True):
            add_rows(total, rows, gradient)
