"""The systems: each one's ways to run a batch, as plans that can be proved, or as plans on modelled links.

A system is a function of a :class:`Case`; it returns the ways that it would choose among, of which the fastest counts,
or none where it cannot run the case. So every system has the options that its users would tune, and where its paper
leaves something open the choice is made in its favour. All of them skip tiles that the mask hides, send and sum
gradients of keys in fp32 as this project's engine does, and start transfers as early as their buffers allow.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.published.systems.balanced_queries import magi_attention
from benchmarks.published.systems.even import (
    Case,
    all_gather,
    double_ring,
    eod_ring,
    ring,
    ulysses,
    usp,
    wlb_llm,
)
from benchmarks.published.systems.head_groups import flexsp, verl
from benchmarks.published.systems.ring_groups import dhp, dynamic_cp, zeppelin
from benchmarks.published.timing import Candidate
from mindspeed_cp import build_plan


def ours(case: Case) -> list[Candidate]:
    """Build this project's plan, as `algorithm: hierarchical` makes it by the preset without options but the bound of
    tokens, whatever the cluster really is."""
    options = {} if case.room is None else {"max_seqlen_per_dp_cp_rank": case.room}
    plan = build_plan(case.documents, case.topology, case.attention, "hierarchical", **options)
    return [Candidate("hierarchical", plan)]


#: By the name in the table. The first is what others are compared with, the last is this project's.
SYSTEMS: dict[str, Callable[[Case], list[Candidate]]] = {
    "even ring": ring,
    "EOD ring": eod_ring,
    "double ring": double_ring,
    "all-gather": all_gather,
    "WLB-LLM": wlb_llm,
    "Ulysses": ulysses,
    "USP": usp,
    "MagiAttention": magi_attention,
    "dynamic CP": dynamic_cp,
    "DHP": dhp,
    "Zeppelin": zeppelin,
    "verl": verl,
    "FlexSP": flexsp,
    "ours": ours,
}

BASE, OURS = "even ring", "ours"

#: Systems that go by documents, so that they can treat all ranks of a step as one pool.
POOLED = ("dynamic CP", "DHP", "Zeppelin", "verl", "FlexSP", OURS)

#: Systems that are tried as one pool as well as on rows. For the others 64 ranks are more steps of the same ring.
EITHER = ("all-gather", "WLB-LLM", "USP", "MagiAttention")

#: Systems that pack the documents of rows anew, so that rows have equal work.
REPACKED = ("WLB-LLM",)
