"""What torch_npu says when a device, an operator or HCCL fails, in one line.

torch_npu raises RuntimeError for all of it: a line of its own, a line `[ERROR] date (PID...) ERRnnnnn ...`, and
what CANN wrote, often many lines with a stack of C++ functions. Errors of a device come late, from whatever call waits
for it next. Nothing here imports torch.
"""

from __future__ import annotations

import re

#: In lower case: HCCL's own error numbers begin with EI, and torch_npu's for it with ERR02 ("DIST").
_HCCL = re.compile(r"hccl|\bei00\d\d\b|\berr02\d{3} dist\b")
_OPERATOR = re.compile(r"aclnn(FlashAttention|RingAttention)\w*")
_DEVICE = re.compile(r"\berr00100 pta\b|\bcall acl api failed|npu function error")
_NOT_THERE = "not in libopapi"
_LONGEST = 240
# Lines that say nothing about the cause.
_NOISE = re.compile(
    r"^(\[ERROR\]|\[Error\]: *$|\[Error\]: .*internal error occurs|Rectify the fault|Exception raised from|frame #"
    r"|Traceback|\[W\d|#\d+ |E\w\d{4}: Inner Error!)"
)

REMEDY = (
    "`mindspeed-cp doctor --device npu` tries every path of the operator; use what passes there, a later CANN, or "
    "train.device: cpu"
)
HCCL_REMEDY = "look whether all ranks live; HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT are its time-outs"


def is_hccl(text: str) -> bool:
    """True for what torch_npu says when HCCL fails, or a peer does not answer in time."""
    return _HCCL.search(text.lower()) is not None


def is_operator(text: str) -> bool:
    """True for what torch_npu says when a fused attention operator of CANN refuses a call, or is missing."""
    return _OPERATOR.search(text) is not None


def is_device(text: str) -> bool:
    """True for what torch_npu says when a call of CANN's runtime fails."""
    return _DEVICE.search(text.lower()) is not None


def cause(text: str) -> str:
    """What matters in the text of an error, in one line of some hundred characters."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not _NOISE.match(line)]
    if len(kept) > 1:  # torch_npu's own line comes first, CANN's reason after it
        kept = kept[1:]
    told = " ".join(kept) or " ".join(text.split())
    return told if len(told) <= _LONGEST else told[: _LONGEST - 3] + "..."


def operator_line(text: str, call: str = "") -> str:
    """One line for an operator that refused a call.

    Args:
        text: of torch_npu's error.
        call: shapes and types of the call, where they are known.
    """
    if _NOT_THERE in text:
        name = _OPERATOR.search(text)
        return (
            f"the attention operator {name[0] if name else 'of torch_npu'} is missing in this CANN{call}; install the "
            f"CANN that `mindspeed-cp doctor --device npu` asks for, and `source .../ascend-toolkit/set_env.sh`"
        )
    return f"the attention operator of the NPU refused a call{call}: {cause(text)}; {REMEDY}"


def device_line(text: str) -> str:
    """One line for a device that failed; the operator to blame may have been called long before."""
    return f"the NPU failed: {cause(text)}; ASCEND_LAUNCH_BLOCKING=1 names it, the logs in ~/ascend/log the cause"
