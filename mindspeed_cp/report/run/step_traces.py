"""Traces of the steps of a training: the file of each rank, and the breakdown of a step from the files of all ranks.

::

    RUN/trace/step-0000003-rank-0001.json        a trace of one rank (:mod:`mindspeed_cp.report.trace_events`)

Each event of the thread "compute" has one of the categories below, and none lies inside another: the rest of the step
is linear layers and other work of the rank. The file also has the documents, the attention and the settings, so that
the same plans can be built again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mindspeed_cp.algorithms import ALGORITHMS, algorithm_options
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import RANK_LIMIT, AttentionConfig, Topology
from mindspeed_cp.report.trace_events import Recording, TraceEvent, trace_events
from mindspeed_cp.schema.base import SETTING_LIMIT

TRACE_FOLDER = "trace"
NAME = "measured"
TRACE_VERSION = 2

#: Categories of events: kernels of attention; posting messages and putting rows in place; waits for messages; waits for
#: all ranks, and the reduction of gradients; waits for a batch; the optimizer; all of the step.
CATEGORY_ATTENTION, CATEGORY_COMMUNICATION, CATEGORY_WAIT = "attention", "communication", "wait"
CATEGORY_RANK_SYNC, CATEGORY_BATCH, CATEGORY_OPTIMIZER, CATEGORY_STEP = "ranks", "batch", "optimizer", "step"

#: Metadata that may differ between the ranks of a step.
_OF_RANK = ("rank", "cp_rank", "replica", "seconds", "documents", "parents", "plans")

_FILE = re.compile(r"step-(\d+)-rank-(\d+)\.json")

#: A number of bytes, messages or microseconds: sums of them stay finite.
Amount: TypeAlias = Annotated[float, Field(ge=0, le=1e18)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=SETTING_LIMIT)]
RankCount: TypeAlias = Annotated[int, Field(ge=1, le=RANK_LIMIT)]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class TraceMetadata(_Schema):
    """Metadata of a rank's file; `layers` has the number of the attention, FLOPs of a token, hidden size, and FLOPs of
    the projections before and after attention."""

    version: Literal[2]
    step: Annotated[Count, Field(ge=1)]
    first_of_start: bool
    rank: Count
    ranks: RankCount
    replica: Count
    replicas: RankCount
    pool: tuple[RankCount, RankCount] | None = None
    device: str
    documents: Annotated[list[list[int]], Field(min_length=1)]
    parents: list[list[int] | None] | None = None
    plans: Annotated[list[tuple[str, dict[str, bool | int | str]]], Field(min_length=1)]
    attentions: Annotated[list[dict[str, Any]], Field(min_length=1)]
    layers: Annotated[list[tuple[Count, Amount, Count, Amount, Amount]], Field(min_length=1)]
    bytes_per_element: Literal[2, 4]
    gradient_bytes: Amount
    settings: dict[str, Any]


class _Message(_Schema):
    """Details of an event; those of a message that is sent have all three."""

    sends: bool = False
    bytes: Amount = 0
    messages: Amount = 0


class _Event(_Schema):
    ph: Literal["X"]
    tid: Count
    name: str
    cat: str
    ts: Annotated[float, Field(ge=-1e18, le=1e18)]
    dur: Amount
    args: _Message


class _Name(_Schema):
    ph: Literal["M"]
    tid: Count = 0
    name: str
    args: dict[str, Any]


class _Metadata(_Schema):
    measured: TraceMetadata


class _File(_Schema):
    otherData: _Metadata
    traceEvents: list[Annotated[_Event | _Name, Field(discriminator="ph")]]


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
        messages: number of these messages; keys and values that are sent together count as one.
    """

    attention: np.ndarray
    exposed: np.ndarray
    waiting: np.ndarray
    optimizer: np.ndarray
    other: np.ndarray
    sent: np.ndarray
    messages: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """Time of the whole step, fp64 [ranks]."""
        total: np.ndarray = self.attention + self.exposed + self.waiting + self.optimizer + self.other
        return total


