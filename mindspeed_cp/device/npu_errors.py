"""What torch_npu says when a device, an operator or HCCL fails, in one line.

torch_npu raises RuntimeError for all of it: a line of its own, a line `[ERROR] date (PID...) ERRnnnnn ...`, and
what CANN wrote, often many lines with a stack of C++ functions. Errors of a device come late, from whatever call waits
for it next. Nothing here imports torch.
"""

from __future__ import annotations

import re

#: In lower case: HCCL's own error numbers begin with EI or EJ, and torch_npu's for it with ERR02 ("DIST").
_HCCL = re.compile(r"hccl|\be[ij]00\d\d\b|\berr02\d{3} dist\b")
_BY_HCCL = re.compile(r"hccl function error|\be[ij]00\d\d\b|\berr02\d{3} dist\b")  # not only in a name
#: A wait for a peer, its socket, the link to it, and what RoCE says when it does not answer.
_PEER_CODE = re.compile(r"\bEI00(02|06|09|13)\b")
_TABLE_CODE, _MEMORY_CODE = re.compile(r"\bEI0004\b"), re.compile(r"\bEL0004\b")
#: In lower case; HCCL's results 9, 11 to 14, 19 and 21 are a time-out, connections, the network and a remote failure.
#: The stand-in of the tests says how long it waited.
_LOST = re.compile(
    r"(?<!_)time[ds]?[ -]?out|connection|socket"
    r"|hccl function error.*error code is (9|1[1-4]|19|21)\b|\bwaited [\d.]+ s\b"
)
_OF_AN_OPERATOR = re.compile(r"\bEZ\d{4}\b")
#: Where in the code an error came up, whatever was wrong: says "ProcessGroupHCCL" for most.
_PLACES = re.compile(
    r"^\s*(frame #|#\d+ |Exception raised from|\[W\d).*$"
    r"|\S+\.(cpp|cc|h)\b(:\d+)?|working operator name is \w+",
    re.MULTILINE,
)
_OPERATOR = re.compile(r"aclnn(FlashAttention|RingAttention)\w*")
_DEVICE = re.compile(r"\berr00100 pta\b|\bcall acl api failed|npu function error")
_NOT_THERE = "not in libopapi"
_LONGEST = 240
# Lines that say nothing about the cause.
_NOISE = re.compile(
    r"^(\[ERROR\]|\[Error\]: *$|\[Error\]: .*internal error occurs|Rectify the fault|Exception raised from|frame #"
    r"|Trace[bB]ack|\[W\d|#\d+ |E\w\d{4}: Inner Error!)"
)

REMEDY = (
    "`mindspeed-cp doctor --device npu` tries every path of the operator; use what passes there, a later CANN, or "
    "train.device: cpu"
)
TIMEOUTS = "context_parallel_suite.timeout_seconds or HCCL_EXEC_TIMEOUT"
HCCL_REMEDY = f"look whether all ranks live; the time-outs are {TIMEOUTS}, and HCCL_CONNECT_TIMEOUT"


def hccl_kind(text: str) -> str | None:
    """What HCCL says: peer (none there, none in time, no link to it), table, memory, or other; None when another says
    it, as an operator of the task queue or a device whose error came out of a later call of HCCL."""
    said = _PLACES.sub("", text)
    lower = said.lower()
    if _PEER_CODE.search(said):
        return "peer"
    lost = _LOST.search(lower) and not _OF_AN_OPERATOR.search(said)
    if not _HCCL.search(lower) or is_operator(said):
        return None
    if is_device(said) and not lost and not _BY_HCCL.search(lower):
        return None
    if _TABLE_CODE.search(said):
        return "table"
    if _MEMORY_CODE.search(said):
        return "memory"
    return "peer" if lost else "other"


def is_lost_peer(text: str) -> bool:
    """True for what torch_npu says when HCCL does not reach a peer, or one does not answer in time."""
    return hccl_kind(text) == "peer"


def is_operator(text: str) -> bool:
    """True for what torch_npu says when a fused attention operator of CANN refuses a call, or is missing."""
    return _OPERATOR.search(text) is not None


def is_device(text: str) -> bool:
    """True for what torch_npu says when a call of CANN's runtime fails."""
    return _DEVICE.search(text.lower()) is not None


def cause(text: str) -> str:
    """What matters in the text of an error, in one line of some hundred characters."""
    return _short(" ".join(_reasons(text)) or " ".join(text.split()))


def _reasons(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not _NOISE.match(line)]
    return kept[1:] if len(kept) > 1 else kept  # torch_npu's own line comes first, CANN's reason after it


def _short(told: str) -> str:
    return told if len(told) <= _LONGEST else told[: _LONGEST - 3] + "..."


def hccl_line(text: str) -> str:
    """One line for an error of HCCL, with what can be done about it where that is known."""
    kind = hccl_kind(text)
    if kind == "peer":
        return f"HCCL failed: {cause(text)}; {HCCL_REMEDY}"
    first = _short(next(iter(_reasons(text)), "it gave no reason"))
    if kind == "table":
        return f"HCCL refused the rank table: {first}; look at the file that RANK_TABLE_FILE names, or unset it"
    if kind == "memory":
        return (
            f"HCCL found no device memory: {first}; end what else runs on the NPU, or lower HCCL_BUFFSIZE (MB, for "
            "each communicator) or data.seq_length"
        )
    return f"HCCL failed: {first}"


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
