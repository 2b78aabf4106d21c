"""Operators of a layer besides attention, and of the optimizer: in torch's own operations, and fused by torch-npu.

:mod:`plain` and :mod:`npu` have functions of the same names, arguments and results: ``rms_norm``, ``rotary_mul`` and
``swiglu``; an NPU rounds where a fused operator ends instead of after each operation. AdamW is torch's own, whose
``fused=True`` calls torch-npu's operator on an NPU.
"""

from mindspeed_cp.ops.fused.available import OPERATORS, missing_operators

__all__ = ["OPERATORS", "missing_operators"]
