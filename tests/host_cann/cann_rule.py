"""What a rule of CANN is, and where each was read.

The files are those of CANN's public repositories (gitcode.com/cann; GitHub has mirrors: cannmirror/ops-transformer at
05c401f of December 2025, hicann/hccl at 09300b7 of August 2026, Ascend/op-plugin at 517f2e7 of August 2026), the documents those of
hiascend.com and of the repositories. They were read, and nothing of them is in here. What a document alone says (a source that ends
in `.md`, and the page of HcclBatchSendRecv) CANN's code may not check, and other releases may have other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_SCORE, _GRAD = "attention/flash_attention_score", "attention/flash_attention_score_grad"
_UPDATE = "attention/ring_attention_update"

#: Name of a source in the rules -> its path.
SOURCES = {
    "aclnn_flash_attention_score.cpp": f"ops-transformer, {_SCORE}/op_api/",
    "flash_attention_score_tiling.cpp": f"ops-transformer, {_SCORE}/op_host/",
    "flash_attention_score_tiling_general.cpp": f"ops-transformer, {_SCORE}/op_host/arch32/",
    "aclnnFlashAttentionScoreV2.md": f"ops-transformer, {_SCORE}/docs/",
    "aclnnFlashAttentionVarLenScoreV2.md": f"ops-transformer, {_SCORE}/docs/",
    "flash_attention_score_grad_tiling_common.cpp": f"ops-transformer, {_GRAD}/op_host/arch32/",
    "flash_attention_score_grad_tiling_s1s2_bn2.cpp": f"ops-transformer, {_GRAD}/op_host/arch32/",
    "flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp": f"ops-transformer, {_GRAD}/op_host/arch32/",
    "aclnn_ring_attention_update.cpp": f"ops-transformer, {_UPDATE}/op_host/op_api/",
    "ring_attention_update_tiling.cpp": f"ops-transformer, {_UPDATE}/op_host/",
    "ins_v2_batch_send_recv_executor.cc": "hccl, src/ops/batch_send_recv/executor/",
    "HcclBatchSendRecv.md": "hccl, docs/zh/api_ref/comm_op_interface/",
    "HcclBatchSendRecv, CANN 8.0 to 8.5": "hiascend.com, canncommercial/800 and CANNCommunityEdition/850alpha002, hcclcpp_07_0033",
}  # fmt: skip

#: What is wrong with a call; None: nothing.
Broken = Callable[[Any], str | None]


class Refused(Exception):
    """CANN forbids this call or leaves its result undefined, or the stand-in does not model it; the text says which."""


def need(condition: bool, text: str) -> None:
    """Refuse the call with that text unless the condition holds."""
    if not condition:
        raise Refused(text)


@dataclass(frozen=True)
class Breach:
    """A rule that a call breaks.

    Attributes:
        rule: its name.
        source: one of SOURCES and, after a colon, the function there.
        detail: what is wrong with the call.
    """

    rule: str
    source: str
    detail: str

    def __str__(self) -> str:
        path = SOURCES[self.source.partition(": ")[0]]
        return f"{self.detail} (rule {self.rule}; {path}{' ' * (not path.endswith('/'))}{self.source})"


class Rules:
    """Rules in the order in which they are looked at, in groups: where a group has a broken rule, the later groups,
    which take the earlier ones for granted, are left out."""

    def __init__(self) -> None:
        self.groups: list[dict[str, tuple[str, Broken]]] = []

    def group(self) -> None:
        """Begin a group."""
        self.groups.append({})

    def add(self, source: str) -> Callable[[Broken], Broken]:
        """Decorate the function that says what is wrong with a call: it has the rule's name and, as its docstring, the
        rule."""

        def register(broken: Broken) -> Broken:
            self.groups[-1][broken.__name__.replace("_", "-")] = source, broken
            return broken

        return register

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Name and source of each rule."""
        return ((name, source) for group in self.groups for name, (source, _) in group.items())

    def breaches(self, call: Any) -> list[Breach]:
        """The rules of the first group of which the call breaks one."""
        for group in self.groups:
            out = [
                Breach(name, source, detail)
                for name, (source, broken) in group.items()
                if (detail := broken(call)) is not None
            ]
            if out:
                return out
        return []
