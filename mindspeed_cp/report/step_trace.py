"""Traced steps of a training: one file for each step, and what the time of its ranks went into.

::

    RUN/trace/step-0000003.json        a trace of all ranks (:mod:`mindspeed_cp.report.trace_events`)

Each event of a rank's thread "compute" has one of the categories below, and none lies inside another: the rest of the
step is linear layers and other work of the rank. Under "otherData" the file also has these sums, the documents, the
attention and the settings, so that the same plans can be built again.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology
from mindspeed_cp.report.files import replace_file
from mindspeed_cp.report.trace_events import Recording, TraceEvent, trace_text

TRACE_FOLDER = "trace"
NAME = "measured"
TRACE_VERSION = 3

#: Categories of events: kernels of attention; posting messages and putting rows in place; waits for messages; waits for
#: all ranks, and the reduction of gradients; waits for a batch; the optimizer; all of the step.
CATEGORY_ATTENTION, CATEGORY_COMMUNICATION, CATEGORY_WAIT = "attention", "communication", "wait"
CATEGORY_RANK_SYNC, CATEGORY_BATCH, CATEGORY_OPTIMIZER, CATEGORY_STEP = "ranks", "batch", "optimizer", "step"

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
