"""The fused operators of a layer and of AdamW through the real torch_npu: equal to torch's own operations to rounding, forward
and backward. The arithmetic is the stand-in's (tests/host_cann/oracle_layers.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_cp.config import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.ops.fused import OPERATORS, missing_operators, npu, plain
from mindspeed_cp.train import fused_operators
from mindspeed_cp.train.fused_operators import choose_fused_operators
from tests.host_cann import oracle_layers
from tests.host_cann.oracle_cases import LIMITS
from tests.host_cann.oracle_faults import set_fault

with megatron_imports():
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe import shared_experts

    from mindspeed_cp.megatron.adaptors.fused import FusedRMSNorm
    from mindspeed_cp.megatron.patches.swiglu import fused_swiglu

Function = Callable[[Any], Callable[..., Tensor]]


@pytest.fixture(autouse=True)
def calls() -> Iterator[dict[str, int]]:
    oracle_layers.calls.clear()
    yield oracle_layers.calls
    set_fault(None)


def angles(*shape: int, interleaved: bool = False) -> list[Tensor]:
    """cos and sin, equal for both channels of a pair."""
    half = torch.rand(*shape[:-1], shape[-1] // 2) * 6
    whole = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    return [whole.cos(), whole.sin()]


#: Name, function of a module of operators, inputs with gradients, and inputs without.
CASES: list[tuple[str, Function, list[tuple[int, ...]], list[Tensor]]] = [
    ("rms_norm", lambda m: lambda x, w: m.rms_norm(x, w, 1e-5), [(13, 1, 48), (48,)], []),
    ("rms_norm of heads", lambda m: lambda x, w: m.rms_norm(x, w, 1e-6), [(13, 1, 6, 16), (16,)], []),
    ("swiglu", lambda m: m.swiglu, [(13, 1, 50)], []),
    ("swiglu of tokens", lambda m: m.swiglu, [(13, 96)], []),
    ("rotary_mul", lambda m: m.rotary_mul, [(13, 6, 32)], angles(13, 1, 32)),
    ("rotary_mul, one head", lambda m: m.rotary_mul, [(13, 1, 34)], angles(13, 1, 34)),
    (
        "rotary_mul, interleaved",
        lambda m: lambda *xs: m.rotary_mul(*xs, True),
        [(13, 6, 32)],
        angles(13, 1, 32, interleaved=True),
    ),
    ("rotary_mul, a row", lambda m: m.rotary_mul, [(1, 6, 32)], angles(1, 1, 32)),
]


def run(function: Callable[..., Tensor], inputs: list[Tensor], given: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Output and gradients, fp64 on the CPU."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, *given)
    assert out.dtype == inputs[0].dtype
    return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, dout))]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("name", "function", "shapes", "given"), CASES, ids=[case[0] for case in CASES])
def test_equal_to_the_plain_operator(
    name: str,
    function: Function,
    shapes: list[tuple[int, ...]],
    given: list[Tensor],
    dtype: torch.dtype,
    calls: dict[str, int],
) -> None:
    """On the same values, to the plain operator on the same device and to fp64; the gradient comes with gaps."""
    inputs, tables = [torch.randn(shape).to(dtype) for shape in shapes], [x.to(dtype) for x in given]
    shape = function(plain)(*inputs, *tables).shape
    dout = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
    places: list[Callable[[Tensor], Tensor]] = [lambda x: x.to("npu"), lambda x: x.to("npu"), lambda x: x.double()]
    results = []
    for module, place in zip((npu, plain, plain), places, strict=True):
        whole = place(dout)
        gaps = whole[..., : shape[-1]] if whole.device.type == "npu" else whole[..., : shape[-1]].contiguous()
        results.append(run(function(module), [place(x) for x in inputs], [place(x) for x in tables], gaps))
    torch.npu.synchronize()
    assert sum(calls.values()) == 2  # one forward, one gradient
    for fused, same_device, exact in zip(*results, strict=True):
        size = max(1.0, float(exact.abs().max()))
        assert float((fused - exact).abs().max()) <= LIMITS[dtype] * size
        assert float((fused - same_device).abs().max()) <= LIMITS[dtype] * size


@pytest.mark.parametrize(("name", "function", "shapes", "given"), CASES[:5:2], ids=[case[0] for case in CASES[:5:2]])
def test_a_rank_without_rows(
    name: str, function: Function, shapes: list[tuple[int, ...]], given: list[Tensor], calls: dict[str, int]
) -> None:
    """The operators take no empty tensor."""
    inputs = [torch.randn(0, *shapes[0][1:], device="npu"), *(torch.randn(shape, device="npu") for shape in shapes[1:])]
    tables = [x[:0].to("npu") for x in given]
    dout = torch.zeros_like(function(plain)(*inputs, *tables))
    for x, y in zip(*(run(function(module), inputs, tables, dout) for module in (npu, plain)), strict=True):
        assert torch.equal(x, y)
    torch.npu.synchronize()
    assert not calls


def test_adamw_is_torchs(calls: dict[str, int]) -> None:
    """Over steps, with decay, for weights of several shapes; the state is the same, and either kind loads the other's."""
    start = [torch.randn(37, 5), torch.randn(11)]
    gradients = [[torch.randn_like(x) for x in start] for _ in range(5)]
    rates = dict(lr=0.03, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def weights(values: list[Tensor], device: str) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(x.detach().to(device).clone()) for x in values]

    fused, single = weights(start, "npu"), weights(start, "cpu")
    adams = [torch.optim.AdamW(fused, fused=True, **rates), torch.optim.AdamW(single, fused=False, **rates)]  # type: ignore[arg-type]
    for step, gradient in enumerate(gradients):
        for ours, adam in zip((fused, single), adams, strict=True):
            for weight, g in zip(ours, gradient, strict=True):
                weight.grad = g.to(weight.device)
            adam.step()
        torch.npu.synchronize()
        assert calls["aclnnApplyAdamWV2"] == 2 * (step + 1)
    for ours, theirs in zip(fused, single, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                adams[0].state[ours][key].cpu(), adams[1].state[theirs][key], rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_megatrons_swiglu_is_replaced_within_the_block(weighted: bool, has_bias: bool, calls: dict[str, int]) -> None:
    names = ("bias_swiglu_impl", "weighted_bias_swiglu_impl")
    before = [getattr(mlp, name) for name in names]
    x, bias = torch.randn(7, 1, 24, device="npu"), torch.randn(24, device="npu") if has_bias else None
    weights = torch.rand(7, 1, 1, device="npu")
    with fused_swiglu():
        assert shared_experts.bias_swiglu_impl is mlp.bias_swiglu_impl is not before[0]
        out = (
            mlp.weighted_bias_swiglu_impl(x, bias, weights, False) if weighted else mlp.bias_swiglu_impl(x, bias, False)
        )
    torch.npu.synchronize()
    assert calls["aclnnSwiGlu"] == 1 and [getattr(mlp, name) for name in names] == before
    want = plain.swiglu(x if bias is None else x + bias) * (weights if weighted else 1)
    torch.testing.assert_close(out.cpu(), want.cpu(), rtol=1e-5, atol=1e-6)


# --- the choice


def settings(**train: Any) -> Settings:
    return Settings(train={"device": "npu", **train})  # type: ignore[arg-type]


def test_everything_that_the_model_uses_is_fused() -> None:
    assert missing_operators() == {}
    chosen = choose_fused_operators(settings(), torch.device("npu", 0))
    assert chosen.used == tuple(OPERATORS) and chosen.missing == ()
    assert chosen.note() == "fused operators: RMSNorm, rotary positions, SwiGLU, AdamW"
    assert choose_fused_operators(settings(fused_operators=False), torch.device("npu", 0)).used == ()
    other = Settings(
        model={"normalization": "LayerNorm", "swiglu": False, "position_embedding_type": "alibi"},  # type: ignore[arg-type]
        train={"device": "npu", "fused_operators": True},  # type: ignore[arg-type]
    )
    assert choose_fused_operators(other, torch.device("npu", 0)).used == ("adamw",)


def test_an_older_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto goes on without the operator and says so, true refuses by its name."""
    monkeypatch.setattr(fused_operators, "missing_operators", lambda: {"swiglu": OPERATORS["swiglu"]})
    chosen = choose_fused_operators(settings(), torch.device("npu", 0))
    assert chosen.used == ("rms_norm", "rotary_mul", "adamw")
    assert chosen.note() == (
        "fused operators: RMSNorm, rotary positions, AdamW; this torch-npu lacks those for SwiGLU (npu::npu_swiglu)"
    )
    with pytest.raises(ConfigError) as caught:
        choose_fused_operators(settings(fused_operators=True), torch.device("npu", 0))
    assert str(caught.value).startswith(
        "train.fused_operators = true: this torch-npu has no npu::npu_swiglu (SwiGLU); use auto"
    )
    no_swiglu = settings(fused_operators=True).model_copy(
        update={"model": Settings().model.model_copy(update={"swiglu": False})}
    )
    assert choose_fused_operators(no_swiglu, torch.device("npu", 0)).used == ("rms_norm", "rotary_mul", "adamw")


def test_a_name_that_torch_npu_does_not_have_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "swiglu", "npu::npu_no_such_operator")
    assert missing_operators() == {"swiglu": "npu::npu_no_such_operator"}


def test_the_norms_parameters_are_torchs() -> None:
    assert list(FusedRMSNorm(8).state_dict()) == list(torch.nn.RMSNorm(8).state_dict()) == ["weight"]
