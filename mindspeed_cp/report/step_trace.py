"""Traced steps of a training: one file for each step, what the time of its ranks went into, and the same predicted.

::

    RUN/trace/step-0000003.json        a trace of all ranks (:mod:`mindspeed_cp.report.trace_events`)

Each event of a rank's thread "compute" has one of the categories below, and none lies inside another: the rest of the
step is linear layers and other work of the rank. Under "otherData" the file also has these sums, the documents, the
attention and the settings, so that the same plans can be built again.

The prediction is these plans, modelled on a cluster. A step is its micro-batches one after the other, a micro-batch its
layers one after the other, and all ranks begin each layer together
(:func:`mindspeed_cp.simulate.simulator.simulate_plan`). The reduction of gradients comes last. Embeddings, output
layer, loss, optimizer and the work of the host are not modelled.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost, cluster_names, load_cluster
from mindspeed_cp.cluster.cluster import DEFAULT_CLUSTER
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, Redistribution, sequence_parallel_layout
from mindspeed_cp.plan import AttentionConfig, Plan, Topology, traffic
from mindspeed_cp.report.files import replace_file
from mindspeed_cp.report.text import Table, format_bytes
from mindspeed_cp.report.trace_events import Recording, TraceEvent, timeline_recording, trace_text, write_trace
from mindspeed_cp.simulate.simulator import linear_times, simulate_plan

TRACE_FOLDER = "trace"
NAME = "measured"
TRACE_VERSION = 3

#: Categories of events: kernels of attention; posting messages and putting rows in place; waits for messages; waits for
#: all ranks, and the reduction of gradients; waits for a batch; the optimizer; all of the step.
CATEGORY_ATTENTION, CATEGORY_COMMUNICATION, CATEGORY_WAIT = "attention", "communication", "wait"
CATEGORY_RANK_SYNC, CATEGORY_BATCH, CATEGORY_OPTIMIZER, CATEGORY_STEP = "ranks", "batch", "optimizer", "step"

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

_FILE = re.compile(r"step-(\d+)\.json")


@dataclass(frozen=True, eq=False)
class TimeBreakdown:
    """Time of a step by cause, in seconds, fp64 [ranks] each.

    Attributes:
        attention: kernels of attention.
        exposed: messages of attention and of hidden states that kernels do not hide.
        waiting: for other ranks beyond these messages, for the reduction of gradients, and for batches.
        optimizer: the optimizer's step.
        other: linear layers; if measured, also everything else that a rank does.
        sent: bytes that a rank sends in these messages.
    """

    attention: np.ndarray
    exposed: np.ndarray
    waiting: np.ndarray
    optimizer: np.ndarray
    other: np.ndarray
    sent: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """Time of the whole step, fp64 [ranks]."""
        total: np.ndarray = self.attention + self.exposed + self.waiting + self.optimizer + self.other
        return total


def measured_breakdown(events: Iterable[TraceEvent], ranks: int) -> TimeBreakdown:
    """Return the sums over a step's events on each rank."""
    seconds: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(ranks))
    sent = np.zeros(ranks)
    for event in events:
        seconds[event.category][event.rank] += event.seconds
        if event.details.get("sends"):
            sent[event.rank] += event.details["bytes"]
    parts = (
        seconds[CATEGORY_ATTENTION],
        seconds[CATEGORY_COMMUNICATION] + seconds[CATEGORY_WAIT],
        seconds[CATEGORY_RANK_SYNC] + seconds[CATEGORY_BATCH],
        seconds[CATEGORY_OPTIMIZER],
    )
    return TimeBreakdown(*parts, seconds[CATEGORY_STEP] - sum(parts), sent)


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """A traced step.

    Attributes:
        path: its file.
        number: number of the step, from 1.
        metadata: what the file says of the step beside its events.
        events: its events in Chrome's format.
        settings: settings of the run at that step.
        layers: attention and linear part of each layer, on one tensor-parallel rank.
        breakdown: the measured breakdown.
    """

    path: Path
    number: int
    metadata: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    settings: Settings
    layers: Sequence[tuple[AttentionConfig, LayerCost]]
    breakdown: TimeBreakdown

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.breakdown.attention)

    @property
    def topology(self) -> Topology:
        """The ranks of the step's plans: those of a replica, or of a pool."""
        topology = self.settings.context_parallel_suite.topology
        pool = self.metadata["pool"]
        return topology if pool is None else Topology(pool[0], pool[1], topology.cluster)

    @property
    def groups(self) -> int:
        """Number of groups of consecutive ranks that share plans: the replicas, or the pools."""
        replica_ranks: int = self.settings.context_parallel_suite.context_parallel_size
        return self.metadata["replicas"] * replica_ranks // self.topology.ranks

    def micro_batches(self, group: int) -> list[tuple[Documents, str, dict[str, Any]]]:
        """Return the documents, the algorithm and its options of each micro-batch of a replica, or of a pool, whose
        replicas have the same."""
        replica = group * self.metadata["replicas"] // self.groups
        rows = self.metadata["micro_batches"][replica]
        return [(Documents(lengths, parents), algorithm, options) for lengths, parents, algorithm, options in rows]


