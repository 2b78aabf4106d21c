"""Which attention weights are dropped: the same wherever they are computed, and as good as independent."""

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


def test_any_part_in_any_order_is_the_same():
    whole = bits()
    q, k, heads = torch.randperm(400)[:37], torch.arange(499, 3, -2), torch.tensor([2, 0])
    assert torch.equal(bits(heads=heads, q=q, k=k), whole[heads][:, q][:, :, k])


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(p):
    """In all, for each head, query and key: within 5 standard deviations."""
    dropped = (~bits(p=p)).double()
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        share = dropped.mean(dims)
        count = dropped.numel() / share.numel()
        assert (share - p).abs().max() <= 5 * (p * (1 - p) / count) ** 0.5


def correlation(a, b):
    """In standard deviations of independent bits."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()) * a.numel() ** 0.5


NEIGHBOURS = [
    dict(seed=2), dict(seed=-1), dict(seed=1 + 2**32), dict(seed=2, layer=1), dict(layer=3), dict(layer=1), dict(document=4), dict(document=2),
    dict(heads=1), dict(heads=4), dict(q=1), dict(k=1), dict(k=64), dict(q=1, k=1), dict(q=1, k=-1),
]  # fmt: skip
MOVED = {"heads": HEADS, "q": QUERIES, "k": KEYS}


@pytest.mark.parametrize("other", NEIGHBOURS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(other, p):
    """Of another seed, layer, document, or so many heads, queries or keys on."""
    other = {name: MOVED[name] + value if name in MOVED else value for name, value in other.items()}
    assert abs(correlation(bits(p=p), bits(p=p, **other))) <= 5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_pairs_and_runs_are_as_frequent_as_in_independent_bits(p):
    """Dropped together with a neighbour in each direction, and four in a row."""
    dropped = ~bits(p=p)
    pairs = (dropped[:, :, 1:] & dropped[:, :, :-1], dropped[:, 1:] & dropped[:, :-1], dropped[1:] & dropped[:-1])
    four = dropped[:, :, 3:] & dropped[:, :, 2:-1] & dropped[:, :, 1:-2] & dropped[:, :, :-3]
    for both, expected in [(both, p**2) for both in pairs] + [(four, p**4)]:
        deviation = (
            3 * expected / both.numel()
        ) ** 0.5  # overlapping runs are correlated: up to three times the variance
        assert abs(float(both.double().mean()) - expected) <= 5 * deviation


def test_counts_of_rows_are_spread_as_binomial_counts_are():
    """Chi-squared over 1,600 rows of 500 keys: neither too even nor too uneven."""
    p = 0.3
    counts = (~bits(p=p)).sum(-1).double()
    chi = float(((counts - 500 * p) ** 2 / (500 * p * (1 - p))).sum())
    assert abs(chi - counts.numel()) <= 5 * (2 * counts.numel()) ** 0.5


def test_nothing_is_dropped_at_zero():
    assert bits(p=0.0).all()
