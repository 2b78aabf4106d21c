"""Messages of a step as one all-to-all-v: the real ProcessGroupHCCL over the stand-in, 3 and 4 ranks, against fp64."""

from __future__ import annotations

import pytest

from mindspeed_cp.plan.program import Exchanges
from tests.engine.cases import worst
from tests.engine.test_exchange import CASES, on
from tests.npu.ranks import start
from tests.npu.test_table import ROUGH, attend_all, tensors


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.thorough)])
def test_hccl_agrees_with_fp64_by_all_to_all_v_alone(size: int) -> None:
    """Ragged rows, ranks without rows, several rounds under way, streams that are delayed at random. A rank makes one
    call for each exchange of the plans, and no batch of sends and receives."""
    cases = [on(CASES[i], size, prefetch=1 + i % 2) for i in (0, 1, 4)]
    ran = start(size, attend_all, cases, False, environment=ROUGH)
    parts = ran.values()
    for i, case in enumerate(cases):
        assert worst(case, [tensors(part[i]) for part in parts]) <= 1e-5, case
    plans = [case.plan() for case in cases]
    expected = sum(len(Exchanges.of(program)) for plan in plans for program in (plan.forward, plan.backward))
    for rank in range(size):
        names = [call["name"] for call in ran.calls(rank)]
        assert names.count("HcclAlltoAllV") == expected and "HcclBatchSendRecv" not in names
