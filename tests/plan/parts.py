"""Plans of parts for tests: some documents with keys and values exchanged, others with their heads split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.layout import Layout, contiguous, zigzag
from mindspeed_cp.plan import combine, document_mask, select_documents, select_layout
from tests.plan.head_split import head_split_part


def halves(ranks: int) -> tuple[list[int], list[int]]:
    """The ranks in two groups; of an odd number the second is larger, one rank is both."""
    return list(range(max(ranks // 2, 1))), list(range(ranks // 2, ranks))


def split_heads(
    documents: Documents,
    keys: Documents,
    attention: AttentionConfig,
    ranks: int,
    chosen: Sequence[int],
    group: Sequence[int],
) -> Plan:
    """The chosen documents, each cut over the ranks of a group, with heads split over these ranks."""
    mask = np.isin(np.arange(len(documents)), chosen)
    groups = [group] * len(documents)
    part_documents, mine_kv = select_documents(documents, mask), select_documents(keys, mask)
    held = contiguous(part_documents, ranks, groups)
    held_kv = held if keys is documents else zigzag(mine_kv, ranks, groups)
    return head_split_part(part_documents, Topology(1, ranks), attention, groups, held, held_kv)


def mixed_plan(
    documents: Documents,
    ranks: int,
    attention: AttentionConfig,
    algorithm: str = "direct",
    keys: Documents | None = None,
) -> Plan:
    """Documents 0, 3, 6 .. by an algorithm over all ranks; 1, 4 .. with heads split over the first half of the ranks;
    2, 5 .. with heads split over the second."""
    keys = documents if keys is None else keys
    number = np.arange(len(documents))
    first, second = halves(ranks)
    part_documents, mine_kv = select_documents(documents, number % 3 == 0), select_documents(keys, number % 3 == 0)
    parts = [
        build_plan(
            part_documents,
            Topology(1, ranks),
            attention,
            algorithm,
            None if keys is documents else mine_kv,
            latents="auto" if attention.latent is None else "on",
        ),
        split_heads(documents, keys, attention, ranks, number[number % 3 == 1].tolist(), first),
        split_heads(documents, keys, attention, ranks, number[number % 3 == 2].tolist(), second),
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
