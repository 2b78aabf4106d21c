"""Checks of what a call of attention is given on one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp.engine.rank_context import RankContext
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import DropoutKey, checked_dropout_key
from mindspeed_cp.plan import Plan
from mindspeed_cp.schema.numbers import is_int


def checked_key(plan: Plan, key: DropoutKey | None) -> DropoutKey:
    """Check the dropout key of a plan with dropout."""
    if key is None:
        raise ConfigError(
            f"attention.dropout is {plan.attention.dropout} and no dropout_key was given; valid: dropout_key=(seed, "
            "layer), the same on all ranks, or training=False, which drops nothing"
        )
    return checked_dropout_key(key)


def check_types(q: object, k: object, v: object) -> None:
    """Check that q, k and v are tensors of rows in memory."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name} is a {type(x).__name__}; valid: a torch.Tensor")
        if x.layout != torch.strided or x.is_nested or x.is_quantized:
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else f"of layout {x.layout}"
            raise ConfigError(f"{name} is {kind}; valid: a dense torch.Tensor, for example {name}.to_dense()")


def check_options(training: object, batch_digest: object = None) -> None:
    """Check the arguments of a call that are no tensors and have no check of their own."""
    if not isinstance(training, bool):
        raise ConfigError(f"training is {training!r}; valid: True, or False, which drops nothing")
    if batch_digest is not None and not is_int(batch_digest):
        raise ConfigError(
            f"batch_digest is {batch_digest!r}; valid: an integer that each rank computes from its whole batch, such "
            "as zlib.crc32 of the tokens, or None, which compares no batches"
        )


def check_inputs(q: Tensor, k: Tensor, v: Tensor, context: RankContext) -> None:
    """Check the tensors of one rank against its plan."""
    for (name, shape), x in zip(context.shapes.items(), (q, k, v), strict=True):
        if x.shape != shape:
            raise ConfigError(
                f"rank {context.rank}: {name} has shape {list(x.shape)}; the plan gives this rank {list(shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ConfigError(
                f"rank {context.rank}: {name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must agree"
            )
