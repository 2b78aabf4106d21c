"""Gradients of keys and values that travel in bf16: half the bytes, sums in fp32, one rounding for each message."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan, register_algorithm
from mindspeed_cp.engine.agreement import plan_digest
from mindspeed_cp.plan import traffic
from tests.engine.cases import VARIANTS, Case, errors, run_here
from tests.engine.test_buffers import check

CASES = (
    Case((64, 31), 1, 4, 2),
    Case((129, 3, 0, 450), 1, 6, 2, 24, 16, dtype=torch.bfloat16),
    Case((300, 70), 1, 9, 3, window=(50, 0), alibi=True),
)
BF16 = ("reduce_dtype", "bfloat16")


def on(case: Case, ranks: int, variant: str) -> Case:
    """The case on so many ranks, by a variant of an algorithm, with gradients in bf16."""
    there = case.on(ranks, variant)
    return replace(there, options=(*there.options, BF16))


def variants_and_ranks() -> list[object]:
    return [
        pytest.param(variant, ranks, marks=() if ranks == 3 + i % 2 else pytest.mark.thorough)
        for i, variant in enumerate(VARIANTS)
        for ranks in (1, 2, 3, 4, 8)
    ]


@pytest.mark.parametrize(("variant", "ranks"), variants_and_ranks())
def test_bytes_sent_and_allocated_are_those_of_the_plan(variant: str, ranks: int) -> None:
    check([on(case, ranks, variant) for case in CASES], ranks)


@pytest.mark.parametrize(("variant", "ranks"), variants_and_ranks())
def test_only_what_travels_is_rounded(variant: str, ranks: int) -> None:
    """A message rounds by up to 2**-9 of its values; a ring rounds the sum again at each of its hops."""
    for case in (on(CASES[0], ranks, variant), on(CASES[2], ranks, variant)):
        plan, measured = case.plan(), errors(case, run_here(case), case.reference())
        assert measured["out"][0] <= 1e-5 and measured["dq"][0] <= 1e-5
        reduces = int(traffic(plan, 4)["reduce"].sum())
        hops = ranks if plan.algorithm in ("ring", "double_ring", "hybrid") else 1
        for name in ("dk", "dv"):
            assert (measured[name][1] > 1e-5) == (reduces > 0), (case, measured)
            assert measured[name][1] <= 2**-9 * hops, (case, measured)


def test_half_the_bytes_of_gradients() -> None:
    documents, attention = Documents([20000, 40]), AttentionConfig(4, 2, 16)
    for algorithm in ("ring", "direct", "all_gather", "hierarchical"):
        options = {"head_split": False} if algorithm == "hierarchical" else {}
        plain, half = (
            build_plan(documents, Topology(2, 2), attention, algorithm, **options, reduce_dtype=reduce_dtype)
            for reduce_dtype in ("float32", "bfloat16")
        )
        for name, factor in (("fetch_forward", 1), ("fetch_backward", 1), ("reduce", 2)):
            assert (traffic(plain, 2)[name] == factor * traffic(half, 2)[name]).all()
        assert traffic(half, 2)["reduce"].sum() > 0


def test_ranks_that_differ_have_other_plans() -> None:
    plans = [
        build_plan(Documents([50]), Topology(1, 2), AttentionConfig(2), "ring", reduce_dtype=reduce_dtype)
        for reduce_dtype in ("float32", "float32", "bfloat16")
    ]
    digests = [plan_digest(plan) for plan in plans]
    assert digests[0] == digests[1] != digests[2]


def test_other_types_and_options_of_the_same_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="reduce_dtype is 'float16'; valid: one of float32, bfloat16"):
        build_plan(Documents([50]), Topology(1, 2), AttentionConfig(2), "ring", reduce_dtype="float16")

    def build(documents, kv_documents, topology, attention, *, reduce_dtype: str = "x"):
        """Build nothing.

        Args:
            reduce_dtype: text.
        """

    with pytest.raises(ConfigError, match="option 'reduce_dtype' belongs to all algorithms"):
        register_algorithm("another", build)
