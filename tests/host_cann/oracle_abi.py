"""From the arguments that libopapi received to the oracle, and its results into the memory of the outputs.

Every operator is asked twice (opapi.h): first whether it takes the arguments, when contents of tensors may not have been
computed yet, and so only shapes are handed on; then, once the stream is empty, to compute.
"""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.host_cann import oracle
from tests.host_cann import oracle_ring as ring
from tests.host_cann.oracle_dropout import mask_bytes
from tests.host_cann.oracle_rules import Refused, need

REFUSED, BROKEN = 161002, 561000  # codes of aclnn: a parameter is invalid; an error inside
TYPES = {
    0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 4: torch.uint8, 6: torch.int16, 9: torch.int64,
    11: torch.float64, 12: torch.bool, 27: torch.bfloat16,
}  # fmt: skip
Arguments = Mapping[str, Any]
OPTIONS = {
    "keep_prob": "keep_prob", "pre_tokens": "pre_tokens", "next_tokens": "next_tokens", "inner_precise": "inner_precise",
    "sparse_mode": "sparse_mode", "pse_type": "pse_type", "softmax_layout": "softmax_layout", "prefixN": "prefix",
    "ac_seq_qlen": "actual_seq_qlen", "ac_seq_kvlen": "actual_seq_kvlen", "q_start_idx_val": "q_start_idx",
    "kv_start_idx_val": "kv_start_idx", "scale": "scale", "scale_value": "scale_value",
}  # fmt: skip
FORWARD = ("pse", "drop_mask", "padding_mask", "atten_mask")
GRADIENT = {"softmax_max": "softmax_max", "softmax_sum": "softmax_sum", "attention": "attention_in"}

_kept: list[object] = []  # callbacks must outlive the libraries that call them


def memory(about: Mapping[str, Any] | None) -> Tensor | None:
    """The tensor that an aclTensor describes, over its own memory."""
    if about is None:
        return None
    dtype, shape, stride = TYPES[about["type"]], about["shape"], about["stride"]
    if 0 in shape or not about["data"]:
        return torch.empty(shape, dtype=dtype)
    count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    address = about["data"] + about["offset"] * dtype.itemsize
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)


def shape_only(about: Mapping[str, Any] | None) -> Tensor | None:
    """The same without contents."""
    if about is None:
        return None
    need(about["type"] in TYPES, f"not modelled: a tensor of acl data type {about['type']}")
    return torch.empty(about["shape"], dtype=TYPES[about["type"]], device="meta")


def options(arguments: Arguments, take: Callable[[Any], Tensor | None]) -> dict[str, Any]:
    """Keyword arguments of the oracle."""
    named = {ours: arguments[theirs] for theirs, ours in OPTIONS.items() if theirs in arguments}
    return named | {name: take(arguments[name]) for name in FORWARD}


def attention(arguments: Arguments, compute: bool) -> None:
    """aclnnFlashAttention[VarLen]Score of any version."""
    take = memory if compute else shape_only
    inputs = [take(arguments[name]) for name in ("query", "key", "value")]
    need(all(x is not None for x in inputs), "query, key and value are needed")
    named = options(arguments, take)
    if not compute:
        oracle.problem_of(*inputs, arguments["head_num"], arguments["input_layout"], **named)  # type: ignore[arg-type]
        return
    results = oracle.fused_attention(*inputs, arguments["head_num"], arguments["input_layout"], **named)  # type: ignore[arg-type]
    for name, x in zip(("attention_score", "softmax_max", "softmax_sum"), results, strict=True):
        store(arguments[name], x)


def gradient(arguments: Arguments, compute: bool) -> None:
    """aclnnFlashAttention[Unpadding]ScoreGrad of any version."""
    take = memory if compute else shape_only
    inputs = [take(arguments[name]) for name in ("query", "key", "value", "dy")]
    need(all(x is not None for x in inputs), "query, key, value and dy are needed")
    named = options(arguments, take) | {ours: take(arguments[theirs]) for theirs, ours in GRADIENT.items()}
    if not compute:
        oracle.check_gradient_call(*inputs, arguments["head_num"], arguments["input_layout"], **named)  # type: ignore[arg-type]
        return
    *grads, dpse = oracle.gradients(*inputs, arguments["head_num"], arguments["input_layout"], **named)  # type: ignore[arg-type]
    for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
        store(arguments[name], x)
    out = memory(arguments["dpse"])
    if out is not None and out.numel():
        slopes = not dpse.numel()  # there is no gradient of slopes: nobody may take what is there for one
        out.copy_(torch.full_like(out, torch.nan) if slopes else dpse)


