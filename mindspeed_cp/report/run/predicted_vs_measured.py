"""Predicted and measured time of traced steps: tables, JSON values, and one trace of both.

The prediction is the same plans, for the same documents, modelled on a cluster. A step is its micro-batches one after
the other, a micro-batch its layers one after the other, and all ranks begin each layer together
(:func:`mindspeed_cp.simulate.simulator.simulate_plan`). The reduction of gradients comes last. Embeddings, output
layer, loss, optimizer and the work of the host are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost, cluster_names, load_cluster
from mindspeed_cp.cluster.cluster import DEFAULT_CLUSTER
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, Redistribution, sequence_parallel_layout
from mindspeed_cp.plan import AttentionConfig, Plan, traffic
from mindspeed_cp.plan.transfers import transfers
from mindspeed_cp.report.files import check_output_path
from mindspeed_cp.report.run.step_traces import MeasuredStep, TimeBreakdown, read_traced_steps
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
    "optimizer": "optimizer",
    "seconds": "step",
}

#: Fields that have no prediction.
NOT_MODELLED = ("optimizer",)


@dataclass(frozen=True, eq=False)
class StepComparison:
    """The predicted and the measured breakdown of one step."""

    step: MeasuredStep
    predicted: TimeBreakdown
    measured: TimeBreakdown

    @property
    def number(self) -> int:
        """Number of the step, from 1."""
        return self.step.number


BREAKDOWN_OF: dict[str, Callable[[StepComparison], TimeBreakdown]] = {
    "predicted": lambda pair: pair.predicted,
    "measured": lambda pair: pair.measured,
}


@dataclass(frozen=True, eq=False)
class PredictedVsMeasured:
    """All traced steps of a run, predicted and measured.

    Attributes:
        run: folder of the run's output.
        cluster: the cluster on which the prediction is modelled.
        cluster_name: name or file of the cluster, as the user gave it.
        pairs: the steps, at least one.
        not_comparable: why measured and predicted times cannot be compared, and what to do; None if they can.
        notes: what a reader must know about the numbers.
    """

    run: Path
    cluster: Cluster
    cluster_name: str
    pairs: Sequence[StepComparison]
    not_comparable: str | None
    notes: Sequence[str]


def compare_with_prediction(run: Path, cluster: str | None = None, steps: Sequence[int] = ()) -> PredictedVsMeasured:
    """Read the traces of a run and predict the same steps.

    Args:
        run: folder of the run's output.
        cluster: preset or YAML file; default: the cluster of the run's settings, or else a2.
        steps: numbers of steps; empty: all traced steps.

    Raises:
        ConfigError: there are no traces, a trace is damaged, or the cluster is unknown or too small.
    """
    measured, notes = read_traced_steps(run, steps)
    name = measured[-1].settings.context_parallel_suite.cluster if cluster is None else cluster
    name = DEFAULT_CLUSTER if name is None else name
    loaded = load_cluster(name)
    pairs = [StepComparison(step, predict_step(step, loaded), step.breakdown) for step in measured]
    return PredictedVsMeasured(
        run, loaded, name, pairs, _reason_not_comparable(measured[-1], name), [*_notes(measured, name), *notes]
    )


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


def predicted_vs_measured_tables(result: PredictedVsMeasured) -> list[Table]:
    """Return the tables of `mindspeed-cp report`: one of steps and one of ranks."""
    return [_step_table(result), _rank_table(result)]


def predicted_vs_measured_dict(result: PredictedVsMeasured) -> dict[str, Any]:
    """Return the comparison as JSON values, in seconds and bytes.

    "ratio" is measured over predicted; its values are null where nothing is predicted and where the two are not
    comparable.
    """
    keys = (*BREAKDOWN_LABELS, "sent", "messages")
    steps = []
    for pair in result.pairs:
        ranks = [
            {
                "rank": rank,
                **{
                    name: {key: float(per_rank_values(breakdown(pair), key)[rank]) for key in keys}
                    for name, breakdown in BREAKDOWN_OF.items()
                },
            }
            for rank in range(len(pair.step.ranks))
        ]
        predicted, measured = (
            {key: step_value(breakdown, key) for key in BREAKDOWN_LABELS}
            for breakdown in (pair.predicted, pair.measured)
        )
        ratio = {
            key: None if result.not_comparable or not predicted[key] else measured[key] / predicted[key]
            for key in BREAKDOWN_LABELS
        }
        steps.append(
            {"step": pair.number, "predicted": predicted, "measured": measured, "ratio": ratio, "ranks": ranks}
        )
    return {
        "run": str(result.run),
        "predicted_is": "modelled",
        "not_comparable": result.not_comparable,
        "cluster": result.cluster_name,
        "device": result.pairs[-1].step.metadata["device"],
        "steps": steps,
        "notes": list(result.notes),
    }


def per_rank_values(breakdown: TimeBreakdown, key: str) -> np.ndarray:
    """Return one field of a breakdown, fp64 [ranks]."""
    values: np.ndarray = getattr(breakdown, key)
    return values


def step_value(breakdown: TimeBreakdown, key: str) -> float:
    """Return one field for the whole step: the mean over ranks; for "seconds" the slowest rank."""
    values = per_rank_values(breakdown, key)
    return float(values.max() if key == "seconds" else values.mean())


def format_ms(seconds: float) -> str:
    """Return seconds as milliseconds, with two decimals below 10 ms and none from 1 s on."""
    return f"{seconds * 1e3:,.{2 if seconds < 0.01 else 1 if seconds < 1 else 0}f}"


def _step_table(result: PredictedVsMeasured) -> Table:
    rows = []
    for pair in result.pairs:
        for name, breakdown in BREAKDOWN_OF.items():
            cells = _cells(name, [(key, step_value(breakdown(pair), key)) for key in BREAKDOWN_LABELS])
            rows.append((f"step {pair.number}", name, *cells))
        if result.not_comparable is None:
            values = ((step_value(pair.measured, key), step_value(pair.predicted, key)) for key in BREAKDOWN_LABELS)
            rows.append(("", "ratio", *(_ratio(measured, predicted) for measured, predicted in values)))
    title = "Steps, ms: mean of the ranks; step: the slowest rank"
    return Table(title, ("", "", *BREAKDOWN_LABELS.values()), tuple(rows))


def _rank_table(result: PredictedVsMeasured) -> Table:
    """Return predicted and measured for each rank, as means of the steady steps."""
    pairs, keys = steady_steps(result), [key for key in BREAKDOWN_LABELS if key != "seconds"]
    means = {
        name: {
            key: np.mean([per_rank_values(breakdown(pair), key) for pair in pairs], axis=0) for key in (*keys, "sent")
        }
        for name, breakdown in BREAKDOWN_OF.items()
    }
    longest_first = np.argsort(-means["measured"]["attention"], kind="stable")
    rows = []
    for rank in sorted(longest_first[:COMPARED_RANK_LIMIT].tolist()):
        for name, values in means.items():
            cells = _cells(name, [(key, float(values[key][rank])) for key in keys])
            rows.append((f"rank {rank}", name, *cells, format_bytes(float(values["sent"][rank]))))
    ranks = len(longest_first)
    selection = f", the {COMPARED_RANK_LIMIT} of {ranks} that compute longest" if ranks > COMPARED_RANK_LIMIT else ""
    numbers = ", ".join(str(pair.number) for pair in pairs)
    title = f"Ranks{selection}, ms: mean of step{'s' * (len(pairs) > 1)} {numbers}"
    return Table(title, ("", "", *(BREAKDOWN_LABELS[key] for key in keys), "sent"), tuple(rows))


def steady_steps(result: PredictedVsMeasured) -> list[StepComparison]:
    """Return the steps on as many ranks as the last step, without the first step of each start if there are others."""
    ranks = len(result.pairs[-1].step.ranks)
    pairs = [pair for pair in result.pairs if len(pair.step.ranks) == ranks]
    return [pair for pair in pairs if not pair.step.metadata["first_of_start"]] or pairs


def _cells(name: str, values: Sequence[tuple[str, float]]) -> list[str]:
    """Return milliseconds, and a dash for fields without a prediction."""
    return ["-" if name == "predicted" and key in NOT_MODELLED else format_ms(value) for key, value in values]


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted > 0 else "-"


def _notes(steps: Sequence[MeasuredStep], cluster_name: str) -> list[str]:
    """Return what the numbers contain, what they leave out, and which steps are special."""
    notes = [
        f"predicted is modelled on cluster {cluster_name}: attention, messages and linear layers of all layers, and "
        "the reduction of gradients; not embeddings, output layer, loss, optimizer and host, which are part of the "
        'measured "linear, other" and "optimizer"',
        "exposed messages, measured: posting messages, waiting for them or for a late rank, and putting rows in place; "
        "waiting: for late ranks before a call of attention, for all ranks at the step's end, for the reduction of "
        "gradients, for batches",
    ]
    first = [str(step.number) for step in steps if step.metadata["first_of_start"]]
    if first:
        notes.append(f"step {', '.join(first)}: the first of its start, includes work that is done only once")
    return notes


def write_comparison_trace(result: PredictedVsMeasured, path: str | Path) -> Path:
    """Write the last step and, below it, one modelled layer of its first micro-batch as one trace; both begin at 0.

    Args:
        result: predicted and measured steps.
        path: JSON file to write.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = check_output_path("--trace", path, (".json",))
    step = result.pairs[-1].step
    topology = step.topology
    attention, layer = step.layers[0]
    documents, algorithm, options = step.micro_batches(0)[0]
    plan = build_plan(documents, topology, attention, algorithm, **options)
    timeline = simulate_plan(plan, result.cluster.with_ranks(topology.ranks_per_node), layer)
    modelled = timeline_recording(timeline, f"layer 1, modelled on {result.cluster_name}")
    return write_trace(target, [step.to_recording(), modelled])


