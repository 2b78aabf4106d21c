"""What a rule of CANN is, and where each was read.

The files are those of CANN's public repositories (gitcode.com/cann; GitHub has mirrors: cannmirror/ops-transformer at
05c401f of December 2025, hicann/hccl at 09300b7 of August 2026, Ascend/op-plugin at 517f2e7 of August 2026), the documents those of
hiascend.com and of the repositories. They were read, and nothing of them is in here.
"""

from __future__ import annotations

from collections.abc import Callable
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

#: What CANN does with a call that breaks a rule: it returns an error, or it takes the call and what comes out is not defined.
REFUSED, UNDEFINED = "refused", "undefined"


class Refused(Exception):
    """CANN forbids this call, or the stand-in does not model it; the text says which."""


def need(condition: bool, text: str) -> None:
    """Refuse the call with that text unless the condition holds."""
    if not condition:
        raise Refused(text)


@dataclass(frozen=True)
class Rule:
    """A rule of one of CANN's operators.

    Attributes:
        name: of the rule, in errors, tests and the table of tests/host_cann/rules.md.
        text: the rule in one sentence.
        source: one of SOURCES and, after a colon, the function there.
        effect: REFUSED or UNDEFINED.
        kept: how the package keeps it.
        broken: what is wrong with a call, None where nothing is.
    """

    name: str
    text: str
    source: str
    effect: str
    kept: str
    broken: Callable[[Any], str | None]

    @property
    def file(self) -> str:
        """Name of the source."""
        return self.source.partition(": ")[0]


@dataclass(frozen=True)
class Breach:
    """A rule that a call breaks, and what is wrong with the call."""

    rule: Rule
    detail: str

    def __str__(self) -> str:
        path = SOURCES[self.rule.file]
        return f"{self.detail} (rule {self.rule.name}; {path}{' ' * (not path.endswith('/'))}{self.rule.source})"


class Rules:
    """Rules in the order in which they are looked at, in groups: where a group has a broken rule, the later groups,
    which take the earlier ones for granted, are left out."""

    def __init__(self) -> None:
        self.groups: list[list[Rule]] = []

    def group(self) -> None:
        """Begin a group."""
        self.groups.append([])

    def add(
        self, name: str, text: str, source: str, kept: str, effect: str = REFUSED
    ) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
        """Decorate the function that says what is wrong with a call."""

        def register(broken: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
            self.groups[-1].append(Rule(name, text, source, effect, kept, broken))
            return broken

        return register

    def __iter__(self) -> Any:
        return (rule for group in self.groups for rule in group)

    def breaches(self, call: Any) -> list[Breach]:
        """The rules of the first group of which the call breaks one."""
        for group in self.groups:
            out = [Breach(rule, detail) for rule in group if (detail := rule.broken(call)) is not None]
            if out:
                return out
        return []
