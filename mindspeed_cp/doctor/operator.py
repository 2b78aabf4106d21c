"""Check of the attention operator of a device against dense attention in fp64."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.engine import attend_in_process
from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention.backends import backend_for_device
from mindspeed_cp.ops.attention.contract import AttentionBackend
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.npu.fused_operator import FusedOperator
from mindspeed_cp.ops.attention.operator import attention, attention_backward
from mindspeed_cp.ops.attention.reference import dense_packed_attention
from mindspeed_cp.plan import AttentionConfig, Plan, Topology

#: Maximum difference to fp64, relative to max(1, largest value of the reference). bf16 has 8 significant bits: half a
#: unit in the last place is 2e-3, and the kernels round the weights and the output once each; fp16 has 11.
MAX_DIFFERENCE = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 2e-2}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
RESULT_NAMES = ("out", "lse", "dq", "dk", "dv")
DROPOUT_KEY = (1234, 5)  # any seed and layer


class ReferenceKey(NamedTuple):
    """What a reference depends on: documents of queries and of keys, and attention."""

    documents: Documents
    kv_documents: Documents
    attention: AttentionConfig


@lru_cache(maxsize=1)
def reference_inputs(key: ReferenceKey) -> tuple[Tensor, ...]:
    """Return q, k, v and dout, fp32 [rows, heads, width]: multiples of 1/16 below 8, which fp32, fp16 and bf16 hold, so
    that one reference serves all three."""
    attention = key.attention
    generator = torch.Generator().manual_seed(0)
    rows, kv_rows = key.documents.tokens, key.kv_documents.tokens
    shapes = (
        (rows, attention.heads, attention.head_dim),
        (kv_rows, attention.kv_heads, attention.head_dim),
        (kv_rows, attention.kv_heads, attention.head_dim_v),
        (rows, attention.heads, attention.head_dim_v),
    )
    return tuple((torch.randn(x, generator=generator) * 16).round().clamp(-127, 127) / 16 for x in shapes)


@lru_cache(maxsize=1)
def reference_results(key: ReferenceKey) -> dict[str, Tensor]:
    """Return out, lse, dq, dk and dv of `reference_inputs`, fp64, by RESULT_NAMES.

    Attention is :func:`mindspeed_cp.ops.attention.dense_packed_attention`, and gradients are autograd's.
    """
    q, k, v, dout = (x.double() for x in reference_inputs(key))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dropout_key = DROPOUT_KEY if key.attention.dropout else None
    out, lse = dense_packed_attention(
        key.attention, q, k, v, key.documents, kv_documents=key.kv_documents, dropout_key=dropout_key
    )
    gradients = torch.autograd.grad(out, leaves, dout)
    return dict(zip(RESULT_NAMES, (out.detach(), lse.detach(), *gradients), strict=True))


def relative_difference(result: Tensor, reference: Tensor) -> float:
    """Return the largest difference relative to max(1, largest value of the reference); infinite if the result has a
    NaN or an infinite value that the reference does not have."""
    equal = result.double() == reference  # also where both are -inf
    differences = (result.double() - reference).abs().masked_fill(equal, 0.0)
    scale = max(1.0, float(reference[reference.isfinite()].abs().max()))
    largest = float(differences.max()) / scale
    return largest if largest == largest else float("inf")


@dataclass(frozen=True)
class OperatorCase:
    """A packed batch and its attention.

    Attributes:
        name: name in the report.
        lengths: lengths of the documents.
        attention: configuration of the attention.
        kv_lengths: lengths of the keys, in cross-attention.
        plan: algorithm and ranks of a plan that runs on all its ranks in this process; None: one call of the operator.
        npu: options of the npu backend other than its defaults; only with a plan.
    """

    name: str
    lengths: list[int]
    attention: AttentionConfig
    kv_lengths: list[int] | None = None
    plan: tuple[str, int] | None = None
    npu: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reference_key(self) -> ReferenceKey:
        """Key of the inputs and of the results that they should have."""
        keys = self.lengths if self.kv_lengths is None else self.kv_lengths
        return ReferenceKey(Documents(self.lengths), Documents(keys), self.attention)

    def make_plan(self) -> Plan:
        """Return the plan of a case that has one."""
        assert self.plan is not None
        (algorithm, ranks), key = self.plan, self.reference_key
        return build_plan(key.documents, Topology(1, ranks), self.attention, algorithm, key.kv_documents)


SHORT_CASES = (
    OperatorCase("one causal document", [193], AttentionConfig(4, head_dim=64)),
    OperatorCase("packed, empty and tiny documents", [130, 0, 1, 67, 2, 31], AttentionConfig(4, head_dim=32)),
    OperatorCase("grouped queries", [101, 58], AttentionConfig(8, 2, 64)),
    OperatorCase("full mask", [77, 3, 50], AttentionConfig(4, 2, 64, mask="full")),
    OperatorCase("sliding window", [150, 40], AttentionConfig(4, 2, 64, window=(37, 0))),
    OperatorCase("ALiBi", [90, 61], AttentionConfig(6, 2, 32, alibi=True)),
    OperatorCase("attention dropout", [70, 45], AttentionConfig(4, 2, 32, dropout=0.2)),
    OperatorCase("MLA widths", [83, 29], AttentionConfig(2, head_dim=48, head_dim_v=32)),
    OperatorCase("cross-attention", [60, 9, 4], AttentionConfig(4, 2, 32, mask="full"), kv_lengths=[17, 80, 0]),
)

#: Further cases for accelerators: operators have failed beyond 2,048 rows, and plans cut a batch into tiles.
LONG_CASES = (
    OperatorCase("causal, 2,500 tokens", [2500], AttentionConfig(2, 1, 64)),
    OperatorCase("packed causal, past 2,048", [2311, 130, 7], AttentionConfig(2, 1, 64)),
    OperatorCase("full mask, past 2,048", [2200, 90], AttentionConfig(1, head_dim=32, mask="full")),
    OperatorCase("sliding window, past 2,048", [2400], AttentionConfig(1, head_dim=32, window=(2100, 0))),
    OperatorCase("ALiBi, past 2,048", [2300, 41], AttentionConfig(2, 1, 32, alibi=True)),
    OperatorCase("a ring of 4", [2300, 41], AttentionConfig(2, 1, 32), plan=("ring", 4)),
    OperatorCase("a ring of 3, ALiBi", [2205, 97], AttentionConfig(2, 1, 32, alibi=True), plan=("ring", 3)),
    OperatorCase("a ring of 3, window", [1500, 97], AttentionConfig(2, 1, 32, window=(400, 0)), plan=("ring", 3)),
    OperatorCase("all_gather, 3 ranks", [1801, 97], AttentionConfig(2, 1, 32), plan=("all_gather", 3)),
    OperatorCase("a ring of 3, ALiBi, full mask", [901, 97], AttentionConfig(2, 1, 32, mask="full", alibi=True),
                 plan=("ring", 3)),
    OperatorCase("a ring of 3, npu_lowering: masks", [901, 97], AttentionConfig(2, 1, 32), plan=("ring", 3),
                 npu={"lowering": "masks"}),
    OperatorCase("a ring of 3, npu_merge: ring_update", [901, 97], AttentionConfig(2, 1, 64), plan=("ring", 3),
                 npu={"merge": "ring_update"}),
    OperatorCase("direct, 4 ranks, full mask", [1201, 97], AttentionConfig(2, 1, 32, mask="full"), plan=("direct", 4)),
)  # fmt: skip

#: Maximum distance from 1 of the mean output under dropout, for values of 1: several standard deviations.
MAX_MEAN_DEVIATION = 0.07


def applies(backend: str, dtype: str, case: OperatorCase) -> bool:
    """Return True if a backend supports a case. Options are those of the npu backend, and no kernel of the cuda backend
    has dropout in fp32."""
    return backend == "npu" or (not case.npu and (backend != "cuda" or dtype != "fp32" or not case.attention.dropout))


def check(
    backend: str,
    dtype: str,
    case: OperatorCase,
    deterministic: bool = False,
    operator: FusedOperator | None = None,
) -> dict[str, Any]:
    """Run a case on a backend. Returns {"backend", "dtype", "case", "limit", "error", "differences", "seconds", "ok"},
    with the differences of out, lse, dq, dk and dv to the fp64 reference, and on GPUs "kernel", the kernels that
    may compute it, of which the differences are the largest.

    A backend whose operator draws the dropped weights itself has no reference under dropout. Instead, the output must
    be linear in the values with the returned gradient, <dout, out> = <v, dv>, and <q, dq> = <k, dk>, which holds if and
    only if both directions drop the same weights. Outputs for values of 1 must be 1 on average.

    Args:
        backend: "cpu", "npu" or "cuda".
        dtype: a key of DTYPES.
        case: the case.
        deterministic: under torch's deterministic algorithms, with which a second run must give the same bits.
        operator: the fused operators of the npu backend, for tensors on the CPU; None: those of torch_npu.
    """
    config, key = case.attention, case.reference_key
    inputs = [x.to(DTYPES[dtype], copy=True) for x in reference_inputs(key)]
    drawn_by_operator = config.dropout > 0 and backend != "cpu"
    reference = {} if drawn_by_operator else reference_results(key)
    start = time.perf_counter()
    kernels = CudaAttention().kernels_for(config, DTYPES[dtype]) if backend == "cuda" else ()
    mean, differences, other_bits = 1.0, dict.fromkeys(RESULT_NAMES, 0.0), []
    mode = torch.get_deterministic_debug_mode()
    try:
        # torch.use_deterministic_algorithms does the same, and imports the compiler: seconds.
        torch.set_deterministic_debug_mode("error" if deterministic else mode)
        runners: list[str | AttentionBackend] = [CudaAttention(kernel) for kernel in kernels]
        for runner in runners or [backend]:
            results = _run(backend, runner, inputs, case, operator)
            again = _run(backend, runner, inputs, case, operator) if deterministic else {}  # NaN differs from itself
            other_bits += [name for name in again if not torch.equal(results[name], again[name])]
            if drawn_by_operator:
                ones = [*inputs[:2], torch.ones_like(inputs[2]), inputs[3]]
                mean = float(_run(backend, runner, ones, case)["out"].double().mean())
                differences = _dropout_differences(results, inputs)
            else:
                for name in RESULT_NAMES:
                    differences[name] = max(differences[name], relative_difference(results[name], reference[name]))
    except Exception as error:  # compilers raise errors of any type; the other cases must still run
        return failed_check(backend, dtype, case, " ".join(str(error).split()))
    finally:
        torch.set_deterministic_debug_mode(mode)
    seconds = time.perf_counter() - start
    if abs(mean - 1) > MAX_MEAN_DEVIATION:
        error_text = f"outputs for values of 1 are {mean:.3f} on average"
        return failed_check(backend, dtype, case, error_text) | {"seconds": seconds}
    ok = all(difference <= MAX_DIFFERENCE[dtype] for difference in differences.values())
    error_text = f"two runs under deterministic algorithms have other bits in {', '.join(other_bits)}"
    row = failed_check(backend, dtype, case, "") | {"error": error_text if other_bits else None}
    if backend == "cuda":
        row["kernel"] = ", ".join(kernels)
    return {**row, "differences": differences, "seconds": seconds, "ok": ok and not other_bits}


def failed_check(backend: str, dtype: str, case: OperatorCase, error: str) -> dict[str, Any]:
    """Return the row of a case that gave no result."""
    row = {"backend": backend, "dtype": dtype, "case": case.name, "limit": MAX_DIFFERENCE[dtype], "error": error}
    return {**row, "differences": {}, "seconds": 0.0, "ok": False}


def _run(
    device: str,
    backend: str | AttentionBackend,
    inputs: list[Tensor],
    case: OperatorCase,
    operator: FusedOperator | None = None,
) -> dict[str, Tensor]:
    """Return the results of forward and backward, on the host."""
    q, k, v, dout = (x.to(device if operator is None else "cpu") for x in inputs)
    if case.plan is not None:
        is_npu = device == "npu"
        runner = NpuAttention(**case.npu, operator=operator) if is_npu else backend_for_device(device, backend)
        results = vars(attend_in_process(case.make_plan(), q, k, v, dout, runner))
        return {name: results[name].cpu() for name in RESULT_NAMES}
    config, key = case.attention, case.reference_key
    lengths = key.documents.offsets, key.kv_documents.offsets
    options: dict[str, Any] = {
        "mask": config.mask,
        "window": config.window,
        "alibi": config.alibi,
        "dropout_p": config.dropout,
        "dropout_key": DROPOUT_KEY if config.dropout else None,
        "backend": backend,
        "saved": {},
    }
    out, lse = attention(q, k, v, *lengths, **options)
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, *lengths, **options)
    return dict(zip(RESULT_NAMES, (x.cpu() for x in (out, lse, dq, dk, dv)), strict=True))


def _dropout_differences(results: Mapping[str, Tensor], inputs: list[Tensor]) -> dict[str, float]:
    q, k, v, dout = inputs

    def dot(x: Tensor, y: Tensor) -> float:
        return float((x.double() * y.double()).sum())

    linear = abs(dot(dout, results["out"]) - dot(v, results["dv"]))
    scores = abs(dot(q, results["dq"]) - dot(k, results["dk"]))
    size = max(1.0, float(dout.double().norm() * results["out"].double().norm()))
    return {"out": linear / size, "dq": scores / size}
