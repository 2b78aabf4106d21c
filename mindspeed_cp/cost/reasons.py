"""Why a candidate was chosen, in three lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspeed_cp.cost.timeline import Timeline

if TYPE_CHECKING:
    from mindspeed_cp.cost.choose import Tried


def reasons(tried: Sequence[Tried]) -> tuple[str, str, str]:
    """What was chosen, what it does with its time, and how the best of every other algorithm fares.

    Args:
        tried: all candidates, the chosen one first.
    """
    first, others = tried[0], tried[1:]
    assert first.timeline is not None  # it was simulated
    count = len(first.seconds)
    batches = f" (mean of {count} batches)" if count > 1 else ""
    mean = 1e3 * sum(first.seconds) / count
    return (
        f"{first.candidate}: {mean:.3g} ms a layer{batches}, modelled for {first.timeline.cluster.name}"
        + _same(first, others),
        _time(first.timeline, count) + _second(first, others),
        _rest(first, others),
    )


def _same(first: Tried, others: Sequence[Tried]) -> str:
    same = [str(one.candidate) for one in others if one.same_as == first.candidate]
    return f"; the same plans: {', '.join(same)}" if same else ""


def _time(timeline: Timeline, batches: int) -> str:
    busy, waits = float((timeline.compute + timeline.linear).mean()), float(timeline.waiting.mean())
    where = "on the first batch its mean rank" if batches > 1 else "its mean rank"
    return f"{where} computes {1e3 * busy:.3g} ms and waits {1e3 * waits:.3g} ms"


def _second(first: Tried, others: Sequence[Tried]) -> str:
    """The fastest of those that were simulated."""
    simulated = [one for one in others if one.seconds and one.same_as is None]
    if not simulated:
        return "; nothing else had to be simulated"
    second = min(simulated, key=lambda one: _times(first, one))
    timeline = second.timeline
    assert timeline is not None
    busy, waits = float((timeline.compute + timeline.linear).mean()), float(timeline.waiting.mean())
    return f"; with {second.candidate} {1e3 * busy:.3g} and {1e3 * waits:.3g} ms"


def _rest(first: Tried, others: Sequence[Tried]) -> str:
    """The best candidate of each algorithm, and all that cannot be done."""
    compared = [one for one in others if one.same_as is None and one.refused is None]
    compared.sort(key=lambda one: _times(first, one))
    said, named = [], set()
    for one in compared:
        if one.candidate.algorithm not in named:
            named.add(one.candidate.algorithm)
            least = "at least " if one.cause else ""
            said.append(f"{one.candidate}: {least}{_times(first, one):.2f} times as long{_on(first, one)}")
    said += [f"{one.candidate}: {one.refused}" for one in others if one.refused is not None]
    return "others: " + "; ".join(said) if said else "there is no other candidate"


def _times(first: Tried, one: Tried) -> float:
    """How many times as long as the chosen one a candidate takes, or at least takes, on the batches that it was tried
    on."""
    return one.least / sum(first.seconds[: one.looked_at])


def _on(first: Tried, one: Tried) -> str:
    """On which batches, and of what the last one's time is."""
    some = one.looked_at < len(first.seconds)
    batches = "the first batch" if one.looked_at == 1 else f"the first {one.looked_at} batches"
    return (f" on {batches}" if some else "") + (f" ({one.cause} alone takes that)" if one.cause else "")
