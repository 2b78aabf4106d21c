"""What torch_npu says, in one line. Texts are torch_npu's own, with CANN's reason as the stand-in gives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_cp import npu_errors
from mindspeed_cp.errors import OperatorError
from mindspeed_cp.train.worker import FAILED, WILL, explain, is_lost_peer, record, take_back

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


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (REFUSED, "device", ("refused a call", "head size 800; valid: 1 to 768", "doctor --device npu")),
        (MISSING, "device", ("aclnnFlashAttentionVarLenScoreV2 is missing in this CANN", "set_env.sh")),
        (DEVICE, "device", ("the NPU failed", "aicore execution times out", "ASCEND_LAUNCH_BLOCKING=1")),
        (HCCL, "peer", ("HCCL failed", "Notify register times out", "HCCL_EXEC_TIMEOUT")),
    ],
    ids=["refused", "missing", "device", "hccl"],
)
def test_an_error_of_the_device_is_one_line(text: str, kind: str, said: tuple[str, ...]) -> None:
    found, line, code = explain(RuntimeError(text))
    assert (found, code) == (kind, FAILED)
    assert "\n" not in line and "ERR00100" not in line and len(line) < 600
    for part in said:
        assert part in line
    assert is_lost_peer(RuntimeError(text)) == (kind == "peer")


def test_an_operator_that_refused_when_it_was_called() -> None:
    assert explain(OperatorError("refused")) == ("device", "refused", FAILED)


def test_what_is_no_word_of_a_device_stays_a_bug() -> None:
    assert explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))[0] == "bug"
    assert explain(ValueError(REFUSED))[0] == "bug"
    assert not npu_errors.is_hccl("the launcher's name is technical")


def test_last_words_are_replaced_or_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    take_back(WILL)
    record(WILL, "last words")
    assert json.loads(path.read_text())["message"]["message"] == "last words"
    take_back(WILL)
    assert not path.exists()
    record(WILL, "last words")
    record("peer", "lost\nrank 1")
    take_back(WILL)
    assert json.loads(path.read_text())["message"]["message"] == "lost rank 1"


def test_a_cause_is_short() -> None:
    assert len(npu_errors.cause("first\n" + "x" * 5000)) <= 240
    assert npu_errors.cause("only this") == "only this"
    assert npu_errors.cause("") == ""
