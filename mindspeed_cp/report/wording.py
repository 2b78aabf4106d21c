"""What the picture of a plan says in words: whose keys, what arrives, which ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.layout import Redistribution
from mindspeed_cp.plan import Plan
from mindspeed_cp.report.summary import PlanSummary
from mindspeed_cp.report.text import count


def some_documents(lengths: np.ndarray, kv_lengths: np.ndarray) -> str:
    """ "3 documents (700, 30, 4,100 tokens)"; in cross-attention queries and keys."""
    crossed = kv_lengths is not lengths
    if 0 < len(lengths) <= 6:
        queries, keys = (", ".join(map(count, one)) for one in (lengths, kv_lengths))
        what = f"{queries} queries; {keys} keys" if crossed else f"{queries} tokens"
        return f"1 document of {what}" if len(lengths) == 1 else f"{len(lengths)} documents ({what})"
    what = f"{count(lengths.sum())} {'queries' if crossed else 'tokens'}"
    return f"{len(lengths):,} documents, {what}" + (f" and {count(kv_lengths.sum())} keys" if crossed else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 2-3", "ranks 0, 2, 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 or ranks[1] == ranks[0] + 1:
        if ranks[-1] - ranks[0] == len(ranks) - 1:
            return f"ranks {ranks[0]}-{ranks[-1]}"
        if len(ranks) > 3:
            return f"{len(ranks)} ranks"
    return f"ranks {', '.join(map(str, ranks))}"


def held_text(plan: Plan, numbers: PlanSummary, rank: int) -> str:
    """What a rank holds: "2,125 tokens, 3 whole documents"; of cross-attention queries and keys."""
    tokens = count(numbers.tokens[rank])
    if numbers.kv_lengths is not numbers.lengths:
        return f"{tokens} queries, {count(plan.layout_kv.token_counts[rank])} keys"
    spans = plan.layout.of(rank)
    whole = int((spans["stop"] - spans["start"] == plan.documents.lengths[spans["doc"]]).sum())
    if not whole or plan.ranks == 1:
        return f"{tokens} token{'s' * (tokens != '1')}"
    return f"{tokens} tokens, {whole:,} whole document{'s' * (whole > 1)}"


def of_ranks(plan: Plan, rank: int, owners: Sequence[int]) -> str:
    """Whose keys and values a rank computes against: those that `owners` have, which after a move are of several
    ranks; `owners` has one rank at least."""
    if plan.kv_move is None:
        return "own K/V" if list(owners) == [rank] else f"K/V of {ranks_text(owners)}"
    parts = plan.kv_move.parts
    sources = sorted(set(parts["src"][np.isin(parts["dst"], owners)].tolist()))
    return f"K/V of {'all ranks' if len(sources) == plan.ranks else ranks_text(sources)}"


def arrivals(plan: Plan, rank: int, step: int) -> str:
    """What arrives while a rank computes a step, in a plan without parts: "← 1,207 rows from rank 3"; empty if nothing
    does."""
    items = plan.forward.fetch.items
    mine = items[(items["dst"] == rank) & (items["done"] == step)]
    if not len(mine):
        return ""
    return f"← {count(mine['rows'].sum())} rows from {ranks_text(sorted(set(mine['src'].tolist())))}"


def exchanging(plan: Plan) -> list[list[int]]:
    """Groups of ranks that exchange rows before and after the steps, in one part or more; ranks that exchange with
    nobody are left out."""
    group = list(range(plan.ranks))
    for move in (move for piece in plan.pieces for move in (piece.q_move, piece.kv_move)):
        for src, dst in [] if move is None else _pairs(move):
            if group[src] != group[dst]:
                old, new = max(group[src], group[dst]), min(group[src], group[dst])
                group = [new if g == old else g for g in group]
    found = [[rank for rank in range(plan.ranks) if group[rank] == g] for g in sorted(set(group))]
    return [ranks for ranks in found if len(ranks) > 1]


def _pairs(move: Redistribution) -> list[tuple[int, int]]:
    return list(zip(move.parts["src"].tolist(), move.parts["dst"].tolist(), strict=True))
