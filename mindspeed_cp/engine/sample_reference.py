"""The fp64 reference of a sample of a plan's attention, for all or some of its keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_cp.ops.attention.contract import DropoutKey
from mindspeed_cp.ops.attention.reference import dense_attention
from mindspeed_cp.ops.dropout import keep_mask
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.sample import AttentionSample


@dataclass(frozen=True)
class SampleReference:
    """Attention of a sample by its definition.

    Attributes:
        plan: the plan that the sample was drawn from.
        sample: queries of one head, and the keys that they see.
        dropout_key: (seed, layer); None where nothing is dropped.
        sink: sink of the sample's head, a scalar; None: there is none.
    """

    plan: Plan
    sample: AttentionSample
    dropout_key: DropoutKey | None
    sink: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute dense_attention of the sample's queries. Differentiable.

        Args:
            q: [queries, channels]; more channels than the head has need zeros in q or in k.
            k: [keys, channels].
            v: [keys, any number of channels].
            keys: number of each key among the sample's, int64 [keys]; None: all keys, and the sink.

        Returns:
            out fp64 [queries, channels of v], lse fp64 [queries].
        """
        sample, attention = self.sample, self.plan.attention
        position_q = sample.position + torch.arange(sample.rows)
        position_k = sample.first_key + (torch.arange(sample.keys) if keys is None else keys)
        keep = None
        if self.dropout_key is not None:
            heads = torch.tensor([attention.first_head + sample.head])
            keep = keep_mask(*self.dropout_key, heads, sample.document, position_q, position_k, attention.dropout)
        blocks = sample.blocks(self.plan)
        of_rows = None
        if blocks is not None:
            of_keys = torch.from_numpy(blocks[1])
            of_rows = torch.from_numpy(blocks[0]), of_keys if keys is None else of_keys[keys]
        out, lse = dense_attention(
            q[:, None], k[:, None], v[:, None], torch.zeros_like(position_q), torch.zeros_like(position_k),
            position_q, position_k, mask=attention.mask, scale=attention.softmax_scale, window=attention.window,
            slopes=None if attention.slopes is None else attention.slopes[sample.head : sample.head + 1],
            keep=keep, dropout_p=attention.dropout,
            sink=None if self.sink is None or keys is not None else self.sink.reshape(1),
            blocks=of_rows,
        )  # fmt: skip
        return out[:, 0], lse[:, 0]
