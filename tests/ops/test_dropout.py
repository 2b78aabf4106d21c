"""Which attention weights are dropped: the bits of a tree of SplitMix64 generators, wherever they are computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp.ops.dropout import keep_mask

HEADS, QUERIES, KEYS = torch.arange(4), torch.arange(400), torch.arange(500)


def bits(seed=1, layer=2, heads=HEADS, document=3, q=QUERIES, k=KEYS, p=0.3):
    return keep_mask(seed, layer, heads, document, q, k, p)


def splitmix(seed, number):
    """Output of that number of the generator, in Python's own numbers."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_generator_is_splitmix64():
    """The first outputs that the authors' own program gives for the seed 1234567."""
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [splitmix(1234567, i) for i in range(5)] == want


@settings(max_examples=60, deadline=None)
@given(
    st.integers(-(2**63), 2**64), st.integers(0, 2**40), st.integers(0, 300), st.integers(0, 2**31),
    st.integers(0, 2**31), st.integers(0, 2**31), st.floats(0.0, 0.999),
)  # fmt: skip
def test_a_bit_is_what_the_tree_of_generators_says(seed, layer, head, document, q, k, p):
    state = seed % 2**64
    for number in (layer, head, document, q, k):
        state = splitmix(state, number)
    signed = state - 2**64 if state >= 2**63 else state
    want = signed >= round(p * 2.0**64) - 2**63
    got = keep_mask(seed, layer, torch.tensor([head]), document, torch.tensor([q]), torch.tensor([k]), p)
    assert got.shape == (1, 1, 1) and bool(got) == want


def test_any_part_in_any_order_has_the_same_bits():
    whole = bits()
    q, k, heads = torch.randperm(400)[:37], torch.arange(499, 3, -2), torch.tensor([2, 0])
    assert torch.equal(bits(heads=heads, q=q, k=k), whole[heads][:, q][:, :, k])


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_p_of_the_weights_are_dropped_in_all_and_for_each_head_query_and_key(p):
    """In all, for each head, query and key: within 5 standard deviations."""
    dropped = (~bits(p=p)).double()
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        share = dropped.mean(dims)
        count = dropped.numel() / share.numel()
        assert (share - p).abs().max() <= 5 * (p * (1 - p) / count) ** 0.5


def test_nothing_is_dropped_at_zero():
    assert bits(p=0.0).all()
