"""Traces of the steps that the settings name: what `mindspeed-cp report` compares with the model.

A traced step begins with a barrier, so that the clocks of all ranks begin together. In it the engine and this module
record time spans (:mod:`mindspeed_cp.engine.recorder`); after it each rank writes a file.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_cp.config.derived import document_cost
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.engine.call_agreement import COMPARISON
from mindspeed_cp.engine.recorder import (
    COMPUTE,
    POST,
    UNPACK,
    WAIT,
    MessageTiming,
    RankTimings,
    Recorder,
    TimeSpan,
    recording,
    timed_span,
)
from mindspeed_cp.megatron import PlannedAttention, megatron_imports
from mindspeed_cp.megatron.patches.swap import replaced
from mindspeed_cp.report.run.step_traces import (
    CATEGORY_ATTENTION,
    CATEGORY_BATCH,
    CATEGORY_COMMUNICATION,
    CATEGORY_OPTIMIZER,
    CATEGORY_RANK_SYNC,
    CATEGORY_STEP,
    CATEGORY_WAIT,
    TRACE_FOLDER,
    TRACE_VERSION,
    find_trace_files,
    trace_file_name,
    trace_text,
)
from mindspeed_cp.report.trace_events import TraceEvent
from mindspeed_cp.schema.messages import bad_value
from mindspeed_cp.train.micro_batch_loader import MicroBatch
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.run_files import RunFiles, disk_errors_for, write_text
from mindspeed_cp.train.world import World

with megatron_imports():
    from megatron.core import parallel_state

#: Activities of spans outside the engine.
GATHER, REDUCTION, NEXT_BATCH, UPDATE = "gather", "reduction", "batch", "optimizer"

#: Name and category of the event of a span.
_SPANS = {
    COMPUTE: ("attention", CATEGORY_ATTENTION),
    POST: ("posts messages", CATEGORY_COMMUNICATION),
    WAIT: ("waits for messages", CATEGORY_WAIT),
    UNPACK: ("puts rows in place", CATEGORY_COMMUNICATION),
    COMPARISON: ("waits for ranks to compare plans", CATEGORY_RANK_SYNC),
    GATHER: ("waits for all ranks", CATEGORY_RANK_SYNC),
    REDUCTION: ("reduces gradients", CATEGORY_RANK_SYNC),
    NEXT_BATCH: ("waits for a batch", CATEGORY_BATCH),
    UPDATE: ("optimizer", CATEGORY_OPTIMIZER),
}


class StepTracer:
    """Traces this rank's part of some steps.

    Args:
        settings: settings of the run; `output` names the steps.
        world: this rank among all.
        training: the model.
        files: files of the run; traces of later steps than `step` are removed.
        step: number of steps done before.

    Raises:
        ConfigError: a step to trace comes after the last one.
    """

    def __init__(self, settings: Settings, world: World, training: TrainingModel, files: RunFiles, step: int) -> None:
        output, last = settings.output, settings.train.train_iters
        self._steps, self._interval, self._first = frozenset(output.trace_steps or ()), output.trace_interval, step + 1
        if max(self._steps, default=0) > last:
            rule = f"must be steps up to train.train_iters = {last}"
            raise bad_value("output.trace_steps", sorted(self._steps), rule)
        self._settings, self._world, self._training = settings, world, training
        self._folder = files.folder / TRACE_FOLDER
        if world.is_first:
            with disk_errors_for(files.folder):
                for number, traces in find_trace_files(files.folder).items():
                    for path in traces.values() if number > step else ():
                        path.unlink()

    @contextmanager
    def step(self, number: int, batches: Iterator[MicroBatch]) -> Iterator[Iterator[MicroBatch]]:
        """Trace a step, if the settings name it; yields the iterator over its micro-batches."""
        if number not in self._steps and not (self._interval and number % self._interval == 0):
            yield batches
            return
        if self._world.device.type != "cpu":  # finish the step before
            torch.get_device_module(self._world.device).synchronize()
        self._world.barrier()
        recorder = Recorder(self._world.device)
        traced = _TracedBatches(batches, recorder)
        with ExitStack() as stack:
            stack.enter_context(_record_layer_numbers(self._training.models, recorder))
            stack.enter_context(_record_reduction(self._training.config))
            stack.enter_context(recording(recorder))
            yield traced
        self._write(number, recorder.read(), traced)

    def _write(self, number: int, record: RankTimings, traced: _TracedBatches) -> None:
        """Write this rank's file of a step; print an error, as no trace may end a run."""
        rank = self._world.rank
        events = step_trace_events(record, number, rank, self._peers(traced.pools))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            text = trace_text(self._metadata(number, record, traced), events)
            write_text(self._folder / trace_file_name(number, rank), text)
        except OSError as error:
            cause = os.strerror(error.errno or errno.EIO)
            print(f"rank {rank}: {self._folder}: a trace cannot be written ({cause})", file=sys.stderr, flush=True)

    def _peers(self, pools: int) -> dict[str, list[int]]:
        """Return by kind of message the ranks of the group in which it is sent."""
        ranks = dist.get_process_group_ranks(self._world.plan_group(pools))
        hidden_states = ranks
        if self._settings.train.sequence_parallel:
            group = parallel_state.get_tensor_and_context_parallel_group()
            if pools:
                group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            groups = self._world.groups_of_pool(pools)
            if groups is not None and groups.tensor is not None:
                group = groups.tensor
            hidden_states = dist.get_process_group_ranks(group)
        return {"keys": ranks, "gradients": ranks, "redistribution": ranks, "hidden_states": hidden_states}

    def _metadata(self, number: int, record: RankTimings, traced: _TracedBatches) -> dict[str, Any]:
        """Return the metadata of the file; all but rank, cp_rank, replica, seconds, documents, parents and plans is
        equal on all ranks."""
        world, settings = self._world, self._settings
        kinds = list(dict.fromkeys(self._training.attentions))
        layers = document_cost(settings, self._training.attentions).layers
        pool = world.pool_topology(traced.pools) if traced.pools else None
        return {
            "version": TRACE_VERSION,
            "step": number,
            "first_of_start": number == self._first,
            "rank": world.rank,
            "ranks": world.size,
            "replica": world.replica,
            "replicas": world.replicas,
            "cp_rank": world.cp_rank,
            "pool": None if pool is None else [pool.nodes, pool.ranks_per_node],
            "device": world.device.type,
            "seconds": record.seconds,
            "documents": traced.documents,
            "parents": traced.parents,
            "plans": traced.plans,
            "attentions": [asdict(kind) for kind in kinds],
            "layers": [
                [kinds.index(kind), cost.flops_per_token, cost.hidden_size, cost.qkv_flops, cost.out_flops]
                for kind, cost in layers
            ],
            "bytes_per_element": 2 if settings.train.bf16 else 4,
            "gradient_bytes": 4 * sum(p.numel() for part in self._training.models for p in part.parameters()),
            "settings": settings.model_dump(mode="json"),
        }


