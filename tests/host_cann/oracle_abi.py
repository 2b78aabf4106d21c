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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.host_cann import cann_rules, device_memory, oracle
from tests.host_cann.cann_rule import Refused, need
from tests.host_cann.oracle_dropout import mask_bytes

REFUSED, BROKEN = 161002, 561000  # codes of aclnn: a parameter is invalid; an error inside
TYPES = {
    0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 4: torch.uint8, 6: torch.int16, 9: torch.int64,
    11: torch.float64, 12: torch.bool, 27: torch.bfloat16,
}  # fmt: skip
Arguments = Mapping[str, Any]
OPTIONS = {
    "keep_prob": "keep_prob", "pre_tokens": "pre_tokens", "next_tokens": "next_tokens", "sparse_mode": "sparse_mode",
    "pse_type": "pse_type", "ac_seq_qlen": "actual_seq_qlen", "ac_seq_kvlen": "actual_seq_kvlen",
    "q_start_idx_val": "q_start_idx", "kv_start_idx_val": "kv_start_idx", "scale": "scale", "scale_value": "scale_value",
}  # fmt: skip
#: Arguments that the stand-in does not model -> their defaults.
UNUSED = {"padding_mask": (None,), "prefixN": (None, []), "inner_precise": (0,)}
FORWARD = ("pse", "drop_mask", "atten_mask")
GRADIENT = {"softmax_max": "softmax_max", "softmax_sum": "softmax_sum", "attention": "attention_in"}

_kept: list[object] = []  # callbacks must outlive the libraries that call them


def memory(about: Mapping[str, Any]) -> Tensor:
    """The tensor that an aclTensor describes, over its own memory."""
    dtype, shape, stride = TYPES[about["type"]], about["shape"], about["stride"]
    if 0 in shape or not about["data"]:
        return torch.empty(shape, dtype=dtype)
    count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    address = about["data"] + about["offset"] * dtype.itemsize
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)


@dataclass
class Asked:
    """One question of libopapi.

    Attributes:
        name: of the operator.
        arguments: by their names in C.
        compute: the second phase; else only shapes are looked at.
        stream: its handle, in the second phase.
        library: libopapi.
        inputs: what was taken, in the second phase.
    """

    name: str
    arguments: Arguments
    compute: bool
    stream: int | None
    library: ctypes.CDLL
    inputs: list[Tensor] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def take(self, name: str) -> Tensor | None:
        """The tensor of an argument; in the first phase without contents."""
        about = self.arguments[name]
        if about is None:
            return None
        need(about["type"] in TYPES, f"not modelled: a tensor of acl data type {about['type']}")
        if not self.compute:
            return torch.empty(about["shape"], dtype=TYPES[about["type"]], device="meta")
        self.inputs.append(memory(about))
        return self.inputs[-1]

    def give(self, /, **results: Tensor) -> None:
        """Write results into the memory of outputs: at once, or, with HOST_CANN_LATE, by tasks of the stream, which first
        see to it that no input has changed since (late.c)."""
        outputs = {name: memory(self.arguments[name]) for name in results}
        for name, x in results.items():
            shape = list(outputs[name].shape)
            need(shape == list(x.shape), f"{name} has shape {shape}, the result {list(x.shape)}")
        if not device_memory.late():
            for name, x in results.items():
                outputs[name].copy_(x)
            return
        for hook in device_memory.before_late:
            hook()
        stream, inputs = ctypes.c_void_p(self.stream), [x for x in self.inputs if x.numel()]
        views = (device_memory.View * len(inputs))(*map(device_memory.View.of, inputs))
        self.check(self.library.host_cann_watch(stream, self.name.encode(), len(inputs), views))
        for name, x in results.items():
            x = x.to(outputs[name].dtype).contiguous()
            to, start = ctypes.byref(device_memory.View.of(outputs[name])), ctypes.c_void_p(x.data_ptr())
            self.check(self.library.host_cann_write(stream, to, start))

    def check(self, code: int) -> None:
        """Raise RuntimeError unless the code of the runtime is 0."""
        if code:
            raise RuntimeError(f"a task for late results was not taken, error code {code}")


