"""Whether the attention operator of a device computes attention: against its definition in fp64."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_cp.engine.virtual import attend_virtually
from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention import attention, attention_backward, backend_named, dense_attention_of
from mindspeed_cp.ops.attention.npu import NpuAttention
from mindspeed_cp.plan import AttentionConfig, Plan, Topology, build_plan

#: Largest allowed difference to fp64, over max(1, largest value of the reference).  bf16 keeps 8 bits: half a unit in
#: the last place is 2e-3, and the kernels round the weights and the output once each; fp16 keeps 11, an eighth of that.
LIMITS = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 2e-2}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PARTS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """A packed batch and what attention means on it.

    Attributes:
        name: for people.
        lengths: of the documents.
        attention: what is computed.
        kv_lengths: of the keys, in cross-attention.
        plan: algorithm, ranks and options of a plan whose ranks run one after the other; None: one rank.
        npu: options of the npu backend, where they are not its defaults; with a plan only.
    """

    name: str
    lengths: list[int]
    attention: AttentionConfig
    kv_lengths: list[int] | None = None
    plan: tuple[str, int, Mapping[str, Any]] | None = None
    npu: Mapping[str, Any] = field(default_factory=dict)


CASES = (
    Case("one causal document", [193], AttentionConfig(4, head_dim=64)),
    Case("packed, empty and tiny documents", [130, 0, 1, 67, 2, 31], AttentionConfig(4, head_dim=32)),
    Case("grouped queries", [101, 58], AttentionConfig(8, 2, 64)),
    Case("full mask", [77, 3, 50], AttentionConfig(4, 2, 64, mask="full")),
    Case("sliding window", [150, 40], AttentionConfig(4, 2, 64, window=(37, 0))),
    Case("ALiBi", [90, 61], AttentionConfig(6, 2, 32, alibi=True)),
    Case("attention dropout", [70, 45], AttentionConfig(4, 2, 32, dropout=0.2)),
    Case("MLA widths", [83, 29], AttentionConfig(2, head_dim=48, head_dim_v=32)),
    Case("cross-attention", [60, 9, 4], AttentionConfig(4, 2, 32, mask="full"), kv_lengths=[17, 80, 0]),
)

#: For accelerators, whose operators have been seen to go wrong beyond 2,048 rows; and what plans make of a batch.
LONG = (
    Case("causal, 2,500 tokens", [2500], AttentionConfig(2, 1, 64)),
    Case("packed causal, past 2,048", [2311, 130, 7], AttentionConfig(2, 1, 64)),
    Case("full mask, past 2,048", [2200, 90], AttentionConfig(1, head_dim=32, mask="full")),
    Case("sliding window, past 2,048", [2400], AttentionConfig(1, head_dim=32, window=(2100, 0))),
    Case("ALiBi, past 2,048", [2300, 41], AttentionConfig(2, 1, 32, alibi=True)),
    Case("a ring of 4", [2300, 41], AttentionConfig(2, 1, 32), plan=("ring", 4, {})),
    Case("a ring of 3, ALiBi", [2205, 97], AttentionConfig(2, 1, 32, alibi=True), plan=("ring", 3, {})),
    Case("a ring of 3, window", [1500, 97], AttentionConfig(2, 1, 32, window=(400, 0)), plan=("ring", 3, {})),
    Case("all_gather, 3 ranks", [1801, 97], AttentionConfig(2, 1, 32), plan=("all_gather", 3, {})),
    Case(
        "a ring of 3, ALiBi, full mask",
        [901, 97],
        AttentionConfig(2, 1, 32, mask="full", alibi=True),
        plan=("ring", 3, {}),
    ),
    Case(
        "a ring of 3, npu_lowering: masks",
        [901, 97],
        AttentionConfig(2, 1, 32),
        plan=("ring", 3, {}),
        npu={"lowering": "masks"},
    ),
    Case(
        "a ring of 3, npu_merge: ring_update",
        [901, 97],
        AttentionConfig(2, 1, 64),
        plan=("ring", 3, {}),
        npu={"merge": "ring_update"},
    ),
    Case(
        "a ring of 3, npu_alibi: split",
        [903, 97],
        AttentionConfig(2, 1, 32, alibi=True),
        plan=("ring", 3, {}),
        npu={"alibi": "split"},
    ),
    Case("direct, 4 ranks, full mask", [1201, 97], AttentionConfig(2, 1, 32, mask="full"), plan=("direct", 4, {})),
)
DROPOUT_KEY = (1234, 5)  # any seed and layer

#: How far the mean of some hundred outputs may be from 1 under dropout: several standard deviations of their noise.
MEAN = 0.07


def applies(backend: str, dtype: str, case: Case) -> bool:
    """Whether a case says anything of a backend: not with options of another one, and where no kernel of the cuda
    backend drops weights in fp32."""
    return backend == "npu" or (not case.npu and (backend != "cuda" or dtype != "fp32" or not case.attention.dropout))


def check(backend: str, dtype: str, case: Case, seed: int = 0) -> dict[str, Any]:
    """One case on one backend: the differences of out, lse, dq, dk and dv to the fp64 reference.

    A backend whose operator draws the dropped weights itself has no reference under dropout. There the output must be
    linear in the values with the gradient that was returned, <dout, out> = <v, dv>, and <q, dq> = <k, dk>: so it is if
    and only if both directions drop the same. And outputs of values that are all 1 must be 1 in the mean.
    """
    config, documents = case.attention, Documents(case.lengths)
    keys = documents if case.kv_lengths is None else Documents(case.kv_lengths)
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (documents.tokens, config.heads, config.head_dim),
        (keys.tokens, config.kv_heads, config.head_dim),
        (keys.tokens, config.kv_heads, config.head_dim_v),
        (documents.tokens, config.heads, config.head_dim_v),
    )
    given = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for shape in shapes]
    result = {"backend": backend, "dtype": dtype, "case": case.name, "limit": LIMITS[dtype], "error": None}
    began = time.perf_counter()
    drawn_by_operator = config.dropout > 0 and backend != "cpu"
    mean = 1.0
    try:
        found = {name: x.cpu() for name, x in _run(backend, given, documents, keys, case).items()}
        if drawn_by_operator:
            ones = [*given[:2], torch.ones_like(given[2]), given[3]]
            mean = float(_run(backend, ones, documents, keys, case)["out"].double().mean())
    except Exception as error:  # a compiler has errors of its own; one case that fails must not end the others
        return {**result, "differences": {}, "seconds": 0.0, "ok": False, "error": " ".join(str(error).split())}
    seconds = time.perf_counter() - began
    if abs(mean - 1) > MEAN:
        wrong = f"outputs of values of 1 are {mean:.3f} in the mean"
        return {**result, "differences": {}, "seconds": seconds, "ok": False, "error": wrong}
    if drawn_by_operator:
        differences = _same_drops(found, given)
    else:
        wanted = _reference(given, documents, keys, config)
        differences = {name: _difference(found[name], wanted[name]) for name in PARTS}
    good = all(difference <= LIMITS[dtype] for difference in differences.values())
    return {**result, "differences": differences, "seconds": seconds, "ok": good}


def _reference(
    given: list[torch.Tensor], documents: Documents, keys: Documents, config: AttentionConfig
) -> dict[str, torch.Tensor]:
    q, k, v, dout = (x.double() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    key = DROPOUT_KEY if config.dropout else None
    out, lse = dense_attention_of(config, q, k, v, documents, kv_documents=keys, dropout_key=key)
    grads = torch.autograd.grad(out, leaves, dout)
    return dict(zip(PARTS, (out.detach(), lse.detach(), *grads), strict=True))


def _run(
    backend: str, given: list[torch.Tensor], documents: Documents, keys: Documents, case: Case
) -> dict[str, torch.Tensor]:
    q, k, v, dout = (x.to(backend) for x in given)
    if case.plan is not None:
        runner = NpuAttention(**case.npu) if backend == "npu" else backend_named(backend)
        made = attend_virtually(_plan(case, documents, keys), q, k, v, dout, runner)
        return {"out": made.out, "lse": made.lse, "dq": made.dq, "dk": made.dk, "dv": made.dv}
    config, lengths = case.attention, (documents.offsets, keys.offsets)
    how: dict[str, Any] = {
        "mask": config.mask,
        "window": config.window,
        "alibi": config.alibi,
        "dropout_p": config.dropout,
        "dropout_key": DROPOUT_KEY if config.dropout else None,
        "backend": backend,
        "kept": {},
    }
    out, lse = attention(q, k, v, *lengths, **how)
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, *lengths, **how)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _plan(case: Case, documents: Documents, keys: Documents) -> Plan:
    assert case.plan is not None
    algorithm, ranks, options = case.plan
    return build_plan(documents, Topology(1, ranks), case.attention, algorithm, keys, **options)


def _same_drops(found: Mapping[str, torch.Tensor], given: list[torch.Tensor]) -> dict[str, float]:
    q, k, v, dout = given

    def together(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x.double() * y.double()).sum())

    linear = abs(together(dout, found["out"]) - together(v, found["dv"]))
    scores = abs(together(q, found["dq"]) - together(k, found["dk"]))
    size = max(1.0, float(dout.double().norm() * found["out"].double().norm()))
    return {"out": linear / size, "dq": scores / size}


def _difference(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference over max(1, largest reference value); infinite if anything is not finite that should be."""
    same = found.double() == reference  # also where both are -inf
    gap = (found.double() - reference).abs().masked_fill(same, 0.0)
    scale = max(1.0, float(reference[reference.isfinite()].abs().max()))
    worst = float(gap.max()) / scale
    return worst if worst == worst else float("inf")
