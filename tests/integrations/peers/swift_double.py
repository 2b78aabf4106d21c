"""A double of ms-swift's sequence-parallel object, for environments without ms-swift.

Source: class ``SequenceParallel`` of ms-swift 4.6.0, swift/sequence_parallel/sequence_parallel.py, and ``GatherLoss`` of
swift/sequence_parallel/utils.py: what ``use_plans`` builds on, and the order in which the trainer
(swift/trainers/seq2seq_trainer.py) calls it. The double pads, splits and gathers nothing itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SequenceParallel:
    """What trainers ask to pad, split and gather rows."""

    def __init__(self) -> None:
        self.world_size: int | None = None
        self.rp_world_size: int | None = None
        self.extra_kwargs: dict[str, Tensor] = {}

    @property
    def real_position_ids(self) -> Tensor | None:
        return self.extra_kwargs.get("text_position_ids")

    def prepare(self, sp_size: int, model: Any, tokenizer: Any, padding_free: bool) -> None:
        self.world_size, self.padding_free = sp_size, padding_free
        self.num_heads = model.config.num_key_value_heads
        self._init_device_mesh()
        self._prepare_flash_attn(model.base_model)
        self._prepare_forward_hook(model.base_model)

    def _init_device_mesh(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        assert self.world_size is not None
        inner = math.gcd(self.num_heads, self.world_size)
        self.rp_world_size = self.world_size // inner
        assert self.rp_world_size == self.world_size, "the double has no ranks that share heads"
        shape = (dist.get_world_size() // self.world_size, self.rp_world_size, inner)
        self.device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "ring", "sequence"))

    def _prepare_flash_attn(self, base_model: Any) -> None:
        raise AssertionError("the double has no attention over several ranks")

    def _prepare_forward_hook(self, base_model: Any) -> None:
        def split_inputs(model: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
            ids, _, _, positions, mask, _, _ = self.pad_and_split_inputs(
                keywords["input_ids"], None, None, keywords["position_ids"], keywords.get("attention_mask"), None,
                real_position_ids=self.real_position_ids,
            )  # fmt: skip
            return arguments, {**keywords, "input_ids": ids, "position_ids": positions, "attention_mask": mask}

        base_model.register_forward_pre_hook(split_inputs, with_kwargs=True)

    def pad(self, tensor: Tensor, padding_value: Any, position_ids: Tensor | None = None, dim: int = 1) -> Tensor:
        raise AssertionError("the double pads nothing")

    def split(self, input: Tensor, dim: int, position_ids: Tensor | None = None) -> Tensor:
        raise AssertionError("the double splits nothing")

    def gather(self, local_output: Tensor, dim: int, position_ids: Tensor | None = None) -> Tensor:
        raise AssertionError("the double gathers nothing")

    def pad_and_split_inputs(
        self,
        input_ids: Tensor | None,
        input_embeds: Tensor | None,
        labels: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        loss_scale: Tensor | None,
        embed_tokens: Any = None,
        real_position_ids: Tensor | None = None,
        extra_split_values: Any = None,
    ) -> tuple[Any, ...]:
        real = position_ids if real_position_ids is None else real_position_ids

        def cut(x: Tensor | None, shift: int = 0) -> Tensor | None:
            if x is None:
                return None
            return self.split(torch.roll(self.pad(x, 0, real), shift, -1), -1, real)

        return cut(input_ids), None, cut(labels, -1), cut(position_ids), attention_mask, cut(loss_scale, -1), []

    def prepare_inputs(self, inputs: dict[str, Tensor]) -> None:
        """Remember the positions of a batch, and split its labels and weights."""
        self.extra_kwargs["text_position_ids"] = inputs["position_ids"].clone()
        _, _, labels, _, _, weights, _ = self.pad_and_split_inputs(
            None, None, inputs.get("labels"), None, None, inputs.get("loss_scale"),
            real_position_ids=inputs["position_ids"],
        )  # fmt: skip
        inputs.update({key: x for key, x in (("labels", labels), ("loss_scale", weights)) if x is not None})


class GatherLoss(torch.autograd.Function):
    """Losses of all tokens from those of the ranks' rows; gradients times the ranks, as they are averaged later."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, sp: SequenceParallel, position_ids: Tensor) -> Tensor:
        ctx.sp, ctx.position_ids = sp, position_ids
        return sp.gather(loss, 1, position_ids)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.sp.split(gradients[0] * ctx.sp.world_size, 1, ctx.position_ids), None, None