@dataclass(frozen=True, eq=False)
class RankTrace:
    """The file of one rank and one step: its metadata, and its complete events as the file has them."""

    path: Path
    metadata: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]] = field(repr=False)

    def seconds(self, *categories: str) -> float:
        """Return the seconds of all events of some categories."""
        return sum(event["dur"] for event in self.events if event["cat"] in categories) / 1e6

    @property
    def sends(self) -> list[Mapping[str, Any]]:
        """Details of the events of messages that the rank sent."""
        return [event["args"] for event in self.events if event["args"].get("sends")]


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """A step with the traces of all ranks.

    Attributes:
        number: number of the step, from 1.
        ranks: trace of each rank.
    """

    number: int
    ranks: Sequence[RankTrace]

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata that are equal on every rank."""
        return self.ranks[0].metadata

    @cached_property
    def settings(self) -> Settings:
        """Settings of the run at that step."""
        return Settings(**self.metadata["settings"])

    @cached_property
    def layers(self) -> list[tuple[AttentionConfig, LayerCost]]:
        """Attention and linear part of each layer, on one tensor-parallel rank."""
        kinds = [AttentionConfig(**values) for values in self.metadata["attentions"]]
        train = self.settings.train
        shares = train.tensor_model_parallel_size if train.sequence_parallel else 1
        element = self.metadata["bytes_per_element"]
        return [
            (kinds[kind], LayerCost(flops, hidden, qkv, out, shares, element))
            for kind, flops, hidden, qkv, out in self.metadata["layers"]
        ]

    @property
    def is_pooled(self) -> bool:
        """True if the ranks of several replicas computed the step's micro-batches together."""
        return self.metadata.get("pool") is not None

    @property
    def topology(self) -> Topology:
        """The ranks of the step's plans: those of a replica, or of a pool."""
        topology = self.settings.context_parallel_suite.topology
        if not self.is_pooled:
            return topology
        nodes, ranks_per_node = self.metadata["pool"]
        return Topology(nodes, ranks_per_node, topology.cluster)

    @property
    def groups(self) -> int:
        """Number of groups of consecutive ranks that share plans: the replicas, or the pools."""
        replica_ranks: int = self.settings.context_parallel_suite.context_parallel_size
        return self.metadata["replicas"] * replica_ranks // self.topology.ranks

    def micro_batches(self, group: int) -> list[tuple[Documents, str, dict[str, Any]]]:
        """Return the documents, the algorithm and its options of each micro-batch of a replica, or of a pool, whose
        replicas have the same."""
        replica = group * self.metadata["replicas"] // self.groups
        rank_metadata = next(trace.metadata for trace in self.ranks if trace.metadata["replica"] == replica)
        micro_batches = zip(_documents(rank_metadata), rank_metadata["plans"], strict=True)
        return [(documents, name, options) for documents, (name, options) in micro_batches]

    @cached_property
    def breakdown(self) -> TimeBreakdown:
        """The measured breakdown: sums over the events of each rank's trace."""

        def seconds(*categories: str) -> np.ndarray:
            return np.array([trace.seconds(*categories) for trace in self.ranks])

        parts = (
            seconds(CATEGORY_ATTENTION),
            seconds(CATEGORY_COMMUNICATION, CATEGORY_WAIT),
            seconds(CATEGORY_RANK_SYNC, CATEGORY_BATCH),
            seconds(CATEGORY_OPTIMIZER),
        )
        sent, messages = (
            np.array([sum(details[name] for details in trace.sends) for trace in self.ranks])
            for name in ("bytes", "messages")
        )
        return TimeBreakdown(*parts, seconds(CATEGORY_STEP) - sum(parts), sent, messages)

    def to_recording(self) -> Recording:
        """Return the events of all ranks as one recording."""
        events = [_event(trace.metadata["rank"], event) for trace in self.ranks for event in trace.events]
        own = ("rank", "cp_rank", "documents", "parents", "plans")
        metadata = {key: value for key, value in self.metadata.items() if key not in own}
        return Recording(f"{NAME}, step {self.number}", events, metadata)


def trace_file_name(step: int, rank: int) -> str:
    """Return the file name of a rank's trace of a step."""
    return f"step-{step:07d}-rank-{rank:04d}.json"


def trace_text(metadata: Mapping[str, Any], events: Iterable[TraceEvent]) -> str:
    """Return the text of a rank's file."""
    recording = Recording(NAME, list(events), metadata)
    content = {
        "displayTimeUnit": "ms",
        "otherData": {NAME: dict(metadata)},
        "traceEvents": list(trace_events([recording])),
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"


def find_trace_files(run: Path) -> dict[int, dict[int, Path]]:
    """Return the trace files of a run by step and rank, both ascending."""
    files: dict[int, dict[int, Path]] = {}
    for path in sorted(run.glob(f"{TRACE_FOLDER}/step-*-rank-*.json")):
        match = _FILE.fullmatch(path.name)
        if match is not None:
            files.setdefault(int(match[1]), {})[int(match[2])] = path
    return dict(sorted(files.items()))


def read_traced_steps(run: Path, only: Iterable[int] = ()) -> tuple[list[MeasuredStep], list[str]]:
    """Return the steps of a run with traces of all ranks, and a line for each step that lacks some.

    Args:
        run: folder of the run's output.
        only: numbers of steps; empty: all.

    Raises:
        ConfigError: the folder does not exist, it has no traces, or not of these steps; or a file is damaged.
    """
    files, wanted = find_trace_files(run), sorted(set(only))
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such folder; give the output.folder of a run")
    if not files:
        raise ConfigError(
            f"{run}: has no traces of steps; set output.trace_steps: [3, 4], or output.trace_interval, and train"
        )
    for step in wanted:
        if step not in files:
            raise ConfigError(f"--step {step}: was not traced; valid: {', '.join(map(str, files))}")
    steps, lines = [], []
    for step in wanted or files:
        traces = _of_step(step, files[step])
        size = traces[0].metadata["ranks"]
        missing = [rank for rank in range(size) if rank not in files[step]]
        if missing:
            ranks = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} of {size} ranks"
            lines.append(f"step {step} is left out: {ranks} left no trace of it in {run / TRACE_FOLDER}")
        else:
            steps.append(MeasuredStep(step, traces))
    if not steps:
        raise ConfigError(f"{run}: {'; '.join(lines)}; wait for the step's end, or put all files into one folder")
    return steps, lines


