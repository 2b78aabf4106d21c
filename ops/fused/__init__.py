"""Operators of a layer besides attention, and of the optimizer: in torch's own operations, and fused by torch-npu.

:mod:`plain` and :mod:`npu` have functions of the same names, arguments and results: ``rms_norm``, ``rotary_mul`` and
``swiglu``; an NPU rounds where a fused operator ends instead of after each operation. AdamW is torch's own, whose
``fused=True`` calls torch-npu's operator on an NPU.
"""

from __future__ import annotations

import torch

__all__ = ["OPERATORS", "missing_operators"]

#: Operator of torch-npu by what it computes. Those of npu:: are torch-npu's own, the other one is torch's, for NPUs.
OPERATORS = {
    "rms_norm": "npu::npu_rms_norm",
    "rotary_mul": "npu::npu_rotary_mul",
    "swiglu": "npu::npu_swiglu",
    "adamw": "aten::_fused_adamw_",
}
_GRADIENTS = {"rms_norm": "npu::npu_rms_norm_backward", "swiglu": "npu::npu_swiglu_backward"}  # called by name


def missing_operators() -> dict[str, str]:
    """Return the operators that the loaded torch-npu lacks, by what they compute; without torch-npu, all of them."""
    wanted = [*OPERATORS.items(), *_GRADIENTS.items()]
    return {name: operator for name, operator in wanted if not _has_kernel(operator)}


def _has_kernel(operator: str) -> bool:
    """Return True if an operator has a kernel for NPUs of its own; a fallback to the CPU is none."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "PrivateUse1") if _is_known(operator) else False


def _is_known(operator: str) -> bool:
    namespace, name = operator.split("::")
    return hasattr(getattr(torch.ops, namespace), name)
