"""Fused operators of NPUs in the modules of a model: RMSNorm by the spec, and rotary positions."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from mindspeed_cp.megatron.adaptors.local import LocalNorm
from mindspeed_cp.megatron.adaptors.rotary import PlannedRotary
from mindspeed_cp.ops.fused import npu


class FusedRMSNorm(nn.RMSNorm):
    """torch's RMSNorm, with the same parameters, by npu_rms_norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x [..., channels]."""
        assert self.eps is not None
        return npu.rms_norm(x, self.weight, self.eps)


class FusedNorm(LocalNorm):
    """LocalNorm with :class:`FusedRMSNorm`, for local_spec; LayerNorm, which is one operator of torch, stays."""

    modules: ClassVar[dict[str, type[nn.Module]]] = {**LocalNorm.modules, "RMSNorm": FusedRMSNorm}


def use_fused_rotary(model: nn.Module) -> None:
    """Let all rotary modules of an installed model rotate by npu_rotary_mul."""
    for module in model.modules():
        if isinstance(module, PlannedRotary):
            module.rotary_mul = npu.rotary_mul