@dataclass(frozen=True, eq=False)
class _ModelledLayer:
    """One layer, modelled: seconds, bytes and messages of each rank of a replica, or of a pool, fp64 [cp * tp],
    tensor-parallel ranks beside each other; and seconds of all of it."""

    attention: np.ndarray
    exposed: np.ndarray
    linear: np.ndarray
    sent: np.ndarray
    messages: np.ndarray
    seconds: float


def predict_step(step: MeasuredStep, cluster: Cluster) -> TimeBreakdown:
    """Return the modelled breakdown of a step.

    Args:
        step: documents, layers and settings.
        cluster: its nodes have at least as many ranks as those of the run.

    Raises:
        ConfigError: the nodes of the cluster have fewer ranks, or the plans cannot be built.
    """
    settings, metadata = step.settings, step.metadata
    cluster = cluster.with_ranks(step.topology.ranks_per_node)
    counts = {kind: step.layers.count(kind) for kind in dict.fromkeys(step.layers)}
    simulator = _LayerSimulator(step, cluster)
    ranks = metadata["replicas"] * settings.model_parallel_size
    groups = step.groups
    sums = np.zeros((5, groups, ranks // groups))
    done = np.zeros(groups)
    for group in range(groups):
        for micro in step.micro_batches(group):
            for (attention, layer), count in counts.items():
                modelled = simulator.layer(*micro, attention, layer)
                parts = modelled.attention, modelled.exposed, modelled.linear, modelled.sent, modelled.messages
                sums[:, group] += np.stack(parts) * count
                done[group] += modelled.seconds * count
    total = done.max() + cluster.reduction_seconds(
        metadata["gradient_bytes"], metadata["replicas"] * settings.context_parallel_suite.context_parallel_size
    )
    attention_s, exposed, linear, sent, messages = sums.reshape(5, ranks)  # replicas are consecutive ranks
    waiting = total - attention_s - exposed - linear
    return TimeBreakdown(attention_s, exposed, waiting, np.zeros(ranks), linear, sent, messages)


class _LayerSimulator:
    """Simulates layers on a cluster, each different one once.

    Args:
        step: the step, with its topology and the settings of the run.
        cluster: cluster with as many ranks a node as the plans.
    """

    def __init__(self, step: MeasuredStep, cluster: Cluster) -> None:
        self._cluster, self._settings, self._path = cluster, step.settings, step.ranks[0].path
        self._element_bytes: int = step.metadata["bytes_per_element"]
        self._topology = step.topology
        self._tp = step.settings.train.tensor_model_parallel_size
        self._shares = self._tp if step.settings.train.sequence_parallel else 1
        self._layers: dict[tuple[Any, ...], _ModelledLayer] = {}

    def layer(
        self,
        documents: Documents,
        algorithm: str,
        options: dict[str, Any],
        attention: AttentionConfig,
        layer: LayerCost,
    ) -> _ModelledLayer:
        """Return one layer: forward, backward, and the forwards that the backward computes again."""
        key = documents, algorithm, tuple(options.items()), attention, layer
        if key not in self._layers:
            try:
                plan = build_plan(documents, self._topology, attention, algorithm, **options)
            except ConfigError as error:
                message = f"{self._path}: its plans cannot be made: {error}; remove it, and trace again"
                raise ConfigError(message) from None
            self._layers[key] = self._simulate(plan, layer)
        return self._layers[key]

    def _simulate(self, plan: Plan, layer: LayerCost) -> _ModelledLayer:
        bytes_sent = traffic(plan, self._element_bytes)
        timeline = simulate_plan(plan, self._cluster, layer)
        forward, is_attention = timeline.steps_forward, timeline.is_attention("forward")
        posting, posting_backward = (timeline.launch_overhead(direction) for direction in ("forward", "backward"))
        linear = linear_times(plan, ComputeCost(self._cluster, plan.attention, layer), backward=False)
        granularity = self._settings.model.recompute_granularity
        recomputes, full = int(granularity is not None), int(granularity == "full")
        edge = 0 if full else timeline.edge_steps - 1  # without them: attention alone
        repeated = forward[:, edge : forward.shape[1] - edge]
        kernels = (forward[:, :, 1] - forward[:, :, 0] - posting)[:, is_attention].sum(1)
        # Measured posting is a part of what messages expose.
        posting_repeated = posting[:, edge : forward.shape[1] - edge].sum(1)
        exposed = (repeated[:, :, 2] - repeated[:, :, 1]).sum(1) + posting_repeated
        posted = posting.sum(1) + posting_backward.sum(1)
        seconds = float((repeated[:, -1, 2] - repeated[:, 0, 0]).max()) + full * float(linear.rest.max())
        fetched_again = bytes_sent["fetch_forward"] + bytes_sent["redistribution_forward"]
        forward_messages, backward_messages = (
            _messages(plan, direction, self._element_bytes) for direction in ("forward", "backward")
        )
        messages = forward_messages * (1 + recomputes) + backward_messages
        rows, moves = _hidden_state_traffic(plan, self._shares) * (2 + full)  # forward and backward
        hidden_bytes = self._repeat_over_tp(rows) * layer.hidden_size * self._element_bytes
        return _ModelledLayer(
            self._repeat_over_tp(timeline.compute - posted + recomputes * kernels),
            self._repeat_over_tp(timeline.exposed + posted + recomputes * exposed),
            self._repeat_over_tp(timeline.linear + full * linear.total),
            self._repeat_over_tp(bytes_sent["total"] + recomputes * fetched_again) + hidden_bytes,
            self._repeat_over_tp(messages) + self._repeat_over_tp(moves),
            timeline.total + recomputes * seconds,
        )

    def _repeat_over_tp(self, values: np.ndarray) -> np.ndarray:
        """Repeat values of context-parallel ranks for their tensor-parallel ranks; return values of those unchanged."""
        return np.repeat(values, self._tp) if len(values) == self._topology.ranks else values


def _messages(plan: Plan, direction: str, bytes_per_element: int) -> np.ndarray:
    """Return the messages that each rank sends for attention in one direction, int64 [ranks]; keys and values count as
    one."""
    return np.bincount(transfers(plan, direction, bytes_per_element)["src"], minlength=plan.ranks)


def _messages_of_redistribution(move: Redistribution, adjoint: bool) -> np.ndarray:
    """Return the messages that each rank sends in a redistribution, or in its adjoint."""
    parts = move.remote_pairs
    return np.bincount(parts["dst" if adjoint else "src"], minlength=move.source.ranks)


def _hidden_state_traffic(plan: Plan, shares: int) -> np.ndarray:
    """Return the rows and messages that each rank sends when hidden states move to the layout of attention and back,
    fp64 [2, ranks * shares].

    Args:
        plan: any plan.
        shares: tensor-parallel ranks that share the rows of a context-parallel rank.
    """
    if plan.linear_layout is None:
        return np.zeros((2, plan.ranks * shares))
    linear, layout = (
        layout if shares == 1 else sequence_parallel_layout(layout, shares, shares)
        for layout in (plan.linear_layout, plan.layout)
    )
    move = Redistribution.between(linear, layout, 1)
    if move is None:
        return np.zeros((2, plan.ranks * shares))
    rows = move.send_volume() + move.send_volume(adjoint=True)
    messages = _messages_of_redistribution(move, False) + _messages_of_redistribution(move, True)
    return np.stack([rows, messages]).astype(np.float64)
