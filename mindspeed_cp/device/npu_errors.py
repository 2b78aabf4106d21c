"""Errors of torch_npu when a device, an operator or HCCL fails, in one line.

torch_npu raises RuntimeError for all of them: a line of its own, a line `[ERROR] date (PID...) ERRnnnnn ...`, and the
text of CANN, often many lines with a stack of C++ functions. Errors of a device are asynchronous: the next call that
waits for the device raises them. This module does not import torch.
"""

from __future__ import annotations

import re

#: For text in lower case. HCCL's error numbers begin with EI or EJ, those of torch_npu for HCCL with ERR02 ("DIST").
_HCCL_TEXT = re.compile(r"hccl|\be[ij]00\d\d\b|\berr02\d{3} dist\b")
#: Stronger evidence than a name that contains "hccl".
_RAISED_BY_HCCL = re.compile(r"hccl function error|\be[ij]00\d\d\b|\berr02\d{3} dist\b")
#: Waiting for a peer, its socket, the link to it, and the error of RoCE if it does not answer.
_PEER_CODE = re.compile(r"\bEI00(02|06|09|13)\b")
_TABLE_CODE, _MEMORY_CODE = re.compile(r"\bEI0004\b"), re.compile(r"\bEL0004\b")
#: For text in lower case. HCCL's results 9, 11 to 14, 19 and 21 are a timeout, connections, the network and a remote
#: failure. "waited" is the text of the tests' stand-in for HCCL.
_LOST_PEER = re.compile(
    r"(?<!_)time[ds]?[ -]?out|connection|socket"
    r"|hccl function error.*error code is (9|1[1-4]|19|21)\b|\bwaited [\d.]+ s\b"
)
_OPERATOR_CODE = re.compile(r"\bEZ\d{4}\b")
#: Source locations, which are no evidence of the cause: "ProcessGroupHCCL" appears in most.
_SOURCE_LOCATIONS = re.compile(
    r"^\s*(frame #|#\d+ |Exception raised from|\[W\d).*$"
    r"|\S+\.(cpp|cc|h)\b(:\d+)?|working operator name is \w+",
    re.MULTILINE,
)
_OPERATOR = re.compile(r"aclnn(FlashAttention|RingAttention)\w*")
_DEVICE = re.compile(r"\berr00100 pta\b|\bcall acl api failed|npu function error")
_MISSING_SYMBOL = "not in libopapi"
_MAX_CHARACTERS = 240
#: Lines without information about the cause.
_NOISE = re.compile(
    r"^(\[ERROR\]|\[Error\]: *$|\[Error\]: .*internal error occurs|Rectify the fault|Exception raised from|frame #"
    r"|Trace[bB]ack|\[W\d|#\d+ |E\w\d{4}: Inner Error!"
    r"|Since the operator is called asynchronously|Note: ASCEND_LAUNCH_BLOCKING=1)"
)
#: torch_npu raises this later for a call that failed in its queue (TASK_QUEUE_ENABLE); the reason is in its log.
_QUEUE = "The Inner error is reported as above"

REMEDY = (
    "`mindspeed-cp doctor --device npu` tries every path of the operator; use what passes there, a later CANN, or "
    "train.device: cpu"
)
TOO_MANY_FILES = "this rank has too many open files; raise the limit (ulimit -n), or use fewer ranks"
TIMEOUTS = "context_parallel_suite.timeout_seconds or HCCL_EXEC_TIMEOUT"
HCCL_REMEDY = f"look whether all ranks live; the time-outs are {TIMEOUTS}, and HCCL_CONNECT_TIMEOUT"


def classify_hccl_error(text: str) -> str | None:
    """Return the kind of an error of HCCL: "peer" (absent, late, or no link to it), "files" (too
    many are open), "table", "memory" or "other"; None
    if the error is not of HCCL, but of an operator of the task queue or of a device, raised by a later call of HCCL."""
    message = _SOURCE_LOCATIONS.sub("", text)
    lower = message.lower()
    if "too many open files" in lower and _HCCL_TEXT.search(lower):
        return "files"
    if _PEER_CODE.search(message):
        return "peer"
    lost = _LOST_PEER.search(lower) and not _OPERATOR_CODE.search(message)
    if not _HCCL_TEXT.search(lower) or is_operator_error(message):
        return None
    if is_device_error(message) and not lost and not _RAISED_BY_HCCL.search(lower):
        return None
    if _TABLE_CODE.search(message):
        return "table"
    if _MEMORY_CODE.search(message):
        return "memory"
    return "peer" if lost else "other"


def is_lost_peer(text: str) -> bool:
    """True if HCCL did not reach a peer, or a peer did not answer in time."""
    return classify_hccl_error(text) == "peer"


def is_operator_error(text: str) -> bool:
    """True if a fused attention operator of CANN refused a call, or is missing."""
    return _OPERATOR.search(text) is not None


def is_device_error(text: str) -> bool:
    """True if a call of CANN's runtime failed."""
    return _DEVICE.search(text.lower()) is not None


def short_cause(text: str) -> str:
    """Return the cause from the text of an error, in one line of at most _MAX_CHARACTERS characters."""
    return _truncated(" ".join(_reason_lines(text)) or " ".join(text.split()))


def _reason_lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    reasons = [line for line in lines if line and not _NOISE.match(line)]
    return reasons[1:] if len(reasons) > 1 else reasons  # torch_npu's own line precedes CANN's reason


def _truncated(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."


def hccl_error_line(text: str) -> str:
    """Return one line for an error of HCCL, with a remedy where one is known."""
    kind = classify_hccl_error(text)
    if kind == "peer":
        return f"HCCL failed: {short_cause(text)}; {HCCL_REMEDY}"
    if kind == "files":
        return f"HCCL failed: {TOO_MANY_FILES}: {short_cause(text)}"
    first = _truncated(next(iter(_reason_lines(text)), "it gave no reason"))
    if kind == "table":
        return f"HCCL refused the rank table: {first}; look at the file that RANK_TABLE_FILE names, or unset it"
    if kind == "memory":
        return (
            f"HCCL found no device memory: {first}; end what else runs on the NPU, or lower HCCL_BUFFSIZE (MB, for "
            "each communicator) or data.seq_length"
        )
    return f"HCCL failed: {first}"


def operator_error_line(text: str, call: str = "") -> str:
    """Return one line for an operator that refused a call.

    Args:
        text: text of torch_npu's error.
        call: shapes and types of the call, if known.
    """
    if _MISSING_SYMBOL in text:
        name = _OPERATOR.search(text)
        return (
            f"the attention operator {name[0] if name else 'of torch_npu'} is missing in this CANN{call}; install the "
            f"CANN that `mindspeed-cp doctor --device npu` asks for, and `source .../ascend-toolkit/set_env.sh`"
        )
    cause = short_cause(text)
    if _QUEUE in text:
        cause += " (torch-npu's queue raised it later, perhaps at another call; its log on standard error says why)"
    return f"the attention operator of the NPU refused a call{call}: {cause}; {REMEDY}"


def device_error_line(text: str) -> str:
    """Return one line for a device that failed; the operator at fault may have been launched long before."""
    return f"the NPU failed: {short_cause(text)}; ASCEND_LAUNCH_BLOCKING=1 names it, the logs in ~/ascend/log the cause"
