"""The cuda backend on whole plans, all ranks in this process, against dense attention in fp64. Flash attention is a test
double (flash_double.py) and the kernel of tiles its torch implementation: no GPU is in these tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.isolated_rank import attend_virtually
from mindspeed_cp import AttentionConfig, ConfigError
from mindspeed_cp.ops.attention import BACKENDS, attention, attention_backward, backend_for_device
from mindspeed_cp.ops.attention.cuda import flash_attention
from mindspeed_cp.ops.attention.cuda import flash_operator as flash
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from mindspeed_cp.ops.attention.cuda.flash_attention import CudaFlashAttention
from mindspeed_cp.ops.attention.cuda.flash_operator import AtenFlashOperator, FlashArguments
from mindspeed_cp.ops.attention.lowering.fused_call import MIN_COPIES
from tests.engine.cases import Case
from tests.engine.draw import problem
from tests.ops.flash_double import DoubleFlash, as_torch_reads
from tests.ops.test_npu_backend import EXACT, HALF, compare, run
from tools import capabilities

CELLS = [cell for cell in capabilities.all_cells() if cell.backend == "cuda" and capabilities.unsupported(cell) is None]
STILL = [cell for cell in CELLS if cell.dropout == "none"]
RANKS = st.sampled_from((1, 2, 3, 4, 5, 8))

#: torch's binding to the package flash-attn-3.
HAS_BINDING = pytest.mark.skipif(
    find_spec("torch.nn.attention._fa3") is None, reason=f"torch {torch.__version__} has no torch.nn.attention._fa3"
)


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
    ("config", "dtype", "kernel"),
    [
        ("plain", torch.bfloat16, "flash"),
        ("plain", torch.float16, "flash"),
        ("plain", torch.float32, "tiles"),
        ("ALiBi", torch.bfloat16, "tiles"),
        ("wide", torch.bfloat16, "tiles"),
        ("dropout", torch.bfloat16, "flash"),
    ],
)
def test_which_kernel_serves(config: str, dtype: torch.dtype, kernel: str) -> None:
    backend = CudaAttention()
    assert backend.kernel_for(CONFIGS[config], dtype) == kernel
    backend.check(CONFIGS[config], dtype)
    tiles = Case((8,), 1).plan().forward.tiles(0)
    calls = backend.lower_forward(tiles, 8, CONFIGS[config], dtype)[0, 0]
    assert (type(calls[0]).__name__ == "StepTiles") == (kernel == "tiles")


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
    with pytest.raises(ConfigError, match=r"cuda\.kernel is 'fast'; valid: auto, flash, tiles"):
        CudaAttention("fast")
    assert backend_for_device("cuda") is BACKENDS["cuda"]
    with pytest.raises(ConfigError, match="'cuda' does not run on tensors of device 'cpu'"):
        backend_for_device("cpu", "cuda")
    with pytest.raises(ConfigError, match=r"backend is 'cuda' and tensors are on cpu; valid: cuda"):
        CudaAttention().check_device(torch.device("cpu"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A GPU of which only the capability is known, and whether FlashAttention 3 is installed."""
    facts: dict[str, Any] = {"capability": (9, 0), "installed": True}
    real = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: facts["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    monkeypatch.setattr(flash, "has_triton", lambda: True)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: facts["installed"] or None if name == flash.FLASH_3 else real(name)
    )
    caches = flash.check_device, flash.flash_attention_3
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
def test_torch_takes_the_calls(window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and shapes against torch's own declaration of the operators: what no GPU is needed for."""
    monkeypatch.setattr(flash, "flash_attention_3", lambda device: (None, ""))
    q, k, v = (torch.empty(7, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    how, operator = FlashArguments(cu, cu, 4, 4, window, 0.25, 0.0), AtenFlashOperator()
    out, lse, kept = operator.forward(q, k, v, how)
    assert out.shape == q.shape and lse.shape == (4, 7) and lse.dtype == torch.float32 and len(kept) == 2
    for state in (kept, ()):
        result = operator.backward(q, k, v, out, out, lse, state, how)
        assert [x.shape for x in result] == [x.shape for x in (q, k, v)]


@HAS_BINDING
def test_flash_attention_3_is_taken_where_it_is(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On compute capability 9 with its package; not under dropout, not where bits must repeat, and nothing of the
    process is changed."""
    from torch.nn.attention import _fa3, current_flash_attention_impl

    asked: list[str] = []
    monkeypatch.setattr(_fa3, "_fa3_import_module", asked.append)
    device = torch.device("cuda")
    assert flash._usable_flash_attention_3(device, 0.0) is _fa3 and asked == [flash.FLASH_3]
    assert flash._usable_flash_attention_3(device, 0.1) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert flash._usable_flash_attention_3(device, 0.0) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert current_flash_attention_impl() is None
    for number, (facts, why) in enumerate(
        (({"capability": (8, 0)}, "made for compute capability 9"), ({"installed": None}, "not installed"))
    ):
        gpu.update({"capability": (9, 0), "installed": True} | facts)
        assert flash.flash_attention_3(torch.device("cuda", number)) == (None, why)

    def broken(name: str) -> None:
        raise ImportError("undefined symbol")

    gpu.update({"capability": (9, 0), "installed": True})
    monkeypatch.setattr(_fa3, "_fa3_import_module", broken)
    function, why = flash.flash_attention_3(torch.device("cuda", 5))
    assert function is None and why == "installed, but it cannot be loaded (undefined symbol)"


@HAS_BINDING
@pytest.mark.parametrize("window", [(-1, 0), (5, 2)])
def test_the_binding_of_flash_attention_3_takes_the_calls(
    window: tuple[int, int], gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments as torch's private binding hands them on to the package."""
    from torch.nn.attention import _fa3

    given: dict[str, tuple[Any, ...]] = {}

    def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
        given["forward"] = arguments
        return arguments[0], torch.zeros(4, 7), torch.zeros(0), torch.zeros(0)

    monkeypatch.setattr(_fa3, "_fa3_import_module", lambda name: None)
    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", forward)
    monkeypatch.setattr(_fa3, "_FA3_CUDA_BWD", lambda *arguments: given.update(backward=arguments))
    q, k, v = (torch.zeros(7, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    how, operator = FlashArguments(cu, cu, 4, 4, window, 0.25, 0.0), AtenFlashOperator()
    out, lse, kept = operator.forward(q, k, v, how)
    assert out is q and lse.shape == (4, 7) and kept == ()
    assert [x.shape for x in operator.backward(q, k, v, out, out, lse, kept, how)] == [x.shape for x in (q, k, v)]
    assert given["forward"][7] is cu and given["forward"][12:14] == (4, 4)
    for arguments in given.values():
        (index,) = (i for i, x in enumerate(arguments) if isinstance(x, float) and x == 0.25)
        assert arguments[index : index + 4] == (0.25, window == (-1, 0), *window)


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
