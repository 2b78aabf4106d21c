"""Numbers that go with a call: those of a bias, and the statistics that the gradient is given."""

from __future__ import annotations

from torch import Tensor

from tests.host_cann.cann_rule import need
from tests.host_cann.oracle_problem import Problem


def statistics_shape(p: Problem) -> tuple[int, ...]:
    """Shape of softmax_max and softmax_sum."""
    if p.packed:
        return p.query.shape[0], p.heads, 8
    return len(p.sequences), p.heads, p.sequences[0].sizes[0], 8


def check_slopes(p: Problem) -> None:
    """Raise Refused for a bias that is not a number."""
    if p.pse is not None and not p.pse.is_meta:
        need(bool(p.pse.isfinite().all()), "not modelled: pse that is not finite")


def check_statistics(p: Problem, largest: Tensor, total: Tensor) -> None:
    """Raise Refused for statistics that no forward gives."""
    for name, x in (("softmax_max", largest), ("softmax_sum", total)):
        need(bool(x.isfinite().all()), f"not modelled: {name} that is not finite")
        need(bool((x == x[..., :1]).all()), f"{name} must hold each value 8 times")
    need(bool((total > 0).all()), "softmax_sum must be positive")
