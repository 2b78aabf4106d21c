"""Predicted beside measured: tables, notes and JSON of the traced steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.cost import Cluster, cluster_names, load_cluster
from mindspeed_cp.plan.hierarchical import DEFAULT_CLUSTER
from mindspeed_cp.report.measured import Breakdown, MeasuredStep, read_steps
from mindspeed_cp.report.predicted import predict
from mindspeed_cp.report.text import Table, size

MOST_RANKS = 32  # a table has no more of them

#: Figures of a breakdown, and what they are called.
FIGURES = {
    "attention": "attention",
    "exposed": "exposed messages",
    "waiting": "waiting",
    "other": "linear, other",
    "optimizer": "optimizer",
    "seconds": "step",
}

#: Those that nothing predicts.
NOT_MODELLED = ("optimizer",)


@dataclass(frozen=True, eq=False)
class Pair:
    """A step as it was predicted and measured."""

    step: MeasuredStep
    predicted: Breakdown
    measured: Breakdown

    @property
    def number(self) -> int:
        """Of the step."""
        return self.step.number


WHICH: dict[str, Callable[[Pair], Breakdown]] = {
    "predicted": lambda pair: pair.predicted,
    "measured": lambda pair: pair.measured,
}


@dataclass(frozen=True, eq=False)
class Beside:
    """All traced steps of a run, predicted and measured.

    Attributes:
        run: its folder.
        cluster: what the prediction stands on.
        chosen: the cluster as it was named.
        pairs: the steps, at least one.
        notes: what a reader must know.
    """

    run: Path
    cluster: Cluster
    chosen: str
    pairs: Sequence[Pair]
    notes: Sequence[str]


def beside(run: Path, cluster: str | None = None, steps: Sequence[int] = ()) -> Beside:
    """Read the traces of a run and predict the same steps.

    Args:
        run: folder of the run's output.
        cluster: preset or YAML file; default: that of the run's settings, else a2.
        steps: numbers of steps; none: all that were traced.

    Raises:
        ConfigError: there are no traces, one is damaged, or the cluster is unknown or too small.
    """
    found, notes = read_steps(run, steps)
    chosen = found[-1].settings.context_parallel_suite.cluster if cluster is None else cluster
    chosen = DEFAULT_CLUSTER if chosen is None else chosen
    loaded = load_cluster(chosen)
    pairs = [Pair(step, predict(step, loaded), step.breakdown) for step in found]
    return Beside(run, loaded, chosen, pairs, [*_notes(found, chosen), *notes])


def tables(result: Beside) -> list[Table]:
    """What `mindspeed-cp report` prints: each step, and the ranks."""
    return [_steps(result), _ranks(result)]


def as_dict(result: Beside) -> dict[str, Any]:
    """The same, for JSON; seconds and bytes. "ratio" is measured over predicted; null where that is no number."""
    steps = []
    for pair in result.pairs:
        keys = (*FIGURES, "sent", "messages")
        ranks = [
            {
                "rank": rank,
                **{name: {key: float(figure(which(pair), key)[rank]) for key in keys} for name, which in WHICH.items()},
            }
            for rank in range(len(pair.step.ranks))
        ]
        predicted, measured = ({key: overall(made, key) for key in FIGURES} for made in (pair.predicted, pair.measured))
        ratio = {key: measured[key] / predicted[key] if predicted[key] else None for key in FIGURES}
        steps.append(
            {"step": pair.number, "predicted": predicted, "measured": measured, "ratio": ratio, "ranks": ranks}
        )
    return {
        "run": str(result.run),
        "predicted_is": "modelled",
        "cluster": result.chosen,
        "device": result.pairs[-1].step.about["device"],
        "steps": steps,
        "notes": list(result.notes),
    }


def figure(made: Breakdown, key: str) -> np.ndarray:
    """A figure of each rank."""
    values: np.ndarray = getattr(made, key)
    return values


def overall(made: Breakdown, key: str) -> float:
    """A figure of a step: the mean of all ranks; of the step's own time, that of the slowest."""
    values = figure(made, key)
    return float(values.max() if key == "seconds" else values.mean())


