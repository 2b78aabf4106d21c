"""`mindspeed-cp doctor`: what this machine has, and whether its attention operator computes attention.

The numeric check runs the operator forward and backward on packed batches whose lengths divide by nothing and compares
with attention by its definition in fp64.  On a new device, driver or library this is a minute well spent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_cp
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention import BACKENDS, attention, attention_backward, dense_packed_attention
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.report.console import print_tables
from mindspeed_cp.report.text import Table

PACKAGES = ("torch", "torch-npu", "megatron-core", "transformer-engine", "numpy", "pydantic", "triton")
DEVICES = ("npu", "cuda", "cpu")

#: Largest allowed difference to fp64, over max(1, largest value of the reference).  bf16 keeps 8 bits: half a unit in
#: the last place is 2e-3, and the kernels round the weights and the output once each.
LIMITS = {"fp32": 1e-5, "bf16": 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A packed batch and what attention means on it."""

    name: str
    lengths: list[int]
    attention: AttentionConfig
    kv_lengths: list[int] | None = None


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
DROPOUT_KEY = (1234, 5)  # any seed and layer


def examine(seed: int = 0) -> dict[str, Any]:
    """Look at the machine and check every backend that it has.

    Returns:
        {"ok", "versions", "machine", "devices", "backends", "communication", "checks"}, all of it plain data;
        "ok" is True if at least one backend runs and no check is over its limit.
    """
    devices = {name: _device(name) for name in DEVICES}
    backends = {name: _backend(name, devices[name]) for name in DEVICES}
    checks = [
        _check(name, dtype, case, seed)
        for name in DEVICES
        if backends[name]["available"]
        for dtype in LIMITS
        for case in CASES
    ]
    return {
        "ok": bool(checks) and all(check["ok"] for check in checks),
        "versions": {"mindspeed-cp": mindspeed_cp.__version__, "python": platform.python_version(), **_versions()},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count() or 1,
            "threads": torch.get_num_threads(),
        },
        "devices": devices,
        "backends": backends,
        "communication": {
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
            "hccl": importlib.util.find_spec("torch_npu") is not None,
        },
        "checks": checks,
    }


