"""Patches for versions of Megatron-core; importing this module patches nothing.

=====================================  ==========  ==========================================
problem                                versions    patch
=====================================  ==========  ==========================================
MoE without Transformer Engine:        0.16        the missing name is bound to None, as 0.17
NameError te_general_gemm                          does
MLA without Transformer Engine:        0.16        HAVE_TE is set to False, as it is
isinstance() of a mock
distributed optimizer without          0.12        without parameters in fp8 nothing is
Transformer Engine: RuntimeError                     quantized, as 0.16 does
MoE on the CPU: split sizes stay       all         CPU tensors are converted like CUDA ones
tensors and all_to_all_single fails
cp_comm_type as a list: IndexError     0.16        not patched: check_model_config refuses
                                                   lists, one algorithm serves all layers
=====================================  ==========  ==========================================

Functions that 0.17 and later changed are not used: get_batch_on_this_cp_rank and the other batch helpers (other
arguments, or gone, from 0.18), Megatron's rotary slicing, and pg_collection.hcp (absent when unset).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import megatron.core
import torch

from mindspeed_cp.megatron.patches.imports import check_version, parse_version

ABSENT = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` within the block, and restore or delete it afterwards, errors included.

    An attribute that the owner inherits is inherited again afterwards.
    """
    before = vars(owner).get(name, ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _converts_cpu_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    return maybe_move_tensor_to_cpu


def _quantizes_fp8_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def quantize_param_shard(model_params: Any, *args: Any, **kwargs: Any) -> None:
        if model_params:
            original(model_params, *args, **kwargs)

    return quantize_param_shard


#: Module and attribute; first version that needs the patch, and first that does not; and a function of the present
#: value (or ABSENT) and of whether Transformer Engine is installed, which gives the new value, or ABSENT.
PATCHES: tuple[tuple[str, str, tuple[int, int], tuple[int, int], Callable[[Any, bool], Any]], ...] = (
    (
        "megatron.core.optimizer.distrib_optimizer", "quantize_param_shard", (0, 12), (0, 13),
        lambda value, has_te: ABSENT if has_te else _quantizes_fp8_alone(value),
    ),
    (
        "megatron.core.transformer.moe.moe_utils", "te_general_gemm", (0, 16), (0, 17),
        lambda value, has_te: None if value is ABSENT else ABSENT,
    ),
    (
        "megatron.core.transformer.multi_latent_attention", "HAVE_TE", (0, 16), (0, 17),
        lambda value, has_te: False if value is True and not has_te else ABSENT,
    ),
    (
        "megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", (0, 0), (10**6, 0),
        lambda value, has_te: ABSENT if value is ABSENT else _converts_cpu_tensors(value),
    ),
)  # fmt: skip


@contextmanager
def megatron_compat() -> Iterator[list[str]]:
    """Apply, inside this block, the patches that the installed Megatron-core needs; all are undone on exit.

    Needed for mixture-of-experts models without Transformer Engine and on the CPU; harmless otherwise. May be nested.

    Yields:
        The dotted names that were patched.

    Raises:
        ConfigError: the installed version is not supported.
    """
    check_version(megatron.core.__version__)
    version = parse_version(megatron.core.__version__)
    has_te = importlib.util.find_spec("transformer_engine") is not None
    applied = []
    with ExitStack() as stack:
        for module_name, name, first, end, replacement in PATCHES:
            if not first <= version < end:
                continue
            module = importlib.import_module(module_name)
            new = replacement(getattr(module, name, ABSENT), has_te)
            if new is not ABSENT:
                stack.enter_context(replaced(module, name, new))
                applied.append(f"{module_name}.{name}")
        yield applied
