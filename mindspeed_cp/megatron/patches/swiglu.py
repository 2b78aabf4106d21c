"""fused_swiglu: compute SwiGLU in Megatron's MLPs by the fused operator of NPUs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from mindspeed_cp.megatron.patches.swap import replaced
from mindspeed_cp.ops.fused import npu

#: Modules of all versions that call bias_swiglu_impl or weighted_bias_swiglu_impl under bias_activation_fusion.
_MODULES = ("megatron.core.transformer.mlp", "megatron.core.transformer.moe.shared_experts")


@contextmanager
def fused_swiglu() -> Iterator[None]:
    """Let Megatron's MLPs, of experts too, compute SwiGLU by npu_swiglu within the block.

    Under ``bias_activation_fusion`` they call one function for bias and SwiGLU, and another where experts weigh tokens;
    these two are replaced. A spec has a place for an activation from 0.16 on only.
    """
    with ExitStack() as stack:
        for module_name in _MODULES:
            module: Any = importlib.import_module(module_name)
            for name, function in (("bias_swiglu_impl", _swiglu), ("weighted_bias_swiglu_impl", _weighted_swiglu)):
                if hasattr(module, name):
                    stack.enter_context(replaced(module, name, function))
        yield


def _swiglu(x: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    """Return SwiGLU of x + bias: [..., 2 n] -> [..., n]."""
    return npu.swiglu(x if bias is None else x + bias)


def _weighted_swiglu(x: Tensor, bias: Tensor | None, weights: Tensor, *_: Any) -> Tensor:
    """Return SwiGLU of x + bias, times weights [tokens, 1], in the dtype of x."""
    return (_swiglu(x, bias) * weights).to(x.dtype)