def trace_path(run: Path, step: int) -> Path:
    """Return the file of a step in the output folder of a run."""
    return run / TRACE_FOLDER / f"step-{step:07d}.json"


def write_step_trace(path: Path, metadata: Mapping[str, Any], events: Sequence[TraceEvent], ranks: int) -> None:
    """Write the file of a step; a reader never sees half of it.

    Args:
        path: from :func:`trace_path`.
        metadata: JSON values; `version` and `breakdown` are added.
        events: those of all ranks.
        ranks: their number.

    Raises:
        OSError: it cannot be written.
    """
    breakdown = {name: values.tolist() for name, values in vars(measured_breakdown(events, ranks)).items()}
    recording = Recording(NAME, events, {"version": TRACE_VERSION, **metadata, "breakdown": breakdown})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda new: new.write_text(trace_text([recording]), encoding="utf-8"))


def layer_metadata(layers: Sequence[tuple[AttentionConfig, LayerCost]]) -> list[list[Any]]:
    """Return layers as JSON values of a step's metadata."""
    return [[asdict(attention), asdict(cost)] for attention, cost in layers]


def read_traced_steps(run: Path, only: Iterable[int] = ()) -> list[MeasuredStep]:
    """Return the traced steps of a run.

    Args:
        run: folder of the run's output.
        only: numbers of steps; empty: all.

    Raises:
        ConfigError: the folder does not exist, it has no traces, or not of these steps; or a file is damaged.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such folder; give the output.folder of a run")
    names = (_FILE.fullmatch(path.name) for path in run.glob(f"{TRACE_FOLDER}/*.json"))
    steps = sorted(int(name[1]) for name in names if name)
    if not steps:
        raise ConfigError(f"{run}: has no traces of steps; set output.trace_steps: [3, 4], and train")
    wanted = sorted(set(only))
    for step in wanted:
        if step not in steps:
            raise ConfigError(f"--step {step}: was not traced; valid: {', '.join(map(str, steps))}")
    return [_read(trace_path(run, step)) for step in wanted or steps]


#: Types of what the reports take from the metadata as it is.
_KINDS = {"step": int, "first_of_start": bool, "device": str, "replicas": int, "gradient_bytes": int}


def _read(path: Path) -> MeasuredStep:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        metadata = content["otherData"][NAME]
        if metadata["version"] != TRACE_VERSION:
            raise ConfigError("it is of another version of mindspeed-cp")
        if any(type(metadata[name]) is not kind for name, kind in _KINDS.items()):
            raise ValueError
        step = MeasuredStep(
            path,
            metadata["step"],
            metadata,
            content["traceEvents"],
            Settings(**metadata["settings"]),
            [(AttentionConfig(**attention), LayerCost(**cost)) for attention, cost in metadata["layers"]],
            TimeBreakdown(**{name: np.array(values, float) for name, values in metadata["breakdown"].items()}),
        )
        for group in range(step.groups):
            step.micro_batches(group)
    except ConfigError as error:
        raise ConfigError(f"{path}: not a valid step trace: {error}; remove it, and trace again") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
        raise ConfigError(f"{path}: not a valid step trace: it is damaged; remove it, and trace again") from None
    return step


class StepComparison(NamedTuple):
    """The measured step and its predicted breakdown."""

    step: MeasuredStep
    predicted: TimeBreakdown


@dataclass(frozen=True, eq=False)
class PredictedVsMeasured:
    """Traced steps of a run, predicted and measured.

    Attributes:
        run: folder of the run's output.
        cluster: the cluster on which the prediction is modelled.
        cluster_name: name or file of the cluster, as the user gave it.
        pairs: the steps, at least one.
        not_comparable: why measured and predicted times cannot be compared, and what to do; None if they can.
        notes: what the numbers contain, what they leave out, and which steps are special.
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
    measured = read_traced_steps(run, steps)
    name = measured[-1].settings.context_parallel_suite.cluster if cluster is None else cluster
    name = DEFAULT_CLUSTER if name is None else name
    loaded = load_cluster(name)
    pairs = [StepComparison(step, predict_step(step, loaded)) for step in measured]
    notes = [
        f"predicted is modelled on cluster {name}: attention, messages and linear layers of all layers, and the "
        "reduction of gradients; not embeddings, output layer, loss, optimizer and host, which are part of the "
        'measured "linear, other" and "optimizer"',
        "exposed messages, measured: posting messages, waiting for them or for a late rank, and putting rows in place; "
        "waiting: for late ranks before a call of attention, for all ranks at the step's end, for the reduction of "
        "gradients, for batches",
    ]
    first = [str(step.number) for step in measured if step.metadata["first_of_start"]]
    if first:
        notes.append(f"step {', '.join(first)}: the first of its start, includes work that is done only once")
    return PredictedVsMeasured(run, loaded, name, pairs, _reason_not_comparable(measured[-1], name), notes)


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
    """Return the comparison as JSON values, in seconds and bytes; of a step the means over ranks, and the "seconds" of
    the slowest one.

    "ratio" is measured over predicted; its values are null where nothing is predicted and where the two are not
    comparable.
    """
    steps = []
    for pair in result.pairs:
        both = {"predicted": pair.predicted, "measured": pair.step.breakdown}
        values = {
            name: {key: float(getattr(breakdown, key).mean()) for key in BREAKDOWN_LABELS}
            | {"seconds": float(breakdown.seconds.max())}
            for name, breakdown in both.items()
        }
        ratio = {
            key: None if result.not_comparable or not seconds else values["measured"][key] / seconds
            for key, seconds in values["predicted"].items()
        }
        ranks = [
            {"rank": rank}
            | {
                name: {key: float(getattr(breakdown, key)[rank]) for key in (*BREAKDOWN_LABELS, "sent")}
                for name, breakdown in both.items()
            }
            for rank in range(pair.step.ranks)
        ]
        is_first = pair.step.metadata["first_of_start"]
        steps.append({"step": pair.step.number, "first_of_start": is_first, **values, "ratio": ratio, "ranks": ranks})
    return {
        "run": str(result.run),
        "predicted_is": "modelled",
        "not_comparable": result.not_comparable,
        "cluster": result.cluster_name,
        "device": result.pairs[-1].step.metadata["device"],
        "steps": steps,
        "notes": list(result.notes),
    }


