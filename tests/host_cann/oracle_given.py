"""What goes with a call: the dropout mask, the numbers of a bias, and what the gradient is given of the forward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.host_cann.oracle_dropout import dropout_numels, mask_bytes
from tests.host_cann.oracle_rules import Problem, need


def statistics_shape(p: Problem) -> tuple[int, ...]:
    """Shape of softmax_max and softmax_sum."""
    if p.packed:
        return p.query.shape[0], p.heads, 8
    return len(p.sequences), p.heads, p.sequences[0].sizes[0], 8


def check_dropout(p: Problem) -> None:
    """Raise Refused where keep_prob and the dropout mask do not belong together."""
    need(0 < p.keep_prob <= 1, f"keep_prob is {p.keep_prob}; valid: above 0, at most 1")
    if p.keep_prob == 1:
        need(p.drop_mask is None, "not modelled: a dropout mask with keep_prob 1")
        return
    need(p.drop_mask is not None, f"keep_prob {p.keep_prob} needs the dropout mask (drop_mask)")
    assert p.drop_mask is not None
    want = mask_bytes(dropout_numels(p.heads, (x.sizes for x in p.sequences)))
    fits = p.drop_mask.dtype == torch.uint8 and p.drop_mask.dim() == 1 and p.drop_mask.numel() >= want
    need(
        fits,
        f"the dropout mask must be uint8 [{want}], one bit for each weight; is {p.drop_mask.dtype} {list(p.drop_mask.shape)}",
    )


def check_slopes(p: Problem) -> None:
    """Raise Refused for a bias that is not a number."""
    if p.pse is not None and not p.pse.is_meta:
        need(bool(p.pse.isfinite().all()), "not modelled: pse that is not finite")


def check_gradient(p: Problem, query: Tensor, dy: Tensor, parts: Mapping[str, Tensor | None]) -> None:
    """Raise Refused where what the gradient is given does not fit the call."""
    for name, x in parts.items():
        need(x is not None, f"the gradient needs {name}")
    largest, total, out = parts["softmax_max"], parts["softmax_sum"], parts["attention_in"]
    assert largest is not None and total is not None and out is not None
    shape = statistics_shape(p)
    for name, x in (("softmax_max", largest), ("softmax_sum", total)):
        need(x.dtype == torch.float32, f"{name} must be float32, is {x.dtype}")
        need(tuple(x.shape) == shape, f"{name} has shape {list(x.shape)}; valid: {list(shape)}")
    want = list(query.shape)
    d, dv = p.query.shape[2], p.value.shape[2]
    want[-1] = want[-1] // d * dv
    for name, x in (("dy", dy), ("attention_in", out)):
        need(x.dtype == query.dtype, f"{name} must have the type of query, {query.dtype}; is {x.dtype}")
        need(list(x.shape) == want, f"{name} has shape {list(x.shape)}; valid: {want}")


def check_statistics(p: Problem, largest: Tensor, total: Tensor) -> None:
    """Raise Refused for statistics that no forward gives."""
    for name, x in (("softmax_max", largest), ("softmax_sum", total)):
        need(bool(x.isfinite().all()), f"not modelled: {name} that is not finite")
        need(bool((x == x[..., :1]).all()), f"{name} must hold each value 8 times")
    need(bool((total > 0).all()), "softmax_sum must be positive")