def dropout_mask(arguments: Arguments, compute: bool) -> None:
    """aclnnDropoutGenMaskV2."""
    numels = torch.Size(arguments["shapeArray"]).numel()
    out = (memory if compute else shape_only)(arguments["mask"])
    need(out is not None and out.dtype == torch.uint8, "the dropout mask must be uint8")
    assert out is not None
    need(
        out.numel() == mask_bytes(numels),
        f"the mask of {numels} elements has {mask_bytes(numels)} bytes, not {out.numel()}",
    )
    if compute:
        out.copy_(
            oracle.dropout_bits(arguments["seed"], arguments["offset"], numels, arguments["prob"]).view(out.shape)
        )


def update(arguments: Arguments, compute: bool) -> None:
    """aclnnRingAttentionUpdateV2."""
    take = memory if compute else shape_only
    six = [take(arguments[f"{a}_{b}"]) for a in ("prev", "cur") for b in ("attn_out", "softmax_max", "softmax_sum")]
    need(all(x is not None for x in six), "both parts are needed")
    lengths, layouts = (
        take(arguments["actual_seq_qlen"]),
        (arguments["input_layout"], arguments["input_softmax_layout"]),
    )
    if not compute:
        ring.check_arguments(tuple(six[:3]), tuple(six[3:]), lengths, *layouts)  # type: ignore[arg-type]
        return
    named = dict(actual_seq_qlen=lengths, input_layout=layouts[0], input_softmax_layout=layouts[1])
    results = oracle.ring_attention_update(*six, **named)  # type: ignore[arg-type]
    for name, x in zip(("attn_out", "softmax_max", "softmax_sum"), results, strict=True):
        store(arguments[name], x)


def copy(arguments: Arguments, compute: bool) -> None:
    """aclnnCast, aclnnInplaceCopy and aclnnConstantPadNd."""
    if not compute:
        return
    x, out = memory(arguments["self"]), memory(arguments.get("out"))
    if "src" in arguments:
        x, out = memory(arguments["src"]), x
    assert x is not None and out is not None
    if "pad" in arguments:
        x = torch.nn.functional.pad(x, arguments["pad"], value=arguments["value"])
    out.copy_(x)


def store(about: Mapping[str, Any], x: Tensor) -> None:
    """Put a result into the memory of an output."""
    out = memory(about)
    assert out is not None
    need(out.shape == x.shape, f"an output has shape {list(out.shape)}, the result {list(x.shape)}")
    out.copy_(x)


def handler(name: str) -> Callable[[Arguments, bool], None]:
    """What answers calls of that operator."""
    if name.startswith("aclnnFlashAttention"):
        return gradient if "Grad" in name else attention
    return {"aclnnDropoutGenMaskV2": dropout_mask, "aclnnRingAttentionUpdateV2": update}.get(name, copy)


def follow_environment() -> None:
    """Put the fault in that HOST_CANN_FAULT names, if it is set; asked at every call, because processes are forked."""
    fault = os.environ.get("HOST_CANN_FAULT")
    if fault is not None:
        oracle.set_fault(fault)


def connect(opapi: ctypes.CDLL) -> None:
    """Let libopapi ask the oracle."""
    follow_environment()
    set_error = opapi.host_cann_set_error  # of libascendcl, which libopapi is linked with
    set_error.argtypes = [ctypes.c_char_p]

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
    def answer(phase: int, name: bytes, arguments: bytes) -> int:
        try:
            follow_environment()
            with torch.no_grad():
                handler(name.decode())(json.loads(arguments), phase == 2)
        except Refused as error:
            set_error(f"{name.decode()} refused by the stand-in: {error}".encode())
            return REFUSED
        except Exception as error:
            traceback.print_exc()
            set_error(f"{name.decode()}: an error in the stand-in: {type(error).__name__}: {error}".encode())
            return BROKEN
        return 0

    _kept.append(answer)
    opapi.host_cann_set_operators(answer)
