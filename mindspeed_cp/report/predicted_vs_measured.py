"""Predicted and measured time of traced steps: tables, JSON values, and one trace of both.

The prediction is the same plans, for the same documents, modelled on a cluster. A step is its micro-batches one after
the other, a micro-batch its layers one after the other, and all ranks begin each layer together
(:func:`mindspeed_cp.simulate.simulator.simulate_plan`). The reduction of gradients comes last. Embeddings, output
layer, loss, optimizer and the work of the host are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost, cluster_names, load_cluster
from mindspeed_cp.cluster.cluster import DEFAULT_CLUSTER
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Redistribution, sequence_parallel_layout
from mindspeed_cp.plan import Plan, traffic
from mindspeed_cp.report.step_trace import MeasuredStep, TimeBreakdown, read_traced_steps
from mindspeed_cp.report.text import Table, format_bytes
from mindspeed_cp.report.trace_events import timeline_recording, write_trace
from mindspeed_cp.simulate.simulator import linear_times, simulate_plan

#: Largest number of ranks in the table of ranks.
COMPARED_RANK_LIMIT = 32

#: Fields of a breakdown and their headings.
BREAKDOWN_LABELS = {
    "attention": "attention",
    "exposed": "exposed messages",
    "waiting": "waiting",
    "other": "linear, other",
    "optimizer": "optimizer",  # not modelled
    "seconds": "step",
}


@dataclass(frozen=True, eq=False)
class StepComparison:
    """The predicted and the measured breakdown of one step."""

    step: MeasuredStep
    predicted: TimeBreakdown

    @property
    def breakdowns(self) -> dict[str, TimeBreakdown]:
        """Both by name."""
        return {"predicted": self.predicted, "measured": self.step.breakdown}


@dataclass(frozen=True, eq=False)
class PredictedVsMeasured:
    """All traced steps of a run, predicted and measured.

    Attributes:
        run: folder of the run's output.
        cluster: the cluster on which the prediction is modelled.
        cluster_name: name or file of the cluster, as the user gave it.
        pairs: the steps, at least one.
        not_comparable: why measured and predicted times cannot be compared, and what to do; None if they can.
    """

    run: Path
    cluster: Cluster
    cluster_name: str
    pairs: Sequence[StepComparison]
    not_comparable: str | None

    @property
    def notes(self) -> list[str]:
        """What the numbers contain, what they leave out, and which steps are special."""
        notes = [
            f"predicted is modelled on cluster {self.cluster_name}: attention, messages and linear layers of all "
            "layers, and the reduction of gradients; not embeddings, output layer, loss, optimizer and host, which are "
            'part of the measured "linear, other" and "optimizer"',
            "exposed messages, measured: posting messages, waiting for them or for a late rank, and putting rows in "
            "place; waiting: for late ranks before a call of attention, for all ranks at the step's end, for the "
            "reduction of gradients, for batches",
        ]
        first = [str(pair.step.number) for pair in self.pairs if pair.step.metadata["first_of_start"]]
        if first:
            notes.append(f"step {', '.join(first)}: the first of its start, includes work that is done only once")
        return notes


def compare_with_prediction(run: Path, cluster: str | None = None, steps: Sequence[int] = ()) -> PredictedVsMeasured:
    """Read the traces of a run and predict the same steps.

    Args:
        run: folder of the run's output.
        cluster: preset or YAML file; default: the cluster of the run's settings, or else a2.
        steps: numbers of steps; empty: all traced steps.

    Raises:
        ConfigError: there are no traces, a trace is damaged, or the cluster is unknown or too small.
    """
    measured = read_traced_steps(run, steps)
    name = measured[-1].settings.context_parallel_suite.cluster if cluster is None else cluster
    name = DEFAULT_CLUSTER if name is None else name
    loaded = load_cluster(name)
    pairs = [StepComparison(step, predict_step(step, loaded)) for step in measured]
    return PredictedVsMeasured(run, loaded, name, pairs, _reason_not_comparable(measured[-1], name))


def _reason_not_comparable(step: MeasuredStep, cluster_name: str) -> str | None:
    """Return a text for a run on CPUs that is predicted with a preset: all presets describe accelerators."""
    if step.metadata["device"] != "cpu" or cluster_name not in cluster_names():
        return None
    dtype = "bf16" if step.settings.train.bf16 else "fp32"
    return (
        f"not comparable: the run was on CPUs, and cluster {cluster_name} describes other devices; measure this "
        f"machine with mindspeed-cp calibrate mine.yaml --device cpu --dtype {dtype}, then report again with --cluster "
        "mine.yaml"
    )


def predicted_vs_measured_dict(result: PredictedVsMeasured) -> dict[str, Any]:
    """Return the comparison as JSON values, in seconds and bytes.

    "ratio" is measured over predicted; its values are null where nothing is predicted and where the two are not
    comparable.
    """
    steps = []
    for pair in result.pairs:
        values = {name: _step_values(breakdown) for name, breakdown in pair.breakdowns.items()}
        predicted, measured = values["predicted"], values["measured"]
        ratio = {
            key: None if result.not_comparable or not predicted[key] else measured[key] / predicted[key]
            for key in BREAKDOWN_LABELS
        }
        ranks = [
            {
                "rank": rank,
                **{
                    name: {key: float(getattr(breakdown, key)[rank]) for key in (*BREAKDOWN_LABELS, "sent")}
                    for name, breakdown in pair.breakdowns.items()
                },
            }
            for rank in range(pair.step.ranks)
        ]
        steps.append({"step": pair.step.number, **values, "ratio": ratio, "ranks": ranks})
    return {
        "run": str(result.run),
        "predicted_is": "modelled",
        "not_comparable": result.not_comparable,
        "cluster": result.cluster_name,
        "device": result.pairs[-1].step.metadata["device"],
        "steps": steps,
        "notes": result.notes,
    }


def _step_values(breakdown: TimeBreakdown) -> dict[str, float]:
    """Return the fields of a whole step: means over ranks; "seconds" of the slowest rank."""
    means = {key: float(getattr(breakdown, key).mean()) for key in BREAKDOWN_LABELS}
    return means | {"seconds": float(breakdown.seconds.max())}


def predicted_vs_measured_tables(result: PredictedVsMeasured) -> list[Table]:
    """Return the tables of `mindspeed-cp report`: one of steps and one of ranks."""
    return [_step_table(result), _rank_table(result)]


def _step_table(result: PredictedVsMeasured) -> Table:
    rows = []
    for pair in result.pairs:
        values = {name: _step_values(breakdown) for name, breakdown in pair.breakdowns.items()}
        rows += [(f"step {pair.step.number}", name, *_cells(name, fields)) for name, fields in values.items()]
        if result.not_comparable is None:
            ratios = ((values["measured"][key], values["predicted"][key]) for key in BREAKDOWN_LABELS)
            rows.append(("", "ratio", *(f"{a / b:.2f}" if b > 0 else "-" for a, b in ratios)))
    title = "Steps, ms: mean of the ranks; step: the slowest rank"
    return Table(title, ("", "", *BREAKDOWN_LABELS.values()), tuple(rows))


def _rank_table(result: PredictedVsMeasured) -> Table:
    """Return predicted and measured for each rank, as means of the steady steps: those on as many ranks as the last
    one, without the first step of each start if there are others."""
    ranks, keys = result.pairs[-1].step.ranks, [key for key in BREAKDOWN_LABELS if key != "seconds"]
    pairs = [pair for pair in result.pairs if pair.step.ranks == ranks]
    pairs = [pair for pair in pairs if not pair.step.metadata["first_of_start"]] or pairs
    means = {
        name: {key: np.mean([getattr(pair.breakdowns[name], key) for pair in pairs], axis=0) for key in (*keys, "sent")}
        for name in ("predicted", "measured")
    }
    longest_first = np.argsort(-means["measured"]["attention"], kind="stable")
    rows = []
    for rank in sorted(longest_first[:COMPARED_RANK_LIMIT].tolist()):
        for name, values in means.items():
            cells = _cells(name, {key: float(values[key][rank]) for key in keys})
            rows.append((f"rank {rank}", name, *cells, format_bytes(float(values["sent"][rank]))))
    selection = f", the {COMPARED_RANK_LIMIT} of {ranks} that compute longest" if ranks > COMPARED_RANK_LIMIT else ""
    numbers = ", ".join(str(pair.step.number) for pair in pairs)
    title = f"Ranks{selection}, ms: mean of step{'s' * (len(pairs) > 1)} {numbers}"
    return Table(title, ("", "", *(BREAKDOWN_LABELS[key] for key in keys), "sent"), tuple(rows))


def _cells(name: str, values: dict[str, float]) -> list[str]:
    """Return milliseconds, and a dash for the field without a prediction."""
    return [
        "-" if name == "predicted" and key == "optimizer" else f"{1e3 * seconds:,.{2 if seconds < 0.01 else 1}f}"
        for key, seconds in values.items()
    ]


def write_comparison_trace(result: PredictedVsMeasured, path: str | Path) -> Path:
    """Write the last step and, below it, one modelled layer of its first micro-batch as one trace; both begin at 0.

    Args:
        result: predicted and measured steps.
        path: JSON file to write.

    Raises:
        ConfigError: the file cannot be written.
    """
    step = result.pairs[-1].step
    attention, layer = step.layers[0]
    documents, algorithm, options = step.micro_batches(0)[0]
    plan = build_plan(documents, step.topology, attention, algorithm, **options)
    timeline = simulate_plan(plan, result.cluster.with_ranks(step.topology.ranks_per_node), layer)
    modelled = timeline_recording(timeline, f"layer 1, modelled on {result.cluster_name}")
    return write_trace(path, [modelled], above=step.events)


def predict_step(step: MeasuredStep, cluster: Cluster) -> TimeBreakdown:
    """Return the modelled breakdown of a step; equal layers are simulated once.

    Args:
        step: documents, layers and settings.
        cluster: its nodes have at least as many ranks as those of the run.

    Raises:
        ConfigError: the nodes of the cluster have fewer ranks, or the plans cannot be built.
    """
    metadata, groups, ranks = step.metadata, step.groups, step.ranks
    cluster = cluster.with_ranks(step.topology.ranks_per_node)
    counts = {kind: step.layers.count(kind) for kind in dict.fromkeys(step.layers)}
    simulated: dict[tuple[Any, ...], tuple[np.ndarray, float]] = {}
    sums, done = np.zeros((4, groups, ranks // groups)), np.zeros(groups)
    for group in range(groups):
        for documents, algorithm, options in step.micro_batches(group):
            for (attention, layer), count in counts.items():
                key = documents, algorithm, tuple(options.items()), attention, layer
                if key not in simulated:
                    try:
                        plan = build_plan(documents, step.topology, attention, algorithm, **options)
                    except ConfigError as error:
                        message = f"{step.path}: its plans cannot be made: {error}; remove it, and trace again"
                        raise ConfigError(message) from None
                    simulated[key] = _simulate_layer(step, cluster, plan, layer)
                parts, seconds = simulated[key]
                sums[:, group] += parts * count
                done[group] += seconds * count
    replica_ranks = metadata["replicas"] * step.settings.context_parallel_suite.context_parallel_size
    total = done.max() + cluster.reduction_seconds(metadata["gradient_bytes"], replica_ranks)
    attention_s, exposed, linear, sent = sums.reshape(4, ranks)  # replicas are consecutive ranks
    waiting = total - attention_s - exposed - linear
    return TimeBreakdown(attention_s, exposed, waiting, np.zeros(ranks), linear, sent)


def _simulate_layer(step: MeasuredStep, cluster: Cluster, plan: Plan, layer: LayerCost) -> tuple[np.ndarray, float]:
    """Simulate a layer: forward, backward, and the forwards that the backward computes again.

    Returns:
        Seconds of attention, of exposed messages and of linear layers, and bytes sent, fp64 [4, cp * tp], of the ranks
        of a replica or a pool, tensor-parallel ranks beside each other; and seconds of all of it.
    """
    train, granularity = step.settings.train, step.settings.model.recompute_granularity
    tensor = train.tensor_model_parallel_size
    shares = tensor if train.sequence_parallel else 1
    recomputes, full = int(granularity is not None), int(granularity == "full")
    bytes_sent = traffic(plan, layer.bytes_per_element)
    timeline = simulate_plan(plan, cluster, layer)
    forward, is_attention = timeline.steps_forward, timeline.is_attention("forward")
    posting, posting_backward = (timeline.launch_overhead(direction) for direction in ("forward", "backward"))
    linear = linear_times(plan, ComputeCost(cluster, plan.attention, layer), backward=False)
    edge = 0 if full else timeline.edge_steps - 1  # without them: attention alone
    repeated = forward[:, edge : forward.shape[1] - edge]
    kernels = (forward[:, :, 1] - forward[:, :, 0] - posting)[:, is_attention].sum(1)
    # Measured posting is a part of what messages expose.
    posting_repeated = posting[:, edge : forward.shape[1] - edge].sum(1)
    exposed = (repeated[:, :, 2] - repeated[:, :, 1]).sum(1) + posting_repeated
    posted = posting.sum(1) + posting_backward.sum(1)
    seconds = float((repeated[:, -1, 2] - repeated[:, 0, 0]).max()) + full * float(linear.rest.max())
    fetched_again = bytes_sent["fetch_forward"] + bytes_sent["redistribution_forward"]
    parts = np.stack(
        [
            timeline.compute - posted + recomputes * kernels,
            timeline.exposed + posted + recomputes * exposed,
            timeline.linear + full * linear.total,
            bytes_sent["total"] + recomputes * fetched_again,
        ]
    ).repeat(tensor, 1)
    moves = 2 + full  # forward and backward
    hidden_bytes = _hidden_state_rows(plan, shares) * moves * layer.hidden_size * layer.bytes_per_element
    parts[3] += hidden_bytes.repeat(tensor // shares)
    return parts, timeline.total + recomputes * seconds


def _hidden_state_rows(plan: Plan, shares: int) -> np.ndarray:
    """Return the rows that each rank sends when hidden states move to the layout of attention and back, fp64
    [ranks * shares].

    Args:
        plan: any plan.
        shares: tensor-parallel ranks that share the rows of a context-parallel rank.
    """
    if plan.linear_layout is None:
        return np.zeros(plan.ranks * shares)
    linear, layout = (
        layout if shares == 1 else sequence_parallel_layout(layout, shares, shares)
        for layout in (plan.linear_layout, plan.layout)
    )
    move = Redistribution.between(linear, layout, 1)
    if move is None:
        return np.zeros(plan.ranks * shares)
    return (move.send_volume() + move.send_volume(adjoint=True)).astype(np.float64)
