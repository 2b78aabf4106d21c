"""The cuda backend on whole plans, all ranks in this process, against dense attention in fp64. Flash attention is a test
double (flash_double.py) and the kernel of tiles its torch implementation: no GPU is in these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from itertools import product
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.isolated_rank import attend_virtually
from mindspeed_cp import AttentionConfig, ConfigError
from mindspeed_cp.cluster import KernelTime
from mindspeed_cp.ops.attention.backends import BACKENDS, backend_for_device
from mindspeed_cp.ops.attention.cuda import flash4, flash_attention
from mindspeed_cp.ops.attention.cuda import flash_attention as flash
from mindspeed_cp.ops.attention.cuda.backend import H200_TIMES, CudaAttention, fastest_kernel
from mindspeed_cp.ops.attention.cuda.flash_attention import AtenFlashOperator, CudaFlashAttention, FlashArguments
from mindspeed_cp.ops.attention.lowering.fused_call import MIN_COPIES
from mindspeed_cp.ops.attention.operator import attention, attention_backward
from tests.engine.cases import Case
from tests.engine.draw import problem
from tests.ops.flash_double import DoubleFlash, DoubleFlash4, as_torch_reads
from tests.ops.test_npu_backend import EXACT, HALF, compare, run
from tools import capabilities

CELLS = [cell for cell in capabilities.all_cells() if cell.backend == "cuda" and capabilities.unsupported(cell) is None]
STILL = [cell for cell in CELLS if cell.dropout == "none"]
RANKS = st.sampled_from((1, 2, 3, 4, 5, 8))


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(STILL),
    RANKS,
    st.sampled_from(("auto", "auto", "tiles")),
    st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
    st.randoms(use_true_random=False),
)
def test_any_plan_agrees_with_fp64(cell, ranks, kernel, dtype, rng) -> None:
    case = replace(problem(cell, ranks, rng), dtype=dtype)
    limits = replace(flash_attention.FLASH_LIMITS, min_copies=rng.choice((0, MIN_COPIES)))
    with patch.object(flash_attention, "FLASH_LIMITS", limits):
        compare(case, CudaAttention(kernel, DoubleFlash()), EXACT if dtype == torch.float32 else HALF)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([cell for cell in CELLS if cell.dropout == "some"]), RANKS, st.randoms(use_true_random=False))
def test_the_backward_drops_what_the_forward_dropped(cell, ranks, rng) -> None:
    """The output is linear in the values, the scores in queries and in keys: <dout, out> = <v, dv> and <q, dq> = <k, dk>,
    if and only if both directions drop the same."""
    case = problem(cell, ranks, rng)
    q, k, v, dout = (x.double() for x in case.inputs())
    (out, _, dq, dk, dv), _ = run(case, CudaAttention("auto", DoubleFlash()))
    sides = [((a.double() * b).sum().item(), (c.double() * d).sum().item()) for a, b, c, d in (
        (out, dout, dv, v), (dq, q, dk, k)
    )]  # fmt: skip
    for actual, other in sides:
        assert abs(actual - other) <= 1e-4 * max(1.0, abs(actual), float(dout.norm()) * float(out.double().norm()))


def test_something_is_dropped() -> None:
    case = Case((60, 9), 3, dropout=0.5)
    (dropped, *_), _ = run(case, CudaAttention("auto", DoubleFlash()))
    (whole, *_), _ = run(replace(case, dropout=0.0), CudaAttention("auto", DoubleFlash()))
    assert float((dropped - whole).abs().max()) > 0.1


def test_a_packed_ring_is_two_calls_a_step_at_most_whatever_the_documents() -> None:
    double = DoubleFlash()
    case = Case(tuple([37, 1, 90, 4, 61, 8, 8, 23] * 4), 4)
    attend_virtually(case.plan(), *case.inputs(), CudaAttention("auto", double))
    steps = sum(len(np.unique(case.plan().forward.tiles(rank)["step"])) for rank in range(4))
    assert len(double.calls) <= 2 * steps
    assert {call.window for call in double.calls} <= {(-1, -1), (-1, 0)}


def test_a_window_in_a_step_of_few_keys() -> None:
    """More queries than keys, under a limit on the left alone: what torch makes of the other side must hide nothing.
    And one query for each of the sequences beside gaps, which torch would view as [sequences, heads]."""
    case = Case((1500, 97), 3, 2, 1, window=(400, 0))
    compare(case, CudaAttention("auto", DoubleFlash()), EXACT)
    tiny = Case((3, 2, 3, 0, 2, 12), 2, 8, 1, algorithm="double_ring")
    compare(tiny, CudaAttention("auto", DoubleFlash()), EXACT)


def test_the_double_reads_windows_as_torch_does() -> None:
    """What would go wrong with max_seqlen_k as the longest sequence of keys."""
    cu = torch.tensor([0, 5], dtype=torch.int32)
    assert as_torch_reads(FlashArguments(cu, cu, 9, 5, (0, -1), 1.0, 0.0)) == (0, 5)
    assert as_torch_reads(FlashArguments(cu, cu, 9, 5, (-1, 6), 1.0, 0.0)) == (-1, -1)
    assert as_torch_reads(FlashArguments(cu, cu, 9, 9, (-1, 6), 1.0, 0.0)) == (9, 6)
    assert as_torch_reads(FlashArguments(cu, cu, 9, 9, (-1, 0), 1.0, 0.0)) == (9, 0)


CONFIGS = {
    "plain": AttentionConfig(4),
    "ALiBi": AttentionConfig(4, alibi=True),
    "wide": AttentionConfig(4, head_dim=264),
    "dropout": AttentionConfig(4, dropout=0.1),
}


@pytest.mark.parametrize(
    ("config", "dtype", "kernels"),
    [
        ("plain", torch.bfloat16, ("flash4", "flash", "tiles")),
        ("plain", torch.float16, ("flash4", "flash", "tiles")),
        ("plain", torch.float32, ("tiles",)),
        ("ALiBi", torch.bfloat16, ("tiles",)),
        ("wide", torch.bfloat16, ("tiles",)),
        ("dropout", torch.bfloat16, ("flash",)),
    ],
)
def test_kernels_that_may_serve(
    config: str, dtype: torch.dtype, kernels: tuple[str, ...], flash_4: DoubleFlash4, gpu: dict[str, Any]
) -> None:
    backend = CudaAttention()
    assert backend.kernels_for(CONFIGS[config], dtype) == kernels
    backend.check(CONFIGS[config], dtype)
    gpu["flash-attn-4"] = None
    flash4.flash_4_unavailable_reason.cache_clear()
    assert backend.kernels_for(CONFIGS[config], dtype) == tuple(name for name in kernels if name != "flash4")


@pytest.fixture
def flash_4(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> DoubleFlash4:
    """flash-attn-4 on a Hopper GPU."""
    gpu["flash-attn-4"] = flash4.RELEASE
    double = DoubleFlash4()
    for name, module in (("flash_attn", ModuleType("flash_attn")), ("flash_attn.cute", ModuleType("flash_attn.cute"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", double)
    return double


#: flash-attn-4 takes no fp32, no ALiBi and no dropout.
FLASH_4_CELLS = [cell for cell in STILL if cell.bias == "none"]


class OnCpu(CudaAttention):
    """flash-attn-4, that is its double, on tensors of a CPU."""

    name = "cpu"

    def check_device(self, device: torch.device) -> None:
        pass


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(FLASH_4_CELLS),
    RANKS,
    st.sampled_from((torch.bfloat16, torch.float16)),
    st.randoms(use_true_random=False),
)
def test_any_plan_agrees_with_fp64_by_flash_attn_4(flash_4: DoubleFlash4, cell, ranks, dtype, rng) -> None:
    case = replace(problem(cell, ranks, rng), dtype=dtype)
    compare(case, OnCpu("flash4"), HALF)


def test_mla_widths_reach_flash_attn_4_as_they_are(flash_4: DoubleFlash4) -> None:
    """192 and 128 channels need no padding; 40 would have a wrong gradient and become 64."""
    for widths, seen in (((192, 128), 192), ((40, 40), 64), ((200, 40), 256)):
        compare(Case((60, 9), 2, 2, 1, *widths, dtype=torch.bfloat16), OnCpu("flash4"), HALF)
        assert flash_4.calls[-1][0][2] == seen


def test_flash_attn_4_is_deterministic_where_torch_is_asked(flash_4: DoubleFlash4) -> None:
    case = Case((60, 9), 2, 2, 1, 64, 64, dtype=torch.bfloat16)
    for wanted in (True, False):
        torch.use_deterministic_algorithms(wanted)
        try:
            compare(case, OnCpu("flash4"), HALF)
        finally:
            torch.use_deterministic_algorithms(False)
        assert flash_4.deterministic == wanted


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"flash-attn-4": None}, "flash-attn-4 is not installed; install flash-attn-4==4.0.0b36"),
        ({"flash-attn-4": "4.0.0b20"}, "flash-attn-4 is 4.0.0b20, and its functions differ between releases; install"),
        ({"capability": (8, 0)}, r"needs compute capability 9 or 10 \(Hopper, Blackwell\); this GPU has 8.0"),
        ({"broken": True}, "flash-attn-4 cannot be imported: undefined symbol"),
    ],
)
def test_why_flash_attn_4_is_not_taken(
    facts: dict[str, Any], says: str, flash_4: DoubleFlash4, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.update(facts)
    if "broken" in facts:

        def broken() -> None:
            raise ImportError("undefined symbol")

        monkeypatch.setattr(flash4, "_interface", broken)
    with pytest.raises(ConfigError, match=f"kernel 'flash4' of the cuda backend: .*{says}.*; or use kernel 'auto'"):
        CudaAttention("flash4").check_device(torch.device("cuda"))
    CudaAttention().check_device(torch.device("cuda"))
    assert CudaAttention().kernels_for(AttentionConfig(4), torch.bfloat16) == ("flash", "tiles")


LONG, PACKED = (4096,), tuple([60] * 60)


@pytest.mark.parametrize(
    ("lengths", "ranks", "algorithm", "kernels", "fastest"),
    [
        (LONG, 1, "ring", ("flash4", "flash", "tiles"), "flash4"),
        (LONG, 1, "ring", ("flash", "tiles"), "flash"),
        (PACKED, 1, "ring", ("flash", "tiles"), "tiles"),
        (tuple([900] * 8), 8, "ring", ("flash4", "flash", "tiles"), "tiles"),
        (tuple([900] * 8), 8, "all_gather", ("flash4", "flash", "tiles"), "flash4"),
    ],
)
def test_the_fastest_kernel_by_the_measured_times_of_an_h200(
    lengths: tuple[int, ...], ranks: int, algorithm: str, kernels: tuple[str, ...], fastest: str
) -> None:
    case = Case(lengths, ranks, algorithm=algorithm)
    tiles = case.plan().forward.tiles(0)
    assert fastest_kernel(tiles, case.attention, "forward", kernels, H200_TIMES) == fastest


def test_times_of_a_calibration_decide() -> None:
    """By direction, and without sizes at which a kernel was not measured."""
    tiles, config = Case((61,), 1).plan().forward.tiles(0), AttentionConfig(4)
    times = [
        KernelTime(kernel="flash", rows=64, keys=64, forward=1.0, backward=1.0),
        KernelTime(kernel="tiles", rows=64, keys=64, forward=2.0, backward=0.5),
        KernelTime(kernel="tiles", rows=60, keys=60, forward=0.1, backward=9.0),
    ]
    assert fastest_kernel(tiles, config, "forward", ("flash", "tiles"), times) == "flash"
    assert fastest_kernel(tiles, config, "backward", ("flash", "tiles"), times) == "tiles"
    assert fastest_kernel(tiles, config, "forward", ("flash4", "tiles"), times) == "flash4"
    assert fastest_kernel(tiles[:0], config, "forward", ("flash", "tiles"), times) == "flash"
    lowered = CudaAttention(kernel_times=tuple(times)).lower("backward", tiles, 61, config, torch.bfloat16)
    assert type(lowered[0, 0][0]).__name__ == "StepTiles"


@pytest.mark.parametrize(
    ("kernel", "config", "dtype", "says"),
    [
        (
            "flash",
            AttentionConfig(4, alibi=True),
            torch.bfloat16,
            "alibi is given; valid for flash attention: False, or",
        ),
        ("flash", AttentionConfig(4), torch.float32, "dtype is float32; valid for flash attention: bfloat16, float16"),
        (
            "flash",
            AttentionConfig(4, head_dim=512),
            torch.float16,
            "head_dim is 512; valid for flash attention: up to 256",
        ),
        ("auto", AttentionConfig(4, alibi=True, dropout=0.1), torch.bfloat16, "alibi.*since attention.dropout is 0.1"),
        ("auto", AttentionConfig(4, dropout=0.1), torch.float32, "dtype is float32.*since attention.dropout is 0.1"),
        ("tiles", AttentionConfig(4, dropout=0.1), torch.bfloat16, "the tile kernel has no dropout"),
        ("auto", AttentionConfig(4), torch.float64, "float64"),
    ],
)
def test_what_is_refused(kernel: str, config: AttentionConfig, dtype: torch.dtype, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CudaAttention(kernel).check(config, dtype)


def test_bad_options_and_devices() -> None:
    with pytest.raises(ConfigError, match=r"cuda\.kernel is 'fast'; valid: auto, flash4, flash, tiles"):
        CudaAttention("fast")
    assert backend_for_device("cuda") is BACKENDS["cuda"]
    with pytest.raises(ConfigError, match="'cuda' does not run on tensors of device 'cpu'"):
        backend_for_device("cpu", "cuda")
    with pytest.raises(ConfigError, match=r"backend is 'cuda' and tensors are on cpu; valid: cuda"):
        CudaAttention().check_device(torch.device("cpu"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A GPU of which only the capability is known, and the release of flash-attn-4 that is installed, or None."""
    facts: dict[str, Any] = {"capability": (9, 0), "flash-attn-4": None}
    real = metadata.version

    def version(name: str) -> str:
        if name != "flash-attn-4":
            return real(name)
        if facts[name] is None:
            raise metadata.PackageNotFoundError(name)
        return str(facts[name])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: facts["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "T4")
    monkeypatch.setattr(flash, "has_triton", lambda: True)
    monkeypatch.setattr(metadata, "version", version)
    caches = flash.check_device, flash4.flash_4_unavailable_reason, flash4._interface
    for cache in caches:
        cache.cache_clear()
    yield facts
    for cache in caches:
        cache.cache_clear()


def test_what_a_gpu_lacks_is_said_before_anything_is_sent(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    CudaAttention().check_device(torch.device("cuda", 0))
    gpu["capability"] = (7, 5)
    with pytest.raises(ConfigError, match=r"on T4 of compute capability 7\.5; valid: 8\.0 or later"):
        CudaAttention("tiles").check_device(torch.device("cuda", 1))
    gpu["capability"] = (8, 0)
    monkeypatch.setattr(flash, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="the package triton is not installed; install it, or use backend 'cpu'"):
        CudaAttention().check_device(torch.device("cuda", 2))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 2)])
