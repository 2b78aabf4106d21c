"""Traces of a training's steps: the file that every rank leaves of one, and what the files of a step say together.

::

    RUN/trace/step-0000003-rank-0001.json        a trace as :mod:`.trace` writes them, of one rank

Each event of the thread "compute" is one of the categories below, and none lies inside another: what they leave of the
step is linear layers and whatever else the rank does. What a step was made of (documents, attention, settings) is in
the file too, so that the same plans can be built again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.config import Settings
from mindspeed_cp.cost import LayerCost
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.report.trace import Event, Recording, trace_events
from mindspeed_cp.report.trace_file import damaged, read_trace_file

FOLDER = "trace"
NAME = "measured"
VERSION = 2

#: Categories of events: kernels of attention; posting messages and putting rows in place; waits for messages; waits for
#: all ranks, and the reduction of gradients; waits for a batch; the optimizer; all of the step.
ATTENTION, COMMUNICATION, WAIT = "attention", "communication", "wait"
RANKS, BATCH, OPTIMIZER, STEP = "ranks", "batch", "optimizer", "step"

#: Of what a trace is about, that which other ranks of its step need not have alike.
_OF_RANK = ("rank", "cp_rank", "replica", "seconds", "documents", "plans")

_FILE = re.compile(r"step-(\d+)-rank-(\d+)\.json")


@dataclass(frozen=True, eq=False)
class Breakdown:
    """What the ranks of a step spend its time on, in seconds, fp64 [ranks] each.

    Attributes:
        attention: kernels of attention.
        exposed: messages of attention and of hidden states that are not hidden behind kernels.
        waiting: for other ranks outside of these, for the reduction of gradients, and for batches.
        optimizer: the optimizer's step.
        other: linear layers; measured also all else that a rank does.
        sent: bytes that a rank sends in these messages.
        messages: how many of them it sends; keys and values that go together are one.
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
        """Of the whole step, fp64 [ranks]."""
        total: np.ndarray = self.attention + self.exposed + self.waiting + self.optimizer + self.other
        return total


@dataclass(frozen=True, eq=False)
class RankTrace:
    """The file that one rank left of one step: what it is about, and its complete events as the file has them."""

    path: Path
    about: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]] = field(repr=False)

    def seconds(self, *categories: str) -> float:
        """Of all events of these categories."""
        return sum(event["dur"] for event in self.events if event["cat"] in categories) / 1e6

    @property
    def sends(self) -> list[Mapping[str, Any]]:
        """Details of the events of the messages that it sent."""
        return [event["args"] for event in self.events if event["args"].get("sends")]


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """A step of which every rank left its trace.

    Attributes:
        number: of the step, from 1.
        ranks: of each rank.
    """

    number: int
    ranks: Sequence[RankTrace]

    @property
    def about(self) -> Mapping[str, Any]:
        """What is the same on every rank."""
        return self.ranks[0].about

    @cached_property
    def settings(self) -> Settings:
        """Of the run, as it was then."""
        return Settings(**self.about["settings"])

    @cached_property
    def layers(self) -> list[tuple[AttentionConfig, LayerCost]]:
        """Attention and linear part of each layer, on one tensor-parallel rank."""
        kinds = [AttentionConfig(**values) for values in self.about["attentions"]]
        train = self.settings.train
        shares = train.tensor_model_parallel_size if train.sequence_parallel else 1
        element = self.about["bytes_per_element"]
        return [
            (kinds[kind], LayerCost(flops, hidden, qkv, out, shares, element))
            for kind, flops, hidden, qkv, out in self.about["layers"]
        ]

    def micro_batches(self, replica: int) -> list[tuple[Documents, str, dict[str, Any]]]:
        """Of each micro-batch of a replica its documents, and the algorithm and options of its plans."""
        mine = next(one.about for one in self.ranks if one.about["replica"] == replica)
        both = zip(mine["documents"], mine["plans"], strict=True)
        return [(Documents(lengths), name, options) for lengths, (name, options) in both]

    @cached_property
    def breakdown(self) -> Breakdown:
        """What was measured: sums over the events of each rank's trace."""

        def each(*categories: str) -> np.ndarray:
            return np.array([one.seconds(*categories) for one in self.ranks])

        parts = each(ATTENTION), each(COMMUNICATION, WAIT), each(RANKS, BATCH), each(OPTIMIZER)
        sent, messages = (
            np.array([sum(details[name] for details in one.sends) for one in self.ranks])
            for name in ("bytes", "messages")
        )
        return Breakdown(*parts, each(STEP) - sum(parts), sent, messages)

    def recording(self) -> Recording:
        """All ranks together, for one trace."""
        events = [_event(one) for rank in self.ranks for one in _with_threads(rank)]
        about = {
            key: value for key, value in self.about.items() if key not in ("rank", "cp_rank", "documents", "plans")
        }
        return Recording(f"{NAME}, step {self.number}", events, about)


