"""What torch_npu says, in one line. Texts are torch_npu's own, with CANN's reason as the stand-in gives it."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from mindspeed_cp.comm.group_transport import GroupTransport, Transfer, _PendingWork
from mindspeed_cp.device import npu_errors
from mindspeed_cp.errors import OperatorError, PeerError
from mindspeed_cp.train.failures import FAILED, classify_error, is_lost_rank_error, is_out_of_memory
from mindspeed_cp.train.launch import _ABORTED

REFUSED = """npu_fusion_attention_common:../third_party/op-plugin/op_plugin/ops/opapi/FlashAttentionV2KernelNpuOpApi.cpp:907 \
NPU function error: call aclnnFlashAttentionVarLenScoreV2 failed, error code is 161002
[ERROR] 2026-11-21-09:24:07 (PID:17109, Device:0, RankID:-1) ERR00100 PTA call acl api failed.
EZ9999: Inner Error!
        head size 800; valid: 1 to 768"""
MISSING = (
    "aclnnFlashAttentionVarLenScoreV2 or aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize not in libopapi.so, or "
    "libopapi.sonot found.\n[ERROR] 2026-11-21-09:24:07 (PID:1, Device:0, RankID:-1) ERR01004 OPS invalid pointer"
)
DEVICE = """synchronize:../torch_npu/csrc/core/npu/NPUStream.cpp:474 NPU function error: aclrtSynchronizeStream(s), error \
code is 507014
[ERROR] 2026-11-21-09:24:07 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed.
[Error]: An internal error occurs in the runtime module on the host.
        Rectify the fault based on the error information in the ascend log.