class _TracedBatches:
    """Iterator over the micro-batches of a traced step.

    Attributes:
        documents: lengths of the documents of each micro-batch.
        parents: parents of the documents of each micro-batch; None where none has one.
        plans: algorithm and options of each micro-batch.
        pools: number of pools on which the ranks of several replicas compute them together; 0: on replicas.
    """

    def __init__(self, batches: Iterator[MicroBatch], recorder: Recorder) -> None:
        self._batches, self._recorder, self.pools = batches, recorder, 0
        self.documents: list[list[int]] = []
        self.parents: list[list[int] | None] = []
        self.plans: list[tuple[str, dict[str, Any]]] = []

    def __iter__(self) -> _TracedBatches:
        return self

    def __next__(self) -> MicroBatch:
        with timed_span(NEXT_BATCH):
            micro = next(self._batches)
        assert micro.params.plan is not None
        self.pools = micro.pools
        self._recorder.micro_batch = len(self.documents)
        documents = micro.params.plan.documents
        self.documents.append(documents.lengths.tolist())
        self.parents.append(None if documents.trees is None else documents.parents.tolist())
        self.plans.append((micro.algorithm_choice.algorithm, micro.algorithm_choice.options))
        return micro


@contextmanager
def _record_layer_numbers(models: Sequence[nn.Module], recorder: Recorder) -> Iterator[None]:
    """Tell the recorder within the block in which layer the engine is called. Recomputation calls core attention, or
    the whole layer, again; hidden states move in hooks of the attention module, which run after this one."""
    handles = []
    for module in itertools.chain.from_iterable(model.modules() for model in models):
        core = getattr(module, "core_attention", None)
        if not isinstance(core, PlannedAttention):
            continue

        def set_layer(*_: object, number: int = core.layer_number) -> None:
            recorder.layer = number

        handles += [hooked.register_forward_pre_hook(set_layer, prepend=True) for hooked in (module, core)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _record_reduction(config: Any) -> Iterator[None]:
    """Record within the block the reduction of gradients at the end of Megatron's schedule."""
    reduce = config.finalize_model_grads_func

    @wraps(reduce)
    def recorded(*arguments: Any, **named: Any) -> Any:
        with timed_span(REDUCTION):
            return reduce(*arguments, **named)

    with replaced(config, "finalize_model_grads_func", recorded):
        yield


def step_trace_events(record: RankTimings, step: int, rank: int, peers: dict[str, list[int]]) -> Iterator[TraceEvent]:
    """Yield the events of a rank's step.

    Args:
        record: recorded time spans and messages.
        step: number of the step.
        rank: this rank among all.
        peers: by kind of message, the ranks of the group in which it is sent.
    """
    yield TraceEvent(rank, CATEGORY_STEP, f"step {step}", 0.0, record.seconds, CATEGORY_STEP)
    for span in record.spans:
        name, category = _SPANS[span.activity]
        if span.origin is not None:
            name = f"{name} {span.origin.direction}"
        yield TraceEvent(rank, "compute", name, span.begin, span.end - span.begin, category, _origin(span))
    groups: dict[MessageTiming, list[MessageTiming]] = {}  # posted together and waited for together
    for message in record.messages:
        groups.setdefault(message._replace(peer=0, bytes=0), []).append(message)
    for messages in groups.values():
        yield _message_event(messages, rank, peers)


def _message_event(messages: Sequence[MessageTiming], rank: int, peers: dict[str, list[int]]) -> TraceEvent:
    first = messages[0]
    others = sorted({peers[first.kind][message.peer] for message in messages})
    details = {
        "kind": first.kind,
        "sends": first.sends,
        "bytes": sum(message.bytes for message in messages),
        "messages": len(messages),
        "src": rank if first.sends else others,
        "dst": others if first.sends else rank,
        **_origin(first),
        **({} if first.done_step is None else {"due_in_step": first.done_step}),
    }
    thread = "send" if first.sends else "receive"
    name = f"{first.kind} {first.origin.direction}"
    return TraceEvent(rank, thread, name, first.begin, first.end - first.begin, first.kind, details)


def _origin(record: TimeSpan | MessageTiming) -> dict[str, Any]:
    """Return where in the step a span or message belongs; `step` is that of the plan."""
    if record.origin is None:
        return {}
    step = record.step if isinstance(record, TimeSpan) else record.start_step
    origin = {"micro_batch": record.origin.micro_batch, "layer": record.origin.layer, "part": record.origin.part}
    return origin if step is None else {**origin, "step": step}