def file_name(step: int, rank: int) -> str:
    """Of a rank's trace of a step."""
    return f"step-{step:07d}-rank-{rank:04d}.json"


def content(about: Mapping[str, Any], events: Iterable[Event]) -> str:
    """The text of a rank's file."""
    recording = Recording(NAME, list(events), about)
    whole = {
        "displayTimeUnit": "ms",
        "otherData": {NAME: dict(about)},
        "traceEvents": list(trace_events([recording])),
    }
    return json.dumps(whole, separators=(",", ":"), allow_nan=False) + "\n"


def trace_files(run: Path) -> dict[int, dict[int, Path]]:
    """The files of a run by step and rank, both ascending."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(run.glob(f"{FOLDER}/step-*-rank-*.json")):
        match = _FILE.fullmatch(path.name)
        if match is not None:
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    return dict(sorted(found.items()))


def read_steps(run: Path, only: Iterable[int] = ()) -> tuple[list[MeasuredStep], list[str]]:
    """The steps of a run that all ranks have traced, and a line for each that lacks the traces of some.

    Args:
        run: folder of the run's output.
        only: numbers of steps; none: all.

    Raises:
        ConfigError: there is no such folder, it has no traces, or not of these steps; or a file is damaged.
    """
    files, wanted = trace_files(run), sorted(set(only))
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
        size = traces[0].about["ranks"]
        missing = [rank for rank in range(size) if rank not in files[step]]
        if missing:
            ranks = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} of {size} ranks"
            lines.append(f"step {step} is left out: {ranks} left no trace of it in {run / FOLDER}")
        else:
            steps.append(MeasuredStep(step, traces))
    if not steps:
        raise ConfigError(f"{run}: {'; '.join(lines)}; wait for the step's end, or put all files into one folder")
    return steps, lines


def _of_step(step: int, files: Mapping[int, Path]) -> list[RankTrace]:
    """The traces of a step by rank, as far as they are there; files of ranks beyond the step's are not read."""
    first = _read(step, *next(iter(files.items())))
    _check_made(first)
    traces = [first]
    for rank, path in list(files.items())[1:]:
        if rank < first.about["ranks"]:
            one = _read(step, rank, path)
            differ = [key for key in first.about if key not in _OF_RANK and one.about.get(key) != first.about[key]]
            if differ:
                raise ConfigError(
                    f"{path}: {differ[0]} differs from what {first.path} has: they are of two runs, or one is damaged; "
                    "remove the wrong one, and trace again"
                )
            traces.append(one)
    return traces


def _read(step: int, rank: int, path: Path) -> RankTrace:
    about, events = read_trace_file(path, NAME, VERSION)
    trace = RankTrace(path, about, events)
    for key, value in (("step", step), ("rank", rank)):
        if about[key] != value:
            raise damaged(path, f"{key} is {about[key]} in it, and {value} in its name")
    ranks, replicas = about["ranks"], about["replicas"]
    if ranks % replicas or rank >= ranks or about["replica"] != rank // (ranks // replicas):
        raise damaged(path, f"rank {rank} of {ranks} is not in replica {about['replica']} of {replicas}")
    if len(about["plans"]) != len(about["documents"]):
        raise damaged(path, f"plans are {len(about['plans'])}, and micro-batches {len(about['documents'])}")
    if not any(event["cat"] == STEP for event in trace.events):
        raise damaged(path, f"no event is of category {STEP!r}, the whole step")
    return trace


def _check_made(trace: RankTrace) -> None:
    """Raise ConfigError unless settings and layers can be made of a trace, and the settings have its ranks."""
    path, about, step = trace.path, trace.about, MeasuredStep(trace.about["step"], [trace])
    try:
        size = step.settings.model_parallel_size
    except (ConfigError, TypeError) as error:
        raise ConfigError(
            f"{path}: its settings cannot be used: {error}; report where the files are that they name, or remove it "
            "and trace again"
        ) from None
    if about["ranks"] != about["replicas"] * size:
        raise damaged(path, f"ranks is {about['ranks']}, not {about['replicas']} replicas of {size} ranks")
    last = max(kind for kind, *_ in about["layers"])
    if last >= len(about["attentions"]):
        raise damaged(path, f"layers have attention {last}, and attentions end before it")
    try:
        step.layers  # noqa: B018
    except (ConfigError, TypeError) as error:
        raise damaged(path, f"attentions or layers: {error}") from None


def _with_threads(trace: RankTrace) -> Iterable[tuple[int, Mapping[str, Any]]]:
    return ((trace.about["rank"], event) for event in trace.events)


def _event(of: tuple[int, Mapping[str, Any]]) -> Event:
    """An event of a file; its lane, as in "send 2", is found anew."""
    rank, event = of
    thread = re.sub(r" \d+$", "", event["thread"])
    return Event(rank, thread, event["name"], event["ts"] / 1e6, event["dur"] / 1e6, event["cat"], event["args"])