def seconds(number: float) -> str:
    """Milliseconds with as many digits as say something."""
    return f"{number * 1e3:,.{2 if number < 0.01 else 1 if number < 1 else 0}f}"


def _steps(result: Beside) -> Table:
    """Predicted, measured and their ratio for each step."""
    rows = []
    for pair in result.pairs:
        for name, which in WHICH.items():
            cells = _cells(name, [(key, overall(which(pair), key)) for key in FIGURES])
            rows.append((f"step {pair.number}", name, *cells))
        both = ((overall(pair.measured, key), overall(pair.predicted, key)) for key in FIGURES)
        rows.append(("", "ratio", *(_ratio(*one) for one in both)))
    return Table("Steps, ms: mean of the ranks; step: the slowest rank", ("", "", *FIGURES.values()), tuple(rows))


def _ranks(result: Beside) -> Table:
    """Predicted and measured for each rank of the last start."""
    pairs, shown = settled(result), [key for key in FIGURES if key != "seconds"]
    means = {
        name: {key: np.mean([figure(which(pair), key) for pair in pairs], axis=0) for key in (*shown, "sent")}
        for name, which in WHICH.items()
    }
    longest = np.argsort(-means["measured"]["attention"], kind="stable")
    rows = []
    for rank in sorted(longest[:MOST_RANKS].tolist()):
        for name, values in means.items():
            cells = _cells(name, [(key, float(values[key][rank])) for key in shown])
            rows.append((f"rank {rank}", name, *cells, size(float(values["sent"][rank]))))
    which = f", the {MOST_RANKS} of {len(longest)} that compute longest" if len(longest) > MOST_RANKS else ""
    numbers = ", ".join(str(pair.number) for pair in pairs)
    title = f"Ranks{which}, ms: mean of step{'s' * (len(pairs) > 1)} {numbers}"
    return Table(title, ("", "", *(FIGURES[key] for key in shown), "sent"), tuple(rows))


def settled(result: Beside) -> list[Pair]:
    """Steps on as many ranks as the last one, without those that were the first of a start, if there are others."""
    size_of_last = len(result.pairs[-1].step.ranks)
    pairs = [pair for pair in result.pairs if len(pair.step.ranks) == size_of_last]
    return [pair for pair in pairs if not pair.step.about["first_of_start"]] or pairs


def _cells(name: str, values: Sequence[tuple[str, float]]) -> list[str]:
    """Seconds, and a dash for what nothing predicts."""
    return ["-" if name == "predicted" and key in NOT_MODELLED else seconds(value) for key, value in values]


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted > 0 else "-"


def _notes(steps: Sequence[MeasuredStep], chosen: str) -> list[str]:
    """What the figures mean and leave out, and what makes them hard to compare."""
    device = steps[-1].about["device"]
    found = [
        f"predicted is modelled on cluster {chosen}: attention, messages and linear layers of all layers, and the "
        "reduction of gradients; not embeddings, output layer, loss, optimizer, or what the host does, which are in "
        'the measured "linear, other" and "optimizer"',
        "exposed messages, measured: posting them, waiting for them or for a rank that is late, and putting rows in "
        "place; waiting: for all ranks at the step's end, for the reduction of gradients, for batches",
    ]
    if device == "cpu" and chosen in cluster_names():
        kind = "bf16" if steps[-1].settings.train.bf16 else "fp32"
        found.append(
            f"the run was on CPUs, and cluster {chosen} is of other devices: mindspeed-cp calibrate mine.yaml --device "
            f"cpu --dtype {kind}, then --cluster mine.yaml"
        )
    first = [str(step.number) for step in steps if step.about["first_of_start"]]
    if first:
        found.append(f"step {', '.join(first)}: the first of its start, with all that is done only once")
    return found
