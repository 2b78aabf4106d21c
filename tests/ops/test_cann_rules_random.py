"""The calls that the backend makes of random plans break none of CANN's rules."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import islice

import pytest

from mindspeed_cp.ops.attention.lowering.fused_call import CallLimits
from mindspeed_cp.ops.attention.lowering.fused_lowering import lower_to_fused_calls
from mindspeed_cp.ops.attention.npu import backend
from tests.host_cann import cann_rules
from tests.host_cann.cann_calls import UpdateCall
from tests.ops import lowered_calls as lowered_calls_module
from tests.ops.lowered_calls import lowered_calls, posted_lists


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_lowered_calls_of_random_plans_break_no_rule(count):
    kinds: Counter[object] = Counter()
    for call in islice(lowered_calls(seed=count), count):
        cann_rules.check(call)
        if isinstance(call, UpdateCall):
            kinds["update"] += 1
            continue
        direction = "gradient" if call.gradient else "forward"
        kinds.update([direction, (call.layout, call.sparse_mode), call.query.dtype, f"pse {call.pse is not None}"])
        kinds.update([f"dropout {call.keep_prob < 1}", f"groups {call.sizes.heads > call.sizes.kv_heads}"])
        no_query = any(sq == 0 for sq, _ in call.sequences)
        kinds.update([f"wide {call.sizes.d > call.sizes.dv}", f"keys of no query {no_query}"])
    assert kinds["forward"] + kinds["gradient"] + kinds["update"] == count
    seen = {kind for kind, number in kinds.items() if number >= count / 2000}
    assert seen >= {
        "forward", "gradient", "update", ("TND", 0), ("TND", 3), ("TND", 4), ("BSND", 0), ("BSND", 1), "float32", "bfloat16",
        "float16", "pse True", "dropout True", "groups True", "wide True", "keys of no query True",
    }, kinds  # fmt: skip


def test_a_lowering_that_breaks_a_rule_is_found(monkeypatch):
    """A window of one key as a band of TND, whose gradient CANN refuses."""
    monkeypatch.setattr(backend, "lower_to_masks", partial(lower_to_fused_calls, limits=CallLimits()))
    broken = (cann_rules.breaches(call) for call in islice(lowered_calls(seed=1), 2_000))
    assert [breach.rule for breach in next(filter(None, broken))] == ["band-gradient"]


def test_lists_of_messages_of_random_plans_break_no_rule():
    several = 0
    for call in islice(posted_lists(seed=0), 2_000):
        assert cann_rules.breaches(call) == [], call
        several += len(call.items) > 1
    assert several > 500


def test_a_step_in_one_launch_breaks_a_rule(monkeypatch):
    """Keys and values to one rank in one list."""
    monkeypatch.setattr(lowered_calls_module, "split_launches", lambda transfers: [range(len(transfers))])
    broken = (cann_rules.breaches(call) for call in islice(posted_lists(seed=0), 100) if call.items)
    assert [breach.rule for breach in next(filter(None, broken))] == ["batch-duplicate"]
