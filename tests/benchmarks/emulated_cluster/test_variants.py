"""Plans and batches of the cluster benchmark."""

import pytest

from benchmarks.cluster.scale import VARIANTS, Batch, Scale, narrowed, plan_for
from mindspeed_cp import AttentionConfig, Documents, Plan, verify_plan
from mindspeed_cp.plan import traffic

SCALE = Scale("a800", 4, AttentionConfig(8, 4, 128), 2, 100_000_000)
BATCH = Batch("made up", 0, (900, 40, 333, 17, 700, 58))
LONG = Batch("made up", 1, (30_000, *[100] * 20))  # takes hierarchical plans of several parts


@pytest.mark.parametrize("batch", [BATCH, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", VARIANTS)
def test_narrow_rows_move_as_the_planned_ones_do(name, batch):
    plan = plan_for(name, batch, SCALE, 2)
    narrow = narrowed(plan, SCALE)
    assert narrow.documents == Documents(list(batch.lengths)) and narrow.attention == SCALE.wire
    assert (traffic(narrow)["total"] * 64 == traffic(plan)["total"]).all()
    verify_plan(narrow)


def test_plans_of_parts_become_narrow_in_all_their_parts():
    def attentions(plan: Plan) -> set[AttentionConfig]:
        own = {plan.attention, plan.forward.attention, plan.backward.attention}
        return own.union(*(attentions(part) for part in plan.parts))

    plans = [narrowed(plan_for(name, LONG, SCALE, 2), SCALE) for name in VARIANTS]
    assert any(plan.parts for plan in plans)
    assert all(attentions(plan) == {SCALE.wire} for plan in plans)
