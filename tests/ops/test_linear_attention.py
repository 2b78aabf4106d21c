"""Operators of linear attention: chunks in torch, and fla-core's kernels over functions with their signatures."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_cp import ConfigError, Documents, StateConfig
from mindspeed_cp.ops.linear_attention import (
    ChunkedOperator,
    FlaOperator,
    SegmentTable,
    StateInputs,
    operator_for_device,
)
from mindspeed_cp.ops.linear_attention.fla import FUNCTIONS
from tests.engine.linear_attention import draw_rows, recurrence

KINDS = ("gated_delta", "kda", "lightning", "mamba2")
LENGTHS = (3, 130, 64, 1, 65)
TABLE = SegmentTable(
    np.array(LENGTHS), np.array([1, 3, 4]), np.array([0, 1, 4]), np.array([1, 4]), torch.device("cpu")
)  # fmt: skip


def rows_of(state: StateConfig) -> tuple[StateInputs, Tensor, Tensor]:
    """Return rows, the gradient of the output, and states that enter the segments of `TABLE.entered`."""
    rows, dout = draw_rows(state, sum(LENGTHS), 3)
    if rows.gate.dim() == 1:
        rows = rows._replace(gate=rows.gate.expand(sum(LENGTHS), -1))
    generator = torch.Generator().manual_seed(1)
    shape = (3, state.heads, state.head_dim_v, state.head_dim)
    return rows, dout, torch.randn(*shape, generator=generator, dtype=torch.float64)


def results_of(operator: Any, state: StateConfig) -> list[Tensor]:
    """Return maps, outputs, last states and all gradients of an operator."""
    rows, dout, entering = rows_of(state)
    leaves = [None if x is None else x.clone().requires_grad_() for x in rows]
    entering.requires_grad_()
    prepared = operator.prepare(StateInputs(*leaves), state, TABLE)
    maps, states = operator.maps(prepared)
    out, last = operator.run(prepared, entering)
    given = [*(x for x in leaves if x is not None), entering]
    generator = torch.Generator().manual_seed(2)
    dlast = torch.randn(last.shape, generator=generator, dtype=last.dtype)
    (through,) = torch.autograd.grad(out, entering, dout.to(out.dtype), retain_graph=True)
    return [maps, states, out, last, through, *torch.autograd.grad([out, last], given, [dout.to(out.dtype), dlast])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_is_the_affine_map_that_the_operator_returns(kind: str) -> None:
    state = StateConfig(kind, 2, 4, 3)
    rows, _, entering = rows_of(state)
    prepared = ChunkedOperator().prepare(rows, state, TABLE)
    maps, states = ChunkedOperator().maps(prepared)
    out, last = ChunkedOperator().run(prepared, entering)
    _, zero = ChunkedOperator().run(prepared, torch.zeros_like(entering))
    torch.testing.assert_close(states, zero, rtol=1e-12, atol=1e-12)
    mapped, entered = maps, entering[[0, 2]]
    moved = entered @ mapped if state.has_delta else entered * mapped
    torch.testing.assert_close(last[1:], moved + states[1:], rtol=1e-12, atol=1e-12)
    # a segment that nothing enters is a document
    torch.testing.assert_close(out[133:197], recurrence(
        StateInputs(*(None if x is None else x[133:197] for x in rows)), Documents([64]), state
    ), rtol=1e-12, atol=1e-12)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [
        ("gated_delta", "qwen3_next.modeling_qwen3_next", "torch_recurrent_gated_delta_rule"),
        ("kda", "kimi_linear.modeling_kimi_linear", "recurrent_kimi_delta_attention"),
    ],
)
def test_the_arguments_mean_what_they_mean_in_hugging_face_models(kind: str, module: str, name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    models = pytest.importorskip(f"transformers.models.{module}", reason="a transformers without this model")
    state = StateConfig(kind, 2, 4, 3)
    rows, _ = draw_rows(state, 70, 4)
    table = SegmentTable(np.array([70]), *(np.zeros(0, np.int64),) * 3, torch.device("cpu"))
    prepared = ChunkedOperator().prepare(rows, state, table)
    out, _ = ChunkedOperator().run(prepared, torch.zeros(0, 2, 3, 4, dtype=torch.float64))
    q, k, v, g, beta = (x[None].float() for x in rows)
    wanted, _ = getattr(models, name)(q, k, v, g, beta, initial_state=None, output_final_state=False)
    torch.testing.assert_close(out.float(), wanted[0], rtol=1e-5, atol=1e-5)


# fla-core: functions with the signatures of its release 0.6, over the chunks in torch; its states are [.., K, V].


def stand_in(kind: str) -> Any:
    def function(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert q.shape[0] == 1 and q.shape == k.shape and v.shape[:3] == g.shape[:3] and output_final_state
        assert cu_seqlens is not None and cu_seqlens_cpu is not None and cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        assert g.dtype == torch.float32 and cu_seqlens.dtype == torch.int64 and scale is not None
        lengths, heads = np.diff(cu_seqlens_cpu.numpy()), q.shape[2]
        everything = np.arange(len(lengths))
        entered = everything if initial_state is not None else everything[:0]
        table = SegmentTable(lengths, entered, everything, entered, q.device)
        state = StateConfig(kind, heads, q.shape[3], v.shape[3], scale=scale)
        x = StateInputs(*(None if y is None else y[0] for y in (q, k, v, g.double(), beta)))
        if initial_state is None:
            entering = v.new_zeros(0, heads, v.shape[3], q.shape[3])
        else:
            assert initial_state.is_contiguous() and initial_state.shape == (
                len(lengths),
                heads,
                q.shape[3],
                v.shape[3],
            )
            entering = initial_state.mT.to(v.dtype)
        out, last = ChunkedOperator().run(ChunkedOperator().prepare(x, state, table), entering)
        return out[None], last.mT

    return function


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins in the place of fla-core."""
    for kind, (module, name) in FUNCTIONS.items():
        parts = module.split(".")
        for number in range(1, len(parts) + 1):
            path = ".".join(parts[:number])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        if not hasattr(sys.modules[module], name):
            monkeypatch.setattr(sys.modules[module], name, stand_in(kind), raising=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_of_fla_are_called_as_their_signatures_say(fla: None, kind: str) -> None:
    state = StateConfig(kind, 2, 4, 3)
    for value, wanted in zip(results_of(FlaOperator(), state), results_of(ChunkedOperator(), state), strict=True):
        torch.testing.assert_close(value.double(), wanted.double(), rtol=1e-4, atol=1e-5)  # gates travel in fp32
    FlaOperator().check(state, torch.bfloat16, torch.device("cuda", 0))


def test_what_fla_does_not_take_or_lacks_is_refused(fla: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, operator = torch.device("cuda", 0), FlaOperator()
    for (state, dtype, device), words in (
        ((StateConfig("kda", 2, 4), torch.bfloat16, torch.device("cpu")), "tensors on cpu; valid: tensors on a GPU"),
        ((StateConfig("kda", 2, 4), torch.float32, gpu), "with torch.float32; valid: torch.bfloat16"),
        ((StateConfig("kda", 2, 512), torch.bfloat16, gpu), "head_dim 512 .*valid: at most 256"),
    ):
        with pytest.raises(ConfigError, match=words):
            operator.check(state, dtype, device)
    module, name = FUNCTIONS["kda"]
    monkeypatch.delattr(sys.modules[module], name)
    with pytest.raises(ConfigError, match=r"fla-core has no fla\.ops\.kda\.chunk_kda; valid: fla-core>=0\.6"):
        operator.check(StateConfig("kda", 2, 4), torch.bfloat16, gpu)
    for path in [path for path in sys.modules if path.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, path)
    with pytest.raises(ConfigError, match=r"fla-core is not installed: pip install 'mindspeed-cp\[fla\]'"):
        operator.check(StateConfig("kda", 2, 4), torch.bfloat16, gpu)


def test_the_operator_of_a_device() -> None:
    assert operator_for_device("cpu", None).name == operator_for_device("npu", None).name == "torch"
    assert operator_for_device("cuda", None).name == "fla"
    own = ChunkedOperator()
    assert operator_for_device("cpu", own) is own
    with pytest.raises(ConfigError, match=r"q is torch\.int64"):
        own.check(StateConfig("kda", 2, 4), torch.int64, torch.device("cpu"))
