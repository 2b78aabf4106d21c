"""Keys and values go straight from their owner to the ranks that need them, and only the part that each needs.

What `direct` and `all_gather` share. The other ranks are a rank's sources, taken in rounds; a round's sources fill one
slot, in token order, so that its rows make as few tiles as can be. Round g is computed in step g + 1 and asked for
`prefetch` steps before; its gradients leave for their owners in the step after::

    step         0           1           2           3
    computes     own         round 0     round 1     round 2
    receives     round 0     round 1     round 2                 (prefetch 1)
    returns                              round 0     round 1

In the backward half of the own block waits for the last step, in which the last gradients return.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mindspeed_cp.layout import Layout, joined, overlaps
from mindspeed_cp.plan.config import AttentionConfig
from mindspeed_cp.plan.halves import own_block_in_two_halves
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import CONTENT, MESSAGE, RUN, Messages, sorted_contents
from mindspeed_cp.plan.visibility import visible_tokens


def exchange(
    queries: Layout, keys: Layout, attention: AttentionConfig, round_of: np.ndarray, prefetch: int
) -> tuple[Program, Program]:
    """Forward and backward program.

    Args:
        queries: where queries are.
        keys: where keys and values are; the same ranks.
        attention: what is computed.
        round_of: round in which rank r takes what it needs of rank (r - offset) mod ranks, int64 [ranks]; entry 0,
            which is the rank itself, is not used. Rounds that bring nothing to any rank are left out.
        prefetch: rounds on their way while one is computed, 1 or more; slots are one more.
    """
    n = keys.ranks
    pieces, to, number, source_row = _needed(queries, keys, attention, round_of)
    brings = np.bincount(number, minlength=1) > 0  # rounds that bring something, numbered anew
    number, rounds = (np.cumsum(brings) - 1)[number], int(brings.sum())
    slots = min(prefetch + 1, rounds)

    length = pieces["stop"] - pieces["start"]
    begins = _begins(to, number)
    size = np.diff(np.append(begins, len(pieces)))
    before = np.cumsum(length) - length
    row = before - np.repeat(before[begins], size)  # in the slot
    filled = np.add.reduceat(length, begins) if len(begins) else np.zeros(0, np.int64)
    capacity = np.zeros((n, 1 + slots), np.int64)
    capacity[:, 0] = keys.token_counts
    np.maximum.at(capacity, (to[begins], 1 + number[begins] % max(slots, 1)), filled)

    contents = np.zeros(len(begins), CONTENT)
    contents["step"], contents["rank"] = number[begins] + 1, to[begins]
    contents["slot"] = 1 + number[begins] % max(slots, 1)
    contents["first"], contents["count"] = len(keys.spans) + begins, size
    own = np.zeros(n, CONTENT)
    own["rank"], own["first"], own["count"] = np.arange(n), keys.bounds[:-1], np.diff(keys.bounds)
    contents = sorted_contents(np.concatenate([own[own["count"] > 0], contents]))
    table = np.concatenate([keys.spans, pieces])

    fetch = _messages(pieces, to, source_row, row, number, prefetch, slots, n)
    steps = rounds + 1
    forward = Program(steps, capacity, queries, keys.documents, attention, contents, table, fetch, Messages.none())
    if not len(fetch):
        return forward, forward
    reduce = fetch.reversed()
    computed = fetch.items["done"] + 1
    reduce.items["start"] = computed + 1
    reduce.items["done"] = np.minimum(computed + prefetch, steps)  # when the slot is filled again
    contents, table = own_block_in_two_halves(queries, keys, attention, contents, table, steps)
    backward = Program(steps + 1, capacity, queries, keys.documents, attention, contents, table, fetch, reduce.sorted())
    return forward, backward


def _needed(
    queries: Layout, keys: Layout, attention: AttentionConfig, round_of: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What every rank needs of the others, by rank, round and token.

    Returns:
        Pieces of spans (records of dtype SPAN, `rank` the owner); for each the rank that needs it, the round, and its
        first row at the owner.
    """
    n = keys.ranks
    by_token = np.argsort(keys.spans["start"], kind="stable")
    spans, row = keys.spans[by_token], keys.first_rows[by_token]
    found: list[tuple[np.ndarray, ...]] = [(spans[:0], *(np.zeros(0, np.int64),) * 3)]
    for rank, runs in enumerate(visible_tokens(queries, keys, attention)):
        _, of, first, last = overlaps(runs[:, 0], runs[:, 1], spans["start"], spans["stop"])
        owner = spans["rank"][of]
        number = round_of[(rank - owner) % n]
        # Small integers are sorted by radix.
        order = np.argsort(np.where(owner == rank, n, number).astype(np.min_scalar_type(n)), kind="stable")
        order = order[: len(order) - np.count_nonzero(owner == rank)]
        of, first, last = of[order], first[order], last[order]
        pieces = spans[of]
        pieces["start"], pieces["stop"] = first, last
        found.append((pieces, np.full(len(of), rank), number[order], row[of] + first - spans["start"][of]))
    pieces, to, number, source_row = (np.concatenate(column) for column in zip(*found, strict=True))
    return pieces, to, number, source_row


def _messages(
    pieces: np.ndarray,
    to: np.ndarray,
    src_row: np.ndarray,
    dst_row: np.ndarray,
    number: np.ndarray,
    prefetch: int,
    slots: int,
    ranks: int,
) -> Messages:
    """One message for every target, round and source; rows that follow each other on both sides are one run."""
    if not len(pieces):
        return Messages.none()
    src, length = pieces["rank"], pieces["stop"] - pieces["start"]
    edges = np.flatnonzero(np.append(True, to[1:] != to[:-1]))
    same_source = (src[1:] == src[:-1]) | (number[1:] != number[:-1]) | (to[1:] != to[:-1])
    if not same_source.all():  # a round of many sources: group by source what is in token order
        key = number * ranks + src
        key = key.astype(np.min_scalar_type(int(key.max())))  # small integers are sorted by radix
        order = np.concatenate(
            [first + np.argsort(key[first:last], kind="stable") for first, last in pairwise([*edges.tolist(), len(to)])]
        )
        src, to, number, length = src[order], to[order], number[order], length[order]
        src_row, dst_row = src_row[order], dst_row[order]
    runs = np.empty(len(src), RUN)
    runs["src_row"], runs["dst_row"], runs["rows"] = src_row, dst_row, length
    first = _begins(to, number, src)
    other = np.zeros(len(runs), bool)
    other[first] = True
    whole, kept = joined(runs, ("src_row", "dst_row"), other)

    items = np.empty(len(first), MESSAGE)
    items["src"], items["dst"], items["src_slot"] = src[first], to[first], 0
    items["dst_slot"] = 1 + number[first] % slots
    items["done"] = number[first]
    items["start"] = np.maximum(0, number[first] + 1 - prefetch)
    items["first"] = np.searchsorted(kept, first)
    items["count"] = np.diff(np.append(items["first"], len(whole)))
    items["rows"] = np.add.reduceat(runs["rows"], first)
    return Messages(items, whole).sorted()


def _begins(*keys: np.ndarray) -> np.ndarray:
    """Where, in sorted keys, a new combination begins."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.append(True, np.any([key[1:] != key[:-1] for key in keys], axis=0)))
