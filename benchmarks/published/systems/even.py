"""A batch on some ranks, and candidates that stand for all ranks by the tiles of some."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.published.timing import Candidate
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.cluster import Cluster
from mindspeed_cp.layout import Layout, row_zigzag, zigzag
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import CONTENT, MESSAGE, ROW_RUN, Messages, sorted_contents

#: Tiles of so many ranks stand for those of all, where documents are cut evenly over all of them.
LOOKED_AT = 16


@dataclass(frozen=True)
class Case:
    """One batch on some ranks.

    Attributes:
        documents: the batch, or one row of it.
        topology: the ranks; its cluster is the preset that plans may go by.
        attention: of the layer.
        cluster: that preset, of as many ranks a node as are in use.
        shared: candidates that were made already, for other clusters or heads too.
        room: tokens that a rank may hold; None: any number.
    """

    documents: Documents
    topology: Topology
    attention: AttentionConfig
    cluster: Cluster
    shared: dict[object, Candidate] = field(default_factory=dict)
    room: int | None = None

    def once(self, make: Callable[[Documents, Topology, AttentionConfig], Candidate], *what: object) -> Candidate:
        """Return a candidate that depends on documents, nodes and ranks, and on `what` names it, alone: neither on the
        cluster's speeds nor on numbers of heads."""
        topology = replace(self.topology, cluster=None)
        key = self.documents, topology, what
        if key not in self.shared:
            self.shared[key] = make(self.documents, topology, self.attention)
        return self.shared[key].with_attention(self.attention)


def even_shares(label: str, plan: Plan) -> Candidate:
    """Return a plan in which every document is cut evenly over all ranks, so that evenly spaced ranks stand for the
    others."""
    count = min(plan.ranks, LOOKED_AT)
    chosen = np.unique(np.linspace(0, plan.ranks - 1, count).round().astype(np.int64))
    return Candidate(label, plan, nearest(chosen, plan.ranks))


def by_heads(case: Case, label: str, plan: Plan, degree: int) -> Candidate:
    """Return a plan whose groups of ranks split heads: where all have as many, the first member of each group stands
    for the others, and of many groups evenly spaced ones for their neighbours. Tiles do not depend on key/value
    heads."""
    if plan.attention.heads % degree:
        return Candidate(label, plan)
    groups = plan.ranks // degree
    chosen = np.unique(np.linspace(0, groups - 1, min(groups, LOOKED_AT)).round().astype(np.int64))
    representative = np.repeat(nearest(chosen, groups), degree) * degree
    like = case.once(lambda *_: Candidate(label, plan, representative), label, plan.attention.heads)
    return Candidate(label, plan, representative, counted=like.counted)


def nearest(chosen: np.ndarray, count: int) -> np.ndarray:
    """Return which of the chosen numbers, ascending, is nearest to each number below `count`."""
    edges = (chosen[1:] + chosen[:-1] + 1) // 2
    out: np.ndarray = chosen[np.searchsorted(edges, np.arange(count), "right")]
    return out


# Systems that cut every document evenly over all ranks, or split heads over them.


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


# All-gather of keys and values by blocks, as collective libraries bring it about: each block crosses to a node once.
#
# Rank r of a node gets the blocks of the ranks r of all other nodes over its own NIC, one node after the other, and
# passes each on to the others of its node while the next one crosses. All attention but a rank's own block follows when
# everything is there; gradients return the same way, summed at the relays::
#
#     step            0            1            2           3            4
#     computes        own                                   all others
#     in the node     own blocks   node n - 1   node n - 2               gradients ...
#     across          node n - 1   node n - 2


