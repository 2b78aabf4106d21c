"""Attention sinks: one logit for each head in the softmax's denominator, which has no value.

With the sink s of a head, the weights of a row are ``exp(score - lse')``, where ``lse' = log(exp(lse) + exp(s))`` and
lse is that of the scores alone, as in gpt-oss. So a row is computed without the sink, and finished once, after the last
of its keys::

    out' = out * sigmoid(lse - s)
    ds   = -sum over rows of exp(s - lse') * (dout . out')

The backward of the scores is the usual one with (out', lse') in the place of (out, lse): the sink's value is 0, so that
``dout . out'`` is still the sum of a row's weights times their gradients. Dropout acts on the weights; lse is of all
scores. A sink of 0 that is not learned is the "off by one" softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError

#: Rows that are computed at once in fp32, to bound what a gradient needs in memory.
ROWS = 8192


def checked_sink(sink: object, heads: int, device: torch.device) -> Tensor:
    """Check the sink of a layer.

    Args:
        sink: fp32 [heads].
        heads: query heads of the layer (on this tensor-parallel rank).
        device: device of q.

    Raises:
        ConfigError: it is no tensor, or has another shape, type or device.
    """
    if not isinstance(sink, Tensor):
        raise ConfigError(f"sink is a {type(sink).__name__}; valid: a tensor, fp32 [{heads}], one logit for each head")
    if tuple(sink.shape) != (heads,):
        raise ConfigError(f"sink has shape {list(sink.shape)}; valid: [{heads}], one logit for each query head")
    if sink.dtype != torch.float32:
        raise ConfigError(f"sink is {sink.dtype}; valid: torch.float32, for example sink.float()")
    if sink.device != device:
        raise ConfigError(f"sink is on {sink.device}, q is on {device}; they must agree")
    return sink


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Finish complete rows with the sink, in place. A row without keys keeps out 0 and gets the sink as its lse.

    Args:
        out: fp32 [rows, heads, dim], complete without the sink.
        lse: fp32 [rows, heads], complete without the sink.
        sink: fp32 [heads]; -inf is no sink.
    """
    share = torch.sigmoid(lse - sink).masked_fill_(lse == -torch.inf, 0.0)  # of the keys; -inf - -inf would be NaN
    out.mul_(share[..., None])
    torch.logaddexp(lse, sink, out=lse)


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient of the sink from these rows, fp32 [heads].

    Args:
        dout: gradient of out, [rows, heads, dim].
        out: [rows, heads, dim] with the sink.
        lse: fp32 [rows, heads] with the sink.
        sink: fp32 [heads].
    """
    gradient = torch.zeros_like(sink)
    for rows in zip(dout.split(ROWS), out.split(ROWS), lse.split(ROWS), strict=True):
        dout_rows, out_rows, lse_rows = rows
        delta = (dout_rows.float() * out_rows.float()).sum(-1)
        share = torch.exp(sink - lse_rows).masked_fill_(lse_rows == -torch.inf, 0.0)
        gradient -= (share * delta).sum(0)
    return gradient