def _of_step(step: int, files: Mapping[int, Path]) -> list[RankTrace]:
    """Return the traces of a step that exist, by rank; files of ranks beyond those of the step are not read."""
    first = _read(step, *next(iter(files.items())))
    _check_settings(first)
    traces = [first]
    for rank, path in list(files.items())[1:]:
        if rank < first.metadata["ranks"]:
            trace = _read(step, rank, path)
            shared = (key for key in first.metadata if key not in _OF_RANK)
            differ = [key for key in shared if trace.metadata.get(key) != first.metadata[key]]
            if differ:
                raise ConfigError(
                    f"{path}: {differ[0]} differs from what {first.path} has: they are of two runs, or one is damaged; "
                    "remove the wrong one, and trace again"
                )
            traces.append(trace)
    return traces


def _read(step: int, rank: int, path: Path) -> RankTrace:
    with _damage_named(path):
        file = _File.model_validate_json(path.read_bytes())
        names = {event.tid: event.args.get("name") for event in file.traceEvents
                 if isinstance(event, _Name) and event.name == "thread_name"}  # fmt: skip
        events = [event for event in file.traceEvents if isinstance(event, _Event)]
        metadata = file.otherData.measured.model_dump()
        trace = RankTrace(path, metadata, [event.model_dump() | {"thread": str(names[event.tid])} for event in events])
        _require(metadata["step"] == step and metadata["rank"] == rank, "its name has another step or rank")
        ranks, replicas = metadata["ranks"], metadata["replicas"]
        is_rank = ranks % replicas == 0 and rank < ranks and metadata["replica"] == rank // (ranks // replicas)
        _require(is_rank, f"rank {rank} of {ranks} is not in replica {metadata['replica']} of {replicas}")
        is_plan = [n in ALGORITHMS and set(options) <= set(algorithm_options(n)) for n, options in metadata["plans"]]
        _require(all(is_plan), f"plans {metadata['plans']} must be algorithms and their options")
        _require(len(metadata["plans"]) == len(_documents(metadata)), "plans and micro-batches differ in number")
        _require(any(event.cat == CATEGORY_STEP for event in events), "no event is of category 'step', the whole step")
    return trace


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Raise ConfigError, one line that names the file, if what is made of it in the block is wrong in any way."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, details['loc'])) or 'all of it'}: {details['msg']}"
    except (ConfigError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        problem = f"{error if isinstance(error, ConfigError) else repr(error)}"
    else:
        return
    line = " ".join(problem.encode("utf-8", "backslashreplace").decode().split())
    raise ConfigError(f"{path}: not a valid step trace: {line}; remove it, and trace again")


def _documents(metadata: Mapping[str, Any]) -> list[Documents]:
    """Return the documents of each micro-batch of a rank."""
    lengths = metadata["documents"]
    parents = metadata.get("parents") or [None] * len(lengths)
    return [Documents(*documents) for documents in zip(lengths, parents, strict=True)]


def _check_settings(trace: RankTrace) -> None:
    """Raise ConfigError if settings or layers cannot be built, or the settings have another number of ranks."""
    metadata, step = trace.metadata, MeasuredStep(trace.metadata["step"], [trace])
    with _damage_named(trace.path):
        size, replicas = step.settings.model_parallel_size, metadata["replicas"]
        _require(metadata["ranks"] == replicas * size, f"ranks is {metadata['ranks']}, not {replicas} x {size}")
        replica_ranks = step.settings.context_parallel_suite.context_parallel_size
        pool = step.topology.ranks
        _require(replicas * replica_ranks % pool == 0 == pool % replica_ranks, f"pool is of {pool} ranks")
        step.layers  # noqa: B018


def _event(rank: int, event: Mapping[str, Any]) -> TraceEvent:
    """Return an event of a file without the number of its row, as in "send 2", which is computed again."""
    thread = re.sub(r" \d+$", "", event["thread"])
    return TraceEvent(rank, thread, event["name"], event["ts"] / 1e6, event["dur"] / 1e6, event["cat"], event["args"])