def test_torch_takes_the_calls(window: tuple[int, int]) -> None:
    """Arguments and shapes against torch's own declaration of the operators: what no GPU is needed for."""
    q, k, v = (torch.empty(7, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    how, operator = FlashArguments(cu, cu, 4, 4, window, 0.25, 0.0), AtenFlashOperator()
    out, lse, kept = operator.forward(q, k, v, how)
    assert out.shape == q.shape and lse.shape == (4, 7) and lse.dtype == torch.float32 and len(kept) == 2
    for state in (kept, ()):
        result = operator.backward(q, k, v, out, out, lse, state, how)
        assert [x.shape for x in result] == [x.shape for x in (q, k, v)]


def test_determinism_is_torchs_switch() -> None:
    assert not CudaAttention().deterministic and CudaAttention("tiles").deterministic
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert not CudaAttention().deterministic and not CudaFlashAttention().deterministic
        torch.use_deterministic_algorithms(True)
        assert CudaAttention().deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_operator_of_one_device() -> None:
    """attention and attention_backward beside the cpu backend: masks are counted from the corner of a sequence."""
    lengths, keys = np.array([0, 5, 5, 30]), np.array([0, 9, 12, 60])
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, heads, 8, generator=generator) for n, heads in ((30, 4), (60, 2), (60, 2)))
    for mask, window in product(("causal", "full"), (None, (6, 0))):
        how = {"mask": mask, "window": window}
        calls = [
            between(q, k, v, lengths, keys, backend, how) for backend in (CudaAttention("auto", DoubleFlash()), None)
        ]
        for ours, theirs in zip(*calls, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def between(q, k, v, lengths, keys, backend, how) -> tuple[torch.Tensor, ...]:
    out, lse = attention(q, k, v, lengths, keys, backend=backend, **how)
    return out, lse, *attention_backward(q, q, k, v, out, lse, lengths, keys, backend=backend, **how)
