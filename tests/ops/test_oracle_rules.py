"""What the oracle of the stand-in for CANN refuses: every rule of the operators, by a call that breaks it."""

from __future__ import annotations

import pytest
import torch

from tests.host_cann import oracle
from tests.host_cann.oracle_wrong import WRONG, arguments, sound

STATISTICS = dict(
    softmax_max=torch.zeros(32, 4, 8), softmax_sum=torch.ones(32, 4, 8), attention_in=torch.zeros(32, 4, 32)
)


@pytest.fixture(autouse=True)
def calls():
    oracle.calls.clear()
    return oracle.calls


@pytest.mark.parametrize("layout", ["TND", "BNSD"])
def test_the_sound_call_is_accepted(layout, calls):
    """So that a wrong one is refused for what was changed."""
    oracle.fused_attention(**sound(layout))
    assert len(calls) == 1


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_call_is_refused(wrong, calls):
    with pytest.raises(oracle.Refused, match=wrong.says):
        oracle.fused_attention(**arguments(wrong))
    assert not calls


def gradient(**change):
    call = sound("TND") | STATISTICS | dict(dy=torch.ones(32, 4, 32)) | change
    return oracle.fused_attention_grad(**call)


def test_a_sound_gradient_is_accepted(calls):
    gradient()
    assert [x.operator for x in calls] == ["fused_attention_grad"]


@pytest.mark.parametrize("name", STATISTICS)
def test_the_gradient_needs_what_the_forward_gave(name, calls):
    with pytest.raises(oracle.Refused, match=f"needs {name}"):
        gradient(**{name: None})
    assert not calls


UNEQUAL = torch.ones(32, 4, 8).index_fill(2, torch.tensor([3]), 2.0)


@pytest.mark.parametrize("change, says", [
    (dict(softmax_max=torch.zeros(32, 4)), r"valid: \[32, 4, 8\]"),
    (dict(softmax_sum=torch.ones(32, 4, 8).bfloat16()), "softmax_sum must be float32"),
    (dict(softmax_max=torch.full((32, 4, 8), -torch.inf)), "softmax_max that is not finite"),
    (dict(softmax_sum=torch.zeros(32, 4, 8)), "softmax_sum must be positive"),
    (dict(softmax_sum=UNEQUAL), "each value 8 times"),
    (dict(attention_in=torch.zeros(32, 4, 16)), "attention_in has shape"),
    (dict(dy=torch.zeros(32, 4, 32).bfloat16()), "dy must have the type of query"),
])  # fmt: skip
def test_a_wrong_gradient_is_refused(change, says, calls):
    with pytest.raises(oracle.Refused, match=says):
        gradient(**change)
    assert not calls


BITS = oracle.dropout_bits(1, 2, oracle.dropout_numels(4, [(20, 20), (12, 12)]), 0.5)


@pytest.mark.parametrize("change, says", [
    (dict(keep_prob=0.5), "needs the dropout mask"),
    (dict(keep_prob=0.5, drop_mask=BITS[:-1]), "one bit for each weight"),
    (dict(keep_prob=0.5, drop_mask=BITS.bool()), "must be uint8"),
    (dict(drop_mask=BITS), "not modelled: a dropout mask with keep_prob 1"),
])  # fmt: skip
def test_dropout_needs_its_bits(change, says):
    with pytest.raises(oracle.Refused, match=says):
        oracle.fused_attention(**sound("TND") | change)
    assert oracle.fused_attention(**sound("TND") | dict(keep_prob=0.5, drop_mask=BITS))[0].isfinite().all()


OUT, STATS = torch.zeros(6, 2, 64), torch.ones(6, 2, 8)
SBH, OF_SBH = torch.zeros(6, 1, 128), torch.ones(1, 2, 6, 8)
TND = dict(input_layout="TND", actual_seq_qlen=torch.tensor([0, 2, 6]))


@pytest.mark.parametrize("parts, options, says", [
    ((OUT, STATS), TND | dict(input_layout="BSH"), "valid: SBH, TND"),
    ((OUT, STATS), TND | dict(input_softmax_layout="BSH"), "valid: '', SBH, TND"),
    ((OUT, STATS), TND | dict(actual_seq_qlen=None), "needs actual_seq_qlen"),
    ((OUT, STATS), TND | dict(actual_seq_qlen=torch.tensor([0, 2, 5])), "does not cover 6 rows"),
    ((OUT, STATS), TND | dict(actual_seq_qlen=torch.tensor([2, 6])), "does not begin with 0"),
    ((OUT, STATS), TND | dict(actual_seq_qlen=torch.tensor([0, 2, 6]).int()), "must be int64"),
    ((OUT[..., :32], STATS), TND, "multiples of 64"),
    ((OUT.double(), STATS), TND, "share one type"),
    ((OUT, STATS.half()), TND, "must be float32"),
    ((OUT, STATS[:, :1]), TND, r"valid: \[6, 2, 8\]"),
    ((SBH, STATS), {}, r"valid: \[B, N, S, 8\]"),
])  # fmt: skip
def test_a_wrong_ring_update_is_refused(parts, options, says, calls):
    out, stats = parts
    with pytest.raises(oracle.Refused, match=says):
        oracle.ring_attention_update(out, stats, stats, out, stats, stats, **options)
    assert not calls


def test_a_sound_ring_update_is_accepted(calls):
    for out, stats, options in ((OUT, STATS, TND), (SBH, OF_SBH, {})):
        oracle.ring_attention_update(out, stats, stats, out, stats, stats, **options)
    assert [x.layout for x in calls] == ["TND", "SBH"]
