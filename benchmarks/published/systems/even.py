"""Systems that cut every document evenly over all ranks, or split heads over them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from benchmarks.published.gather import build_gathered
from benchmarks.published.systems.case import Case, by_heads, even_shares
from benchmarks.published.timing import Candidate
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.layout import row_zigzag


def ring(case: Case) -> list[Candidate]:
    """Build an even-split zig-zag ring over all ranks: TransformerEngine's context parallelism with `cp_comm_type: p2p`
    (Ring Attention, arXiv 2310.01889; zig-zag chunks as in Megatron-core). Assumed: documents of any length, where TE
    pads each to a multiple of twice the ranks; gradients of keys travel in fp32, where TE sends bf16 (see --bf16)."""
    return [case.once(lambda d, t, a: even_shares("ring", build_plan(d, t, a, "ring")), "ring")]


def eod_ring(case: Case, tensor_parallel: int = 1) -> list[Candidate]:
    """Build MindSpeed's ring with `--reset-attention-mask` (EOD reset): every document is padded to a multiple of cp *
    lcm(2, tp), then cut evenly over all ranks. The padding is computed and sent like tokens."""
    padded = Documents(eod_lengths(case.documents.lengths, case.topology.ranks, tensor_parallel))
    case = replace(case, documents=padded)
    return [case.once(lambda d, t, a: even_shares("EOD ring", build_plan(d, t, a, "ring")), "EOD ring")]


def eod_lengths(lengths: np.ndarray, ranks: int, tensor_parallel: int) -> np.ndarray:
    """Return the lengths padded to a multiple of ranks * lcm(2, tensor_parallel), int64 [documents]."""
    unit = ranks * math.lcm(2, tensor_parallel)
    return -(-lengths // unit) * unit


def double_ring(case: Case) -> list[Candidate]:
    """Build rings in nodes and between them at once (LoongTrain, arXiv 2406.18485; MindSpeed's `cp_window_size`): the
    window is a node. On one node it is the ring."""
    return [case.once(lambda d, t, a: even_shares("double ring", build_plan(d, t, a, "double_ring")), "double ring")]


def all_gather(case: Case) -> list[Candidate]:
    """Gather keys and values of all ranks on every rank, zig-zag chunks (Llama 3, arXiv 2407.21783, section
    3.3.2; TransformerEngine's `cp_comm_type: all_gather`). Blocks cross to each node once over all its NICs, and
    gradients come back likewise, as collective libraries do it. In the paper all of it is exposed; here a rank's own
    block is computed meanwhile."""
    return [case.once(lambda d, t, a: even_shares("all-gather", build_gathered(d, t, a)), "all-gather")]


def ulysses(case: Case) -> list[Candidate]:
    """Split heads over all ranks by all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509). Not possible on more ranks than
    query heads. Key/value heads may be fewer than ranks, and are then copied, which the paper's code cannot do."""
    if case.topology.ranks > case.attention.heads:
        return []
    plan = build_plan(case.documents, case.topology, case.attention, "ulysses")
    return [by_heads(case, "Ulysses", plan, case.topology.ranks)]


def usp(case: Case) -> list[Candidate]:
    """Build Ulysses in groups of neighbouring ranks, a zig-zag ring between them (USP, arXiv 2405.07719; Megatron's
    `a2a+p2p`). Of degrees from half a node's ranks up to the heads, the fastest; smaller ones leave more to the ring,
    and were never faster. A group may be larger than a node: its all-to-all then uses all NICs."""
    least = max(2, case.topology.ranks_per_node // 2)
    candidates = []
    for degree in (d for d in range(least, case.topology.ranks) if case.topology.ranks % d == 0):
        if degree <= case.attention.heads:
            plan = build_plan(case.documents, case.topology, case.attention, "hybrid", ulysses_degree=degree)
            candidates.append(by_heads(case, f"USP, Ulysses {degree}", plan, degree))
    return candidates


def wlb_llm(case: Case) -> list[Candidate]:
    """Build WLB-LLM (arXiv 2503.17924): keys and values of all ranks gathered as in Llama 3; either the packed row in
    zig-zag chunks, wherever documents end, or every document (`all-gather`). The paper takes the one whose kernels are
    estimated faster; here it is the one that is faster by simulation. Rows are packed by work as well, where there are
    several (`packing.py`)."""

    def by_row(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        held = row_zigzag(documents, topology.ranks)
        return Candidate("per sequence", build_gathered(documents, topology, attention, held))

    by_document = [replace(candidate, label="per document") for candidate in all_gather(case)]
    return [*by_document, case.once(by_row, "per sequence")]
