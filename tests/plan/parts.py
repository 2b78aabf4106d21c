"""Plans of parts for tests: some documents with keys and values exchanged, others with their heads split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms.head_groups import head_groups_plan
from mindspeed_cp.algorithms.kv_fetch.programs import staged
from mindspeed_cp.layout import Layout, contiguous
from mindspeed_cp.plan import combine, document_mask, select_documents, select_layout


def split_heads(
    documents: Documents, keys: Documents, attention: AttentionConfig, ranks: int, chosen: np.ndarray, groups: int
) -> Plan:
    """The chosen documents, each on one of some groups of neighbouring ranks, which split its heads."""
    doc_groups = [[doc % groups] for doc in range(len(documents))]
    held = contiguous(select_documents(documents, chosen), groups, doc_groups)
    held_kv = held if keys is documents else contiguous(select_documents(keys, chosen), groups, doc_groups)
    programs = staged(held, held_kv, attention, Topology(groups, 1), routing=False)
    return head_groups_plan("head_split", held, held_kv, Topology(1, ranks), attention, programs)


def mixed_plan(
    documents: Documents,
    ranks: int,
    attention: AttentionConfig,
    algorithm: str = "direct",
    keys: Documents | None = None,
) -> Plan:
    """Documents 0, 3, 6 .. by an algorithm over all ranks; 1, 4 .. with heads split over all ranks; 2, 5 .. with heads
    split over one half of the ranks or the other, or over all of an odd number."""
    keys = documents if keys is None else keys
    number = np.arange(len(documents))
    exchanged, exchanged_keys = (select_documents(x, number % 3 == 0) for x in (documents, keys))
    parts = [
        build_plan(
            exchanged,
            Topology(1, ranks),
            attention,
            algorithm,
            None if keys is documents else exchanged_keys,
            latents="auto" if attention.latent is None else "on",
        ),
        split_heads(documents, keys, attention, ranks, number % 3 == 1, 1),
        split_heads(documents, keys, attention, ranks, number % 3 == 2, 2 - ranks % 2),
    ]
    return combine("mixed", parts)


def remapped(plan: Plan, layout: Layout) -> Plan:
    """The same plan for a caller that holds another layout."""
    held = [select_layout(layout, document_mask(part)) for part in plan.parts]
    parts = [replace(part, layout=layout, kv_layout_in=layout) for part, layout in zip(plan.parts, held, strict=True)]
    return combine("remapped", parts, plan.forward_order, plan.backward_order)


def shuffled(plan: Plan, seed: int) -> Plan:
    """The same plan with its parts' steps in any order that is possible."""
    rng = np.random.default_rng(seed)

    def order(direction: str) -> tuple[tuple[int, int], ...]:
        parts = rng.permutation([part for part, _ in plan.step_order(direction)])
        return tuple((int(part), int((parts[:position] == part).sum())) for position, part in enumerate(parts))

    return replace(plan, forward_order=order("forward"), backward_order=order("backward"))