def predicted_vs_measured_tables(report: dict[str, Any]) -> list[Table]:
    """Return the tables of `mindspeed-cp report`, given its JSON values: one of steps and one of ranks.

    The table of ranks has means of the steady steps: those on as many ranks as the last one, without the first step of
    each start if there are others.
    """
    step_rows: list[tuple[str, ...]] = []
    for step in report["steps"]:
        for name in ("predicted", "measured"):
            step_rows.append((f"step {step['step']}", name, *_cells(name, step[name], BREAKDOWN_LABELS)))
        if report["not_comparable"] is None:
            step_rows.append(
                ("", "ratio", *("-" if ratio is None else f"{ratio:.2f}" for ratio in step["ratio"].values()))
            )
    ranks, keys = len(report["steps"][-1]["ranks"]), [key for key in BREAKDOWN_LABELS if key != "seconds"]
    steps = [step for step in report["steps"] if len(step["ranks"]) == ranks]
    steps = [step for step in steps if not step["first_of_start"]] or steps

    def mean(rank: int, name: str) -> dict[str, float]:
        of_steps = [step["ranks"][rank][name] for step in steps]
        return {key: fmean(values[key] for values in of_steps) for key in (*keys, "sent")}

    longest_first = sorted(range(ranks), key=lambda rank: -mean(rank, "measured")["attention"])
    rank_rows = [
        (f"rank {rank}", name, *_cells(name, values, keys), format_bytes(values["sent"]))
        for rank in sorted(longest_first[:COMPARED_RANK_LIMIT])
        for name in ("predicted", "measured")
        for values in [mean(rank, name)]
    ]
    selection = f", the {COMPARED_RANK_LIMIT} of {ranks} that compute longest" if ranks > COMPARED_RANK_LIMIT else ""
    title = (
        f"Ranks{selection}, ms: mean of step{'s' * (len(steps) > 1)} {', '.join(str(step['step']) for step in steps)}"
    )
    step_columns = ("", "", *BREAKDOWN_LABELS.values())
    return [
        Table("Steps, ms: mean of the ranks; step: the slowest rank", step_columns, tuple(step_rows)),
        Table(title, ("", "", *(BREAKDOWN_LABELS[key] for key in keys), "sent"), tuple(rank_rows)),
    ]


def _cells(name: str, values: Mapping[str, float], keys: Iterable[str]) -> list[str]:
    """Return milliseconds, and a dash for the field without a prediction."""
    return [
        "-"
        if name == "predicted" and key == "optimizer"
        else f"{1e3 * values[key]:,.{2 if values[key] < 0.01 else 1}f}"
        for key in keys
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
