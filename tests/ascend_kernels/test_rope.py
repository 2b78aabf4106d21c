"""Rotary positions while rows are gathered."""

from __future__ import annotations

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.ascend_kernels import rope_gather


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (40, 12), (64, 32), (8, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_pair_turns_by_its_position(implementation, dim, half, interleaved, dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(30, 3, dim, generator=generator).to(dtype)
    rows = torch.randint(0, 30, (47,), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 200_000, (47,), generator=generator, dtype=torch.int32)
    frequencies = 10000.0 ** -(torch.arange(half) / max(1, half))
    found = rope_gather(x, positions, frequencies, rows, 1.25, interleaved, implementation=implementation)
    given = x[rows.long()].double()
    pairs = given[..., : 2 * half]
    low, high = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else (pairs[..., :half], pairs[..., half:])
    turned = torch.complex(low, high) * torch.polar(
        torch.tensor(1.25, dtype=torch.float64), (positions[:, None].float() * frequencies).double()
    ).unsqueeze(1)
    parts = [turned.real, turned.imag]
    want = torch.cat(
        [torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1), given[..., 2 * half :]], -1
    )
    assert found.dtype == dtype and torch.allclose(found.double(), want, atol=2e-5 if dtype == torch.float32 else 4e-2)
    back = rope_gather(found, positions, frequencies, None, 1 / 1.25, interleaved, True, implementation)
    assert torch.allclose(back.double(), given, atol=2e-5 if dtype == torch.float32 else 6e-2)


def test_nothing_is_turned_to_nothing(implementation) -> None:
    out = rope_gather(torch.zeros(3, 2, 8), torch.zeros(0, dtype=torch.int32), torch.ones(4), torch.zeros(0, dtype=torch.int32), implementation=implementation)  # fmt: skip
    assert out.shape == (0, 2, 8)


def test_what_does_not_go_together_is_refused() -> None:
    x, positions = torch.zeros(3, 2, 8), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ConfigError, match="the number of frequencies is 5; valid: at most 4"):
        rope_gather(x, positions, torch.ones(5))
    with pytest.raises(ConfigError, match="the number of positions is 2; valid: 3"):
        rope_gather(x, positions[:2], torch.ones(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.arange(6, dtype=torch.int32)[::2]}, r"positions is of strides \[2\]; valid: contiguous"),
        ({"positions": torch.arange(3)}, "positions's type is torch.int64; valid: torch.int32"),
        ({"positions": torch.zeros(3, dtype=torch.int32, device="meta")}, "positions is on meta; valid: on cpu"),
        ({"frequencies": torch.ones(8)[::2]}, r"frequencies is of strides \[2\]; valid: contiguous"),
        ({"frequencies": torch.ones(4).double()}, "frequencies's type is torch.float64; valid: torch.float32"),
        ({"rows": torch.arange(6, dtype=torch.int32)[::2]}, r"rows is of strides \[2\]; valid: contiguous"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, r"rows's shape is \[2\]; valid: \[3\]"),
        ({"rows": torch.zeros(3)}, "rows's type is torch.float32; valid: torch.int32"),
        ({"x": torch.zeros(3, 2, 8).int()}, "x's type is torch.int32; valid: a floating type"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_what_kernels_would_misread_is_refused(implementation, change, message) -> None:
    given = dict(x=torch.zeros(3, 2, 8), positions=torch.zeros(3, dtype=torch.int32), frequencies=torch.ones(4))
    with pytest.raises(ConfigError, match=message):
        rope_gather(**(given | change), implementation=implementation)
