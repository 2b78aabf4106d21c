"""Calls are compared over HCCL without a wait of the host; what differs is read by the next call or a backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.engine.agreement import CallAgreement
from tests.engine.cases import Case
from tests.npu.ranks import run

CASE = Case((61, 5, 0, 44), 3)


def compared(rank: int, size: int) -> list[str | None]:
    """What two calls are told in which all ranks agree, and one after a call in which rank 1 had another plan."""
    plan, other = CASE.plan(), replace(CASE, lengths=(5, 61, 0, 44)).plan()
    agreement = CallAgreement(None, 600.0, torch.device("npu", rank))
    results: list[str | None] = []
    for own in (plan, plan, other if rank == 1 else plan):
        agreement.check(own, torch.float32)
        torch.npu.synchronize()
        results.append(None)
    with pytest.raises(ConfigError) as caught:
        agreement.read_finished()
    return [*results, str(caught.value)]


def test_ranks_with_another_plan_are_named_late() -> None:
    for rank, (*agreed, text) in enumerate(run(3, compared).values()):
        assert agreed == [None] * 3 and text is not None
        assert text.startswith(f"rank {rank}: ranks ran different plans in the same call of attention: ")
        assert "rank 1 has one; ranks 0, 2 have one" in text