def options(asked: Asked) -> dict[str, Any]:
    """Keyword arguments of the oracle."""
    for name, defaults in UNUSED.items():
        need(asked[name] in defaults, f"not modelled: {name}")
    named = {ours: asked[theirs] for theirs, ours in OPTIONS.items() if theirs in asked.arguments}
    return named | {name: asked.take(name) for name in FORWARD}


def attention(asked: Asked) -> None:
    """aclnnFlashAttention[VarLen]ScoreV2."""
    inputs = [asked.take(name) for name in ("query", "key", "value")]
    need(all(x is not None for x in inputs), "query, key and value are needed")
    call = (*inputs, asked["head_num"], asked["input_layout"])
    if not asked.compute:
        oracle.problem_of(*call, **options(asked))
        return
    out, largest, total = oracle.fused_attention(*call, **options(asked))
    asked.give(attention_score=out, softmax_max=largest, softmax_sum=total)


def gradient(asked: Asked) -> None:
    """aclnnFlashAttention[Unpadding]ScoreGradV2."""
    inputs = [asked.take(name) for name in ("query", "key", "value", "dy")]
    need(all(x is not None for x in inputs), "query, key, value and dy are needed")
    call = (*inputs, asked["head_num"], asked["input_layout"])
    named = options(asked) | {ours: asked.take(theirs) for theirs, ours in GRADIENT.items()}
    if not asked.compute:
        oracle.check_gradient_call(*call, **named)
        return
    dq, dk, dv = oracle.fused_attention_grad(*call, **named)
    results, shape = dict(dq=dq, dk=dk, dv=dv), asked["dpse"] and asked["dpse"]["shape"]
    if shape and 0 not in shape:  # there is no gradient of slopes: nobody may take what is there for one
        results["dpse"] = torch.full(shape, torch.nan)
    asked.give(**results)


def dropout_mask(asked: Asked) -> None:
    """aclnnDropoutGenMaskV2."""
    numels, mask = torch.Size(asked["shapeArray"]).numel(), asked["mask"]
    need(mask is not None and TYPES.get(mask["type"]) == torch.uint8, "the dropout mask must be uint8")
    size = torch.Size(mask["shape"]).numel()
    need(size == mask_bytes(numels), f"the mask of {numels} elements has {mask_bytes(numels)} bytes, not {size}")
    if asked.compute:
        bits = oracle.dropout_bits(asked["seed"], asked["offset"], numels, asked["prob"])
        asked.give(mask=bits.view(mask["shape"]))


def update(asked: Asked) -> None:
    """aclnnRingAttentionUpdateV2."""
    six = [asked.take(f"{a}_{b}") for a in ("prev", "cur") for b in ("attn_out", "softmax_max", "softmax_sum")]
    need(all(x is not None for x in six), "both parts are needed")
    need(asked["input_layout"] == "SBH", f"not modelled: ring update in {asked['input_layout']}")
    if not asked.compute:
        cann_rules.check(oracle.update_call_of(tuple(six[:3]), tuple(six[3:])))  # type: ignore[arg-type]  # none is None
        return
    out, largest, total = oracle.ring_attention_update(*six)  # type: ignore[arg-type]
    asked.give(attn_out=out, softmax_max=largest, softmax_sum=total)


def copy(asked: Asked) -> None:
    """aclnnCast, aclnnInplaceCopy and aclnnConstantPadNd."""
    if not asked.compute:
        return
    source, target = ("src", "self") if "src" in asked.arguments else ("self", "out")
    x = asked.take(source)
    need(x is not None and asked[target] is not None, f"{source} and {target} are needed")
    assert x is not None
    if "pad" in asked.arguments:
        x = torch.nn.functional.pad(x, asked["pad"], value=asked["value"])
    asked.give(**{target: x.expand(asked[target]["shape"])})


def handler(name: str) -> Callable[[Asked], None]:
    """What answers calls of that operator."""
    if name.startswith("aclnnFlashAttention"):
        return gradient if "Grad" in name else attention
    others = {"aclnnDropoutGenMaskV2": dropout_mask, "aclnnRingAttentionUpdateV2": update}
    return others.get(name, copy)


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

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
    def answer(phase: int, name: bytes, arguments: bytes, stream: int | None) -> int:
        try:
            follow_environment()
            with torch.no_grad():
                asked = Asked(name.decode(), json.loads(arguments), phase == 2, stream, opapi)
                handler(asked.name)(asked)
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
