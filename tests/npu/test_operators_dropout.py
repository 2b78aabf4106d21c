"""Dropout of the fused attention operators through the real torch_npu: whose numbers decide, and that the mask is used.

That a mask reaches forward and gradient alike, and with which factor, is in test_operators.py (cases "dropout ...")."""

from __future__ import annotations

import pytest
import torch
import torch_npu

from tests.host_cann import oracle
from tests.host_cann.oracle_cases import PACKED, compare, inputs_of, reference
from tests.npu.operators import UNEVEN, on_npu

DROPPED = next(case for case in PACKED if case.name == "dropout, mode 3")


def dropped(**more):
    _, leaves, _, options = on_npu(DROPPED, torch.float32)
    return torch_npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options, **more)


def test_every_call_draws_other_weights_and_a_seed_draws_them_again():
    torch.npu.manual_seed(7)
    first, two = dropped(), dropped()
    torch.npu.manual_seed(7)
    again = dropped()
    assert first[4] == 7 and first[4:7] == again[4:7] != two[4:7]
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], two[0])


def test_a_seed_of_the_caller_is_overwritten():
    """By the generator's, as torch_npu does it on this kind of device unless a mask is given."""
    torch.npu.manual_seed(7)
    assert dropped(seed=99, offset=3)[4] == 7


@pytest.fixture
def calls():
    oracle.calls.clear()
    yield oracle.calls


@pytest.mark.parametrize("how", [dict(gen_mask_parallel=False), dict(sync=True)], ids=str)
def test_the_stream_of_the_mask_changes_nothing(how):
    torch.npu.manual_seed(7)
    want = dropped()
    torch.npu.manual_seed(7)
    got = dropped(**how)
    assert got[4:7] == want[4:7] and torch.equal(got[0], want[0])


def test_a_mask_of_the_caller_is_used(calls):
    numels = oracle.dropout_numels(4, DROPPED.sizes)
    bits = oracle.dropout_bits(5, 6, numels, 0.3)
    results = dropped(dropout_mask=bits.to("npu"), seed=5, offset=6)
    want = reference(DROPPED, inputs_of(DROPPED, torch.float32), bits)["out"]
    compare({"out": results[0]}, {"out": want}, torch.float32)
    torch.npu.synchronize()
    assert results[4:7] == (5, 6, numels) and calls[-1].drop_bytes == bits.numel()


def test_without_dropout_there_is_no_mask(calls):
    _, leaves, _, options = on_npu(UNEVEN, torch.float32)
    torch_npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    torch.npu.synchronize()
    assert calls[-1].drop_bytes == 0