def write_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Print a report of `examine`, as tables or as JSON."""
    if as_json:
        print(json.dumps(report))
        return
    print_tables(_tables(report))
    failed = sum(not check["ok"] for check in report["checks"])
    total = len(report["checks"])
    if report["ok"]:
        print(f"ok: all {total} checks of the attention operator agree with the fp64 reference")
    elif failed:
        print(f"FAILED: {failed} of {total} checks of the attention operator differ from the fp64 reference")
    else:
        print("FAILED: no backend of the attention operator runs here")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _device(kind: str) -> dict[str, Any]:
    """{"count", "names", "why"}: how many devices of a kind there are, or why there is none."""
    if kind == "cpu":
        return {"count": 1, "names": [platform.processor() or platform.machine()], "why": None}
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            return {"count": 0, "names": [], "why": "torch-npu is not installed"}
        try:
            import torch_npu  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            return {"count": 0, "names": [], "why": f"torch-npu cannot be loaded: {' '.join(str(error).split())}"}
    module = getattr(torch, kind)
    if not module.is_available():
        why = (
            "torch was built without CUDA" if kind == "cuda" and torch.version.cuda is None else "no device is visible"
        )
        return {"count": 0, "names": [], "why": why}
    count = module.device_count()
    return {"count": count, "names": [module.get_device_name(i) for i in range(count)], "why": None}


def _backend(kind: str, device: dict[str, Any]) -> dict[str, Any]:
    """{"available", "why"}: whether the attention operator runs on a kind of device, or why not."""
    if kind not in BACKENDS:
        return {"available": False, "why": "this version has no attention operator for it"}
    return {"available": device["count"] > 0, "why": device["why"]}


def _check(backend: str, dtype: str, case: Case, seed: int) -> dict[str, Any]:
    """One case on one backend: the differences of out, lse, dq, dk and dv to the fp64 reference."""
    config, documents = case.attention, Documents(case.lengths)
    keys = documents if case.kv_lengths is None else Documents(case.kv_lengths)
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (documents.tokens, config.heads, config.head_dim),
        (keys.tokens, config.kv_heads, config.head_dim),
        (keys.tokens, config.kv_heads, config.head_dim_v),
        (documents.tokens, config.heads, config.head_dim_v),
    )
    q, k, v, dout = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for shape in shapes)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    key = DROPOUT_KEY if config.dropout else None
    out, lse = dense_packed_attention(
        leaves[0],
        leaves[1],
        leaves[2],
        documents,
        mask=config.mask,
        window=config.window,
        slopes=config.slopes,
        dropout_p=config.dropout,
        dropout_key=key,
        kv_documents=keys,
    )
    out.backward(dout.double())
    wanted = {"out": out, "lse": lse, **{f"d{x}": leaf.grad for x, leaf in zip("qkv", leaves, strict=True)}}
    result = {"backend": backend, "dtype": dtype, "case": case.name, "limit": LIMITS[dtype], "error": None}
    began = time.perf_counter()
    try:
        found = _run(backend, [x.to(backend) for x in (q, k, v, dout)], documents, keys, config)
        errors = {x: _difference(found[x].cpu(), wanted[x]) for x in wanted}
    except (ConfigError, RuntimeError) as error:
        return {**result, "differences": {}, "seconds": 0.0, "ok": False, "error": " ".join(str(error).split())}
    return {
        **result,
        "differences": errors,
        "seconds": time.perf_counter() - began,
        "ok": all(difference <= LIMITS[dtype] for difference in errors.values()),
    }


def _run(
    backend: str, tensors: list[torch.Tensor], documents: Documents, keys: Documents, config: AttentionConfig
) -> dict[str, torch.Tensor]:
    q, k, v, dout = tensors
    lengths = documents.offsets, keys.offsets
    how: dict[str, Any] = {
        "mask": config.mask,
        "window": config.window,
        "alibi": config.alibi,
        "dropout_p": config.dropout,
        "dropout_key": DROPOUT_KEY if config.dropout else None,
        "backend": backend,
    }
    out, lse = attention(q, k, v, *lengths, **how)
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, *lengths, **how)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _difference(found: torch.Tensor, wanted: torch.Tensor | None) -> float:
    """Largest difference over max(1, largest reference value); infinite if anything is not finite that should be."""
    assert wanted is not None
    reference = wanted.detach()
    same = found.double() == reference  # also where both are -inf
    gap = (found.double() - reference).abs().masked_fill(same, 0.0)
    scale = max(1.0, float(reference[reference.isfinite()].abs().max()))
    worst = float(gap.max()) / scale
    return worst if worst == worst else float("inf")


def _tables(report: dict[str, Any]) -> list[Table]:
    machine = report["machine"]
    versions = [(name, version or "not installed") for name, version in report["versions"].items()]
    versions.append(("machine", f"{machine['system']}, {machine['cores']} cores, {machine['threads']} threads"))
    devices = [
        (
            kind,
            str(device["count"]),
            ", ".join(sorted(set(device["names"]))) or device["why"],
            "yes" if report["backends"][kind]["available"] else f"no: {report['backends'][kind]['why']}",
        )
        for kind, device in report["devices"].items()
    ]
    parts = ("out", "lse", "dq", "dk", "dv")
    checks = [
        (
            f"{check['backend']} {check['dtype']}: {check['case']}",
            *(f"{check['differences'][part]:.1e}" if check["differences"] else "-" for part in parts),
            f"{check['limit']:.0e}",
            "ok" if check["ok"] else f"FAILED {check['error'] or ''}".strip(),
        )
        for check in report["checks"]
    ]
    links = ", ".join(name for name, there in report["communication"].items() if there) or "none"
    return [
        Table("Versions", ("", ""), (*versions, ("communication", links))),
        Table("Devices", ("device", "number", "which", "attention operator"), tuple(devices)),
        Table("Attention operator, difference to fp64", ("check", *parts, "limit", ""), tuple(checks)),
    ]