EZ9999: The aicore execution times out"""
HCCL = """synchronize:../torch_npu/csrc/core/npu/NPUStream.cpp:474 NPU function error: aclrtSynchronizeStream(s), error \
code is 507048
[ERROR] 2026-11-21-09:24:07 (PID:1, Device:0, RankID:0) ERR00100 PTA call acl api failed.
EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not received the record."""

# The queue of tasks: what went wrong before comes out of the next call, here one of HCCL.
FRAMES = (
    "\nException raised from wait at ../torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:474\nframe #0: c10d_npu::HCCL"
)
LATE = REFUSED + "\nThe process exits for this inner error, and the current working operator name is HcclSend." + FRAMES
# TASK_QUEUE_ENABLE=2: the queue's thread was refused; the reason is in torch_npu's log alone.
QUEUE = """The Inner error is reported as above. The process exits for this inner error, and the current working operator name is \
aclnnFlashAttentionVarLenScoreV2.
Since the operator is called asynchronously, the stacktrace may be inaccurate. If you want to get the accurate stacktrace, please \
set the environment variable ASCEND_LAUNCH_BLOCKING=1.
Note: ASCEND_LAUNCH_BLOCKING=1 will force ops to run in synchronous mode, resulting in performance degradation. Please unset \
ASCEND_LAUNCH_BLOCKING in time after debugging.
[ERROR] 2026-11-25-18:57:57 (PID:4883, Device:0, RankID:-1) ERR00100 PTA call acl api failed.
"""
DIST = """create_config:../torch_npu/csrc/distributed/HCCLUtils.cpp:129 HCCL function error: \
hcclCommInitRootInfoConfig(numRanks, &rootInfo, rank, config, &(comm->hcclComm_)), error code is {code}
[ERROR] 2026-11-21-09:24:07 (PID:1, Device:0, RankID:0) ERR02200 DIST call hccl api failed.
{text}
        TraceBack (most recent call last):
        createLink failed[FUNC:Init][FILE:hccl_comm.cc]"""
SOCKET = DIST.format(
    code=9, text="EI0006: Getting socket times out. Reason: Remote Rank did not send the data in time."
)
NO_CODE = DIST.format(code="9 (timeout)", text="")
TABLE = DIST.format(code=1, text="EI0004: The ranktable is invalid. Reason: The ranktable timeout is not configured.")
MEMORY = DIST.format(code=3, text="EL0004: Failed to allocate memory: out of memory.\n        Solution: stop others")
OTHER = DIST.format(code=1, text="EI0003: In [HcclSend], value [-1] for parameter [count] is invalid.\n  Solution: try")


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (REFUSED, "device", ("refused a call", "head size 800; valid: 1 to 768", "doctor --device npu")),
        (MISSING, "device", ("aclnnFlashAttentionVarLenScoreV2 is missing in this CANN", "set_env.sh")),
        (DEVICE, "device", ("the NPU failed", "aicore execution times out", "ASCEND_LAUNCH_BLOCKING=1")),
        (LATE, "device", ("refused a call", "head size 800; valid: 1 to 768", "doctor --device npu")),
        (QUEUE, "device", ("refused a call: The Inner error is", "its log on standard error says why")),
        (QUEUE + "EZ9999: head size 800", "device", ("refused a call: EZ9999: head size 800 (torch-npu's queue",)),
        (DEVICE + FRAMES, "device", ("the NPU failed", "aicore execution times out", "ASCEND_LAUNCH_BLOCKING=1")),
        (HCCL, "peer", ("HCCL failed", "Notify register times out", npu_errors.HCCL_REMEDY)),
        (SOCKET, "peer", ("HCCL failed", "Getting socket times out", npu_errors.HCCL_REMEDY)),
        (NO_CODE, "peer", ("HCCL failed", npu_errors.HCCL_REMEDY)),
        (TABLE, "device", ("HCCL refused the rank table: EI0004: The ranktable is invalid", "RANK_TABLE_FILE")),
        (MEMORY, "device", ("HCCL found no device memory: EL0004: Failed to allocate memory", "HCCL_BUFFSIZE")),
        (OTHER, "device", ("HCCL failed: EI0003: In [HcclSend], value [-1] for parameter [count] is invalid.",)),
    ],
    ids=[
        "refused",
        "missing",
        "device",
        "late",
        "queue",
        "queue with a reason",
        "late-device",
        "hccl",
        "socket",
        "no-code",
        "table",
        "memory",
        "other",
    ],
)
def test_an_error_of_the_device_is_one_line(text: str, kind: str, said: tuple[str, ...]) -> None:
    error, line, code = classify_error(RuntimeError(text))
    assert (error, code) == (kind, FAILED)
    assert "\n" not in line and "ERR00100" not in line and "TraceBack" not in line and len(line) < 600
    assert ("look whether all ranks live" in line) == (kind == "peer") and "Solution" not in line
    for part in said:
        assert part in line
    assert is_lost_rank_error(RuntimeError(text)) == (kind == "peer")


def test_an_operator_that_refused_when_it_was_called() -> None:
    assert classify_error(OperatorError("refused")) == ("device", "refused", FAILED)


def test_what_is_no_word_of_a_device_stays_a_bug() -> None:
    assert classify_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))[0] == "bug"
    assert classify_error(ValueError(REFUSED))[0] == "bug"
    assert npu_errors.classify_hccl_error("the launcher's name is technical") is None


def test_memory_that_hccl_wants_is_no_matter_of_the_sequence_alone() -> None:
    assert not is_out_of_memory(RuntimeError(MEMORY))
    assert is_out_of_memory(RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"))


def test_the_setting_that_ends_a_run_is_named_before_the_variable() -> None:
    for line in (_ABORTED, npu_errors.HCCL_REMEDY):
        assert 0 < line.index("context_parallel_suite.timeout_seconds") < line.index("HCCL_EXEC_TIMEOUT")


class Failing:
    """A piece of work that fails when it is waited for."""

    def __init__(self, text: str) -> None:
        self.text = text

    def wait(self, *limit: object) -> NoReturn:
        raise RuntimeError(self.text)


TEXTS = {"refused": REFUSED, "late": LATE, "device": DEVICE, "late-device": DEVICE + FRAMES, "memory": MEMORY}
TEXTS |= {"table": TABLE, "other": OTHER, "hccl": HCCL, "socket": SOCKET, "no-code": NO_CODE}


@pytest.mark.parametrize("library", ["hccl", "nccl", "gloo"])
@pytest.mark.parametrize("call", ["one", "batch", "wait"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_transfer_over_hccl_blames_a_peer_for_what_peers_do(
    text: str, call: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> NoReturn:
        raise RuntimeError(text)

    transport = GroupTransport.__new__(GroupTransport)
    transport.__dict__ |= {"timeout": 9.0, "group": None, "gloo_timeout": None, "_rank": 0}
    transport.__dict__ |= {"_global_ranks": [0, 1]}
    transport.__dict__ |= {"is_gloo": library == "gloo", "_is_hccl": library == "hccl"}
    for name in ("isend", "batch_isend_irecv"):
        monkeypatch.setattr(torch.distributed, name, fail)
    monkeypatch.setattr(torch.distributed, "P2POp", lambda *arguments: None)
    transfer = Transfer(torch.empty(1), 1, True, 0, "K and V")
    with pytest.raises(RuntimeError) as caught:
        if call == "one":
            transport._post_one(transfer)
        elif call == "batch":
            transport._post_coalesced([transfer])
        else:
            _PendingWork(transport, transfer, Failing(text)).wait()
    if library != "hccl" or text in (HCCL, SOCKET, NO_CODE):
        assert isinstance(caught.value, PeerError) and "sending to rank 1 (global rank 1)" in str(caught.value)
    else:
        assert type(caught.value) is RuntimeError and str(caught.value) == text
        assert classify_error(caught.value)[0] == "device"


def test_a_cause_is_short() -> None:
    assert len(npu_errors.short_cause("first\n" + "x" * 5000)) <= 240
    assert npu_errors.short_cause("only this") == "only this"
    assert npu_errors.short_cause("") == ""
