"""The binary interface between the real torch_npu and the stand-in's libopapi.

torch_npu's library holds, as text for its error messages, the argument list of every aclnn call that it makes. Here each
operator of the stand-in is called from C with arguments in that order, each of them told apart by its value, and must hand
every one on under its own name.
"""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path

import pytest
import torch_npu

from tests import host_cann
from tests.host_cann import oracle

INPUTS = "query, key, value, pse, drop_mask, padding_mask, atten_mask, prefixN"
GRAD = "query, key, value, dy, pse, drop_mask, padding_mask, atten_mask, softmax_max, softmax_sum, softmax, attention, prefixN"
LENGTHS, STARTS = "ac_seq_qlen, ac_seq_kvlen", "q_start_idx_val, kv_start_idx_val"
NUMBERS = "keep_prob, pre_tokens, next_tokens, head_num, input_layout, inner_precise, sparse_mode"
OUT, DQ = "softmax_max, softmax_sum, softmax_out, attention_score", "dq, dk, dv, dpse"
MERGE = "prev_attn_out, prev_softmax_max, prev_softmax_sum, cur_attn_out, cur_softmax_max, cur_softmax_sum"

OPERATORS = {
    "aclnnFlashAttentionScore": f"{INPUTS}, scale, {NUMBERS}, {OUT}",
    "aclnnFlashAttentionScoreV2": f"{INPUTS}, {STARTS}, scale, {NUMBERS}, pse_type, {OUT}",
    "aclnnFlashAttentionVarLenScore": f"{INPUTS}, {LENGTHS}, scale, {NUMBERS}, {OUT}",
    "aclnnFlashAttentionVarLenScoreV2": f"{INPUTS}, {LENGTHS}, {STARTS}, scale, {NUMBERS}, pse_type, {OUT}",
    "aclnnFlashAttentionVarLenScoreV4": f"{INPUTS}, {LENGTHS}, scale, {NUMBERS}, softmax_layout, {OUT}",
    "aclnnFlashAttentionScoreGrad": f"{GRAD}, scale_value, {NUMBERS}, {DQ}",
    "aclnnFlashAttentionScoreGradV2": f"{GRAD}, {STARTS}, scale_value, {NUMBERS}, pse_type, {DQ}",
    "aclnnFlashAttentionUnpaddingScoreGrad": f"{GRAD}, {LENGTHS}, scale_value, {NUMBERS}, {DQ}",
    "aclnnFlashAttentionUnpaddingScoreGradV2": f"{GRAD}, {LENGTHS}, {STARTS}, scale_value, {NUMBERS}, pse_type, {DQ}",
    "aclnnFlashAttentionUnpaddingScoreGradV4": f"{GRAD}, {LENGTHS}, scale_value, {NUMBERS}, {DQ}, softmax_layout",
    "aclnnRingAttentionUpdateV2": f"{MERGE}, actual_seq_qlen, input_layout, input_softmax_layout, attn_out, softmax_max, softmax_sum",
    "aclnnDropoutGenMaskV2": "shapeArray, prob, seed, offset, probDataType, mask",
}
DOUBLES = {"scale", "scale_value", "keep_prob", "prob"}
TEXTS = {"input_layout", "softmax_layout", "input_softmax_layout"}
LISTS = {"prefixN", "ac_seq_qlen", "ac_seq_kvlen", "q_start_idx_val", "kv_start_idx_val", "shapeArray"}
INTEGERS = {
    "pre_tokens",
    "next_tokens",
    "head_num",
    "inner_precise",
    "sparse_mode",
    "pse_type",
    "seed",
    "offset",
}


def normal(name):
    """A name in the wheel as the stand-in has it."""
    renamed = {"actual_seq_qlen_tensor": "actual_seq_qlen"}
    name = re.sub(r"^format_|_(char|ptr|cast)$|\[i\]$", "", name).replace("tockens", "tokens")
    return renamed.get(name, name)


@pytest.fixture(scope="module")
def lists():
    """Argument lists in torch_npu's library."""
    data = (Path(torch_npu.__file__).parent / "lib" / "libtorch_npu.so").read_bytes()
    texts = re.findall(rb"\x00([a-zA-Z_0-9]+(?:\[i\])?(?:, [a-zA-Z_0-9]+(?:\[i\])?){2,})(?=\x00)", data)
    return {", ".join(normal(x) for x in text.decode().split(", ")) for text in texts}


@pytest.fixture
def opapi():
    library = host_cann.library("opapi")
    yield library
    oracle.connect(library)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_argument_list_is_one_of_torch_npus(operator, lists):
    assert OPERATORS[operator] in lists


def argument(opapi, name, index):
    """A value for the argument of that name, told apart from the others by `index`, in C and as it must arrive."""
    if name in DOUBLES:
        return ctypes.c_double(index + 0.25), index + 0.25
    if name in TEXTS:
        return ctypes.c_char_p(f"T{index}".encode()), f"T{index}"
    if name in INTEGERS:
        return ctypes.c_int64(2**40 + index), 2**40 + index
    if name == "probDataType":
        return ctypes.c_int(index), index
    numbers = (ctypes.c_int64 * 2)(index, 3)
    if name in LISTS:
        opapi.aclCreateIntArray.restype = ctypes.c_void_p
        return ctypes.c_void_p(opapi.aclCreateIntArray(numbers, ctypes.c_uint64(2))), [index, 3]
    opapi.aclCreateTensor.restype = ctypes.c_void_p
    strides = (ctypes.c_int64 * 2)(3, 1)
    two, four = ctypes.c_uint64(2), ctypes.c_void_p(4096 * index)
    made = opapi.aclCreateTensor(numbers, two, 27, strides, ctypes.c_int64(index), 2, numbers, two, four)
    about = dict(shape=[index, 3], stride=[3, 1], type=27, offset=index, data=4096 * index)
    return ctypes.c_void_p(made), about


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_argument_arrives_under_its_name(operator, opapi):
    asked = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
    def note(phase, name, arguments, stream):
        asked.append((phase, name.decode(), json.loads(arguments)))
        return 0

    names = OPERATORS[operator].split(", ")
    given = [argument(opapi, name, index + 1) for index, name in enumerate(names)]
    want = dict(zip(names, (x[1] for x in given), strict=True))
    workspace, executor = ctypes.c_uint64(7), ctypes.c_void_p()
    opapi.host_cann_set_operators(note)
    phase_one, phase_two = getattr(opapi, f"{operator}GetWorkspaceSize"), getattr(opapi, operator)
    assert phase_one(*(x[0] for x in given), ctypes.byref(workspace), ctypes.byref(executor)) == 0
    assert workspace.value == 0 and executor.value
    assert phase_two(None, ctypes.c_uint64(0), executor, None) == 0
    assert asked == [(1, operator, want), (2, operator, want)]


def test_an_argument_that_is_not_there_is_null(opapi):
    asked = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
    def refuse(phase, name, arguments, stream):
        asked.append(json.loads(arguments))
        return 161002

    opapi.host_cann_set_operators(refuse)
    workspace, executor = ctypes.c_uint64(7), ctypes.c_void_p()
    call = opapi.aclnnInplaceCopyGetWorkspaceSize
    assert call(None, None, ctypes.byref(workspace), ctypes.byref(executor)) == 161002
    assert asked == [{"self": None, "src": None}] and not executor.value


def test_without_an_executor_nothing_is_run(opapi):
    assert opapi.aclnnInplaceCopy(None, ctypes.c_uint64(0), None, None) == 161001
