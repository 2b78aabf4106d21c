"""Which tile of a plan explains a wrong output: the one whose weight, made larger or smaller, gives that output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.engine.sample_reference import SampleReference
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.plan import Plan

EXPLAINED = 0.9  # least share of the difference, as a sum of squares, that a tile has to explain


class Forward(NamedTuple):
    """What an explanation needs of the forward, all fp64: q, k and v of the sample, the right output and lse, and the
    output that was computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    right: Tensor
    lse: Tensor
    computed: Tensor


class SampleTile(NamedTuple):
    """A tile of the forward on one rank: its step, and its queries and keys among the sample's, int64 each."""

    step: int
    queries: np.ndarray
    keys: np.ndarray


def explain(reference: SampleReference, wrong: np.ndarray, ranks: Sequence[int], forward: Forward | None) -> str:
    """Describe where wrong queries were computed, and by which tile, if one of them explains the difference.

    Args:
        reference: the sample.
        wrong: True for queries that differ, bool [queries].
        ranks: global rank of each context-parallel rank.
        forward: the forward's tensors; None: name no tile.
    """
    plan, sample = reference.plan, reference.sample
    holders = computing_ranks(plan, sample.head, sample.document, sample.position + np.arange(sample.rows))
    rank = int(np.bincount(holders[wrong]).argmax())
    own = np.flatnonzero(wrong & (holders == rank))
    text = (
        f"queries {sample.position + own[0]} to {sample.position + own[-1]} of document {sample.document}, computed on "
        f"rank {ranks[rank]} with keys {sample.first_key} to {sample.first_key + sample.keys - 1},"
    )
    best = None if forward is None else _best_tile(reference, rank, torch.from_numpy(holders == rank), forward)
    if best is None:
        return text
    tile, weight = best
    how = "was missing" if abs(weight) < 0.05 else f"counted {weight:.2f} times"
    return (
        f"{text} as if its tile of step {tile.step}, keys {sample.first_key + tile.keys[0]} to "
        f"{sample.first_key + tile.keys[-1]}, {how},"
    )


def computing_ranks(plan: Plan, head: int, document: int, positions: np.ndarray) -> np.ndarray:
    """Return the rank that computes each query of a head, int64 [positions]."""
    part = next(part for part in plan.parts_or_self if part.documents.lengths[document])
    layout = part.q_layout_compute
    bounds = layout.head_bounds(plan.attention.heads)[layout.spans["rank"]]
    spans = layout.spans[(bounds[:, 0] <= head) & (head < bounds[:, 1])]
    first = part.documents.offsets[document] - part.documents.first_positions[document]
    tokens = first + positions[:, None]
    return spans["rank"][((spans["start"] <= tokens) & (tokens < spans["stop"])).argmax(1)]


def sample_tiles(reference: SampleReference, rank: int) -> Iterator[SampleTile]:
    """Yield the tiles of a rank's forward that have queries and keys of the sample."""
    sample, plan = reference.sample, reference.plan
    part = next(part for part in plan.parts_or_self if part.documents.lengths[sample.document])
    program, contents = part.forward, part.forward.contents_of(rank)
    documents = part.documents
    first_q = documents.offsets[sample.document] - documents.first_positions[sample.document] + sample.position
    tokens = part.q_layout_compute.tokens(rank)
    tiles, content_of = program.tiles_of(rank, contents)
    for tile, content in zip(tiles, contents[content_of], strict=True):
        spans = program.spans_in(content)
        slot = ragged_arange(spans["start"], spans["stop"] - spans["start"])
        row = int(tile["k_row"] - content["row"])
        queries = tokens[tile["q_row"] : tile["q_row"] + tile["q_rows"]] - first_q
        keys = sample.key_numbers(part.kv_documents, slot[row : row + tile["k_rows"]])
        queries, keys = queries[(queries >= 0) & (queries < sample.rows)], keys[keys >= 0]
        if len(queries) and len(keys):
            yield SampleTile(int(tile["step"]), queries, keys)


def _best_tile(reference: SampleReference, rank: int, own: Tensor, forward: Forward) -> tuple[SampleTile, float] | None:
    """Return the tile whose other weight explains the output of a rank's own queries best, and that weight, 1 where all
    is well; None if none explains enough.

    With weight 1 + a instead of 1 for a tile whose part of the output is p and whose share of the weights is w, the
    output x is (right + a p) / (1 + a w): x - right = a (p - w x).
    """
    difference = torch.where(own[:, None], forward.computed - forward.right, 0.0)
    best: tuple[float, SampleTile, float] | None = None
    for tile in sample_tiles(reference, rank):
        keys = torch.from_numpy(tile.keys)
        part, lse = reference.attend(forward.q, forward.k[keys], forward.v[keys], keys)
        in_tile = torch.zeros_like(own).index_fill(0, torch.from_numpy(tile.queries), True) & own
        share = (lse - forward.lse).exp()[:, None]
        direction = torch.where(in_tile[:, None], share * (part - forward.computed), 0.0)
        square = float((direction * direction).sum())
        along = float((direction * difference).sum())
        if square > 0 and (best is None or along * along / square > best[0]):
            best = along * along / square, tile, 1 + along / square
    if best is None or not best[0] >= EXPLAINED * float((difference * difference).sum()):
        return None
    return best[1], best[2]
