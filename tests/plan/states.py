"""Problems and layouts of plans of states: documents or trees, cut anywhere, on any ranks."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np

from mindspeed_cp import Documents, StateConfig, StatePlan, build_state_plan
from mindspeed_cp.layout import TOKEN_SPAN, Layout, contiguous, zigzag
from tests.engine.draw import parents

SCHEDULES = ("relay", "gather", "scan", "heads")


def shreds(documents: Documents, ranks: int, rng: Random, pieces: int = 3) -> Layout:
    """Cut every document at random places and give the runs to random ranks; often a rank gets nothing."""
    owners = [rank for rank in range(ranks) if rng.random() < 0.8] or [ranks - 1]
    spans = []
    for doc, (start, stop) in enumerate(pairwise(documents.offsets.tolist())):
        cuts = sorted({start, stop, *(rng.randint(start, stop) for _ in range(rng.randint(0, pieces)))})
        spans += [(rng.choice(owners), doc, *run) for run in pairwise(cuts)]
    table = np.array(spans, TOKEN_SPAN)
    return Layout(documents, ranks, table[np.lexsort((table["start"], table["rank"]))])


def random_layout(rng: Random, ranks: int | None = None, tokens: int = 40, has_trees: bool | None = None) -> Layout:
    """Draw up to six documents of up to `tokens` tokens, some of them empty, and a layout on up to seven ranks."""
    lengths = [rng.choice((0, 1, 2, rng.randint(0, tokens))) for _ in range(rng.randint(1, 6))]
    is_tree = rng.random() < 0.5 if has_trees is None else has_trees
    documents = Documents(lengths, parents(len(lengths), rng) if is_tree else None)
    ranks = rng.randint(1, 7) if ranks is None else ranks
    make = rng.choice((shreds, shreds, contiguous, zigzag))
    return shreds(documents, ranks, rng) if make is shreds else make(documents, ranks)


def random_plan(rng: Random, schedule: str, **how: int | bool | None) -> StatePlan:
    """Draw a plan with few heads, fewer than ranks at times."""
    state = StateConfig(rng.choice(("gated_delta", "kda", "lightning", "mamba2")), rng.randint(1, 5), 2, 3)
    return build_state_plan(random_layout(rng, **how), state, schedule=schedule)  # type: ignore[arg-type]
