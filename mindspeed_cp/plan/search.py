"""A few dozen placements of a batch, and the one that the planner's model finds fastest.

Candidates are settings of :class:`mindspeed_cp.plan.partition.Setting`: how short a document may be and still be cut,
how long one must be to have its heads split over nodes, with or without a layout of their own for linear layers; groups
of powers of two; and the whole batch cut over all ranks, by tokens or by heads in the nodes. So by this model the
choice is never worse than these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.estimate import Estimate, Score
from mindspeed_cp.plan.partition import Partition, Placement, Setting
from mindspeed_cp.plan.zones import zones

#: Tried for `split` first, with the first of CUT; then the others of CUT, with the best two of SPLIT.
SPLIT = (0.12, float("inf"), 0.06, 0.4, 0.2, 0.03)
CUT = (0.5, 1.0, 0.2)

#: The search ends when a placement is this close to the bound that no plan can beat.
CLOSE = 1.01

#: A layout of its own for linear layers must win this much to be worth its launches, which the model leaves out.
REMAP_GAIN = 0.995

#: Cutting all documents over all ranks is not tried where that makes more pieces: thousands of documents over a
#: thousand ranks are chunks of a token or two, and scoring them takes longer than all else.
MOST_PIECES = 2**19

#: Shares are floating-point numbers.
ROUNDING = 0.5


@dataclass(frozen=True)
class Choice:
    """What the search found.

    Attributes:
        placement: the fastest.
        score: its cost.
        tried: (setting, seconds) of all candidates, in the order of trying.
        ranked: the placements of all candidates, the fastest first.
        bound: seconds that no plan can beat.
    """

    placement: Placement
    score: Score
    tried: tuple[tuple[Setting, float], ...]
    ranked: tuple[Placement, ...]
    bound: float


def search(
    estimate: Estimate,
    most_tokens: int | None = None,
    remap: str = "auto",
    head_split: bool = True,
    thorough: bool = False,
) -> Choice:
    """The fastest placement of a batch, by the planner's model.

    Args:
        estimate: the model.
        most_tokens: a rank holds no more.
        remap: "off", "on", or "auto": where it is faster.
        head_split: heads may be split.
        thorough: try all settings, however good the first ones are.
    """
    never = float("inf")
    topology, bound = estimate.topology, estimate.bound
    splits = SPLIT if head_split and topology.ranks_per_node > 1 else (never,)
    across = zones(estimate).node
    tried: list[tuple[Setting, float]] = []
    found: list[tuple[float, int, Placement, Score]] = []  # by what counts for it, and the order of trying
    pieces = len(estimate.lengths) * topology.ranks
    for with_remap in {"off": (False,), "on": (True,), "auto": (False, True)}[remap]:
        divided, overhead = estimate.divided(with_linear=not with_remap)
        partition = Partition(
            estimate.attention_work if with_remap else estimate.work,
            divided,
            overhead,
            estimate.lengths,
            topology.nodes,
            topology.ranks_per_node,
            estimate.attention.heads,
            most_tokens,
            across,
        )
        seen: set[tuple[Any, ...]] = set()

        def attempt(setting: Setting, partition: Partition = partition, seen: set[Any] = seen) -> bool:
            """Tries a setting, unless one like it was; True when the search may end."""
            key = (*partition.counts(setting), setting.wide, setting.power, setting.everywhere)
            if key not in seen:
                seen.add(key)
                placement = partition.place(setting)
                score = estimate.score(placement)
                if most_tokens is None or score.tokens.max() <= most_tokens + ROUNDING:
                    tried.append((setting, score.total))
                    found.append((score.total / (REMAP_GAIN if setting.remap else 1.0), len(found), placement, score))
            return not thorough and bool(found) and min(found)[0] <= CLOSE * bound

        _try_all(attempt, found, splits, with_remap, topology.ranks, partition.widest > 1, pieces)
        if not thorough and found and min(found)[0] <= CLOSE * bound:
            break
    if not found:
        raise ConfigError(
            f"max_seqlen_per_dp_cp_rank is {most_tokens}: no placement found that keeps it; valid: more, such as "
            f"{max(-(-int(estimate.lengths.sum()) // topology.ranks), most_tokens or 0) * 5 // 4}"
        )
    found.sort(key=lambda entry: entry[:2])
    _, _, placement, score = found[0]
    return Choice(placement, score, tuple(tried), tuple(entry[2] for entry in found), bound)


def _try_all(
    attempt: Callable[[Setting], bool],
    found: list[tuple[float, int, Placement, Score]],
    splits: Sequence[float],
    remap: bool,
    ranks: int,
    wide: bool,
    pieces: int,
) -> None:
    """Settings in the order of trying, until one is close to the bound."""
    never = float("inf")
    before = len(found)
    for split in splits:
        if attempt(Setting(CUT[0], split, remap=remap)):
            return
    best = [entry[2].setting.split for entry in sorted(found[before:])[: 1 if remap else 2]]
    for split in best:
        for cut in CUT[1:]:
            if attempt(Setting(cut, split, remap=remap)):
                return
    if wide:
        apart = sorted(entry for entry in found[before:] if any(width > 1 for width in entry[2].split))
        if apart and attempt(replace(apart[0][2].setting, wide=False)):
            return
    if remap or ranks == 1:  # what other systems do has no such layout
        return
    others = [Setting(1.0, never, power=True)]
    if pieces <= MOST_PIECES:
        others.append(Setting(0, never, everywhere=True))
    if len(splits) > 1:
        others += [Setting(0, 0, wide=far, everywhere=True) for far in ((True, False) if wide else (False,))]
    for setting in others:
        if attempt(setting):
            return