def build_gathered(
    documents: Documents, topology: Topology, attention: AttentionConfig, held: Layout | None = None
) -> Plan:
    """Return the plan of an all-gather over all ranks.

    Slot 1 has the blocks of all ranks one after the other; that of the rank itself stays empty, since slot 0 has it.

    Args:
        documents, topology, attention: as for the ring.
        held: which rank holds what; default: documents in equal zig-zag shares.
    """
    held = zigzag(documents, topology.ranks) if held is None else held
    nodes = topology.nodes
    computed = nodes if topology.ranks > 1 else 0  # the step in which all is there
    contents = _contents(held, computed)
    capacity = np.stack([held.token_counts, np.full(held.ranks, documents.tokens if computed else 0)], 1)
    there, back = _hops(held, topology, computed)
    none = Messages.empty()
    forward = Program(computed + 1, capacity, held, documents, attention, contents, held.spans, there, none)
    if not len(there):
        return Plan("gathered", attention, topology, held, held, held, held, forward, forward)
    last = int(back.items["done"].max()) + 1
    backward = Program(last, capacity, held, documents, attention, contents, held.spans, there, back)
    return Plan("gathered", attention, topology, held, held, held, held, forward, backward)


def _contents(held: Layout, computed: int) -> np.ndarray:
    """Return the contents: own blocks in step 0, all others in the step in which they are there."""
    n = held.ranks
    rank, block = np.divmod(np.arange(n * n), n)
    own = rank == block
    out = np.zeros(n * n, CONTENT)
    out["rank"], out["step"], out["slot"] = rank, np.where(own, 0, computed), np.where(own, 0, 1)
    out["row"] = np.where(own, 0, (np.cumsum(held.token_counts) - held.token_counts)[block])
    out["first"], out["count"] = held.span_offsets[block], np.diff(held.span_offsets)[block]
    return sorted_contents(out[out["count"] > 0])


def _hops(held: Layout, topology: Topology, computed: int) -> tuple[Messages, Messages]:
    """Return the hops of keys to their readers, and of gradients back."""
    n, per, nodes = topology.ranks, topology.ranks_per_node, topology.nodes
    rank = np.arange(n)
    there: list[np.ndarray] = []
    back: list[np.ndarray] = []

    def add(block: np.ndarray, src: np.ndarray, dst: np.ndarray, step: int, own: bool, home: int) -> None:
        """Add hops of blocks from src to dst in a step, and their gradients back from dst to src in step `home`."""
        for into, begin, ends, slots in ((there, step, (src, dst), (0 if own else 1, 1)),
                                         (back, home, (dst, src), (1, 0 if own else 1))):  # fmt: skip
            message = np.zeros(len(block), MESSAGE)
            message["start"] = message["done"] = begin
            message["src"], message["dst"], message["src_slot"], message["dst_slot"] = *ends, *slots
            message["first"] = block  # for now; its runs follow
            into.append(message)

    for other in range(1, per):
        peer = rank // per * per + (rank + other) % per
        add(rank, rank, peer, 0, True, computed + 1)
        for far in range(1, nodes):
            block = (rank + far * per) % n  # came over this rank's NIC in step far - 1
            add(block, rank, peer, far, False, computed + far)
    for far in range(1, nodes):
        add(rank, rank, (rank - far * per) % n, far - 1, True, computed + far + 1)
    return _messages(there, held), _messages(back, held)


def _messages(tables: list[np.ndarray], held: Layout) -> Messages:
    """Return the messages with the rows of each block: in slot 0 from 0 on, in slot 1 at its place."""
    if not tables:
        return Messages.empty()
    items = np.concatenate(tables)
    rows = held.token_counts
    first_row = np.cumsum(rows) - rows
    block = items["first"].copy()
    keep = rows[block] > 0
    items, block = items[keep], block[keep]
    runs = np.zeros(len(items), ROW_RUN)
    runs["rows"] = items["rows"] = rows[block]
    for end in ("src", "dst"):
        runs[end + "_row"] = np.where(items[end + "_slot"] == 0, 0, first_row[block])
    items["first"], items["count"] = np.arange(len(items)), 1
    return Messages(items, runs).in_global_order()
