"""Traces of the steps that output.trace_steps names: what `mindspeed-cp report` compares with the model.

A traced step begins with a barrier, so that the clocks of all ranks begin together. In it the engine and this module
record time spans (:mod:`mindspeed_cp.engine.recorder`); after it the first rank writes the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_cp.config.derived import document_cost, training_plan_options
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.engine.agreement import COMPARISON
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
from mindspeed_cp.report.step_trace import (
    CATEGORY_ATTENTION,
    CATEGORY_BATCH,
    CATEGORY_COMMUNICATION,
    CATEGORY_OPTIMIZER,
    CATEGORY_RANK_SYNC,
    CATEGORY_STEP,
    CATEGORY_WAIT,
    layer_metadata,
    trace_path,
    write_step_trace,
)
from mindspeed_cp.report.trace_events import TraceEvent
from mindspeed_cp.train.micro_batch_loader import MicroBatch
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.run_files import RunFiles, error_text
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
    """Traces some steps; every rank has one.

    Args:
        settings: settings of the run; output.trace_steps names the steps.
        world: this rank among all.
        training: the model.
        files: files of the run.
        first_step: the first step of this start.
        notify: called on the first rank with a line about a trace that cannot be written.
    """

    def __init__(
        self,
        settings: Settings,
        world: World,
        training: TrainingModel,
        files: RunFiles,
        first_step: int,
        notify: Callable[[str], None],
    ) -> None:
        self._steps, self._first_step, self._notify = frozenset(settings.output.trace_steps or ()), first_step, notify
        self._settings, self._world, self._training, self._folder = settings, world, training, files.folder

    @contextmanager
    def step(self, number: int, batches: Iterator[MicroBatch]) -> Iterator[Iterator[MicroBatch]]:
        """Trace a step, if the settings name it; yields the iterator over its micro-batches."""
        if number not in self._steps:
            yield batches
            return
        if self._world.device.type != "cpu":  # finish the step before
            torch.get_device_module(self._world.device).synchronize()
        self._world.barrier()
        recorder = Recorder(self._world.device)
        traced = _TracedBatches(batches, recorder, self._settings)
        with ExitStack() as stack:
            stack.enter_context(_record_layer_numbers(self._training.model, recorder))
            stack.enter_context(_record_reduction(self._training.config))
            stack.enter_context(recording(recorder))
            yield traced
        self._write(number, recorder.read(), traced)

    def _write(self, number: int, record: RankTimings, traced: _TracedBatches) -> None:
        """Gather the events of all ranks, and write the step's file; an error is a note: no trace may end a run."""
        world = self._world
        events = list(step_trace_events(record, number, world.rank, self._peers(traced.pools)))
        gathered = world.gather_objects((events, world.replica, traced.rows))
        if not world.is_first:
            return
        pool = world.pool_topology(traced.pools) if traced.pools else None
        settings, attentions = self._settings, self._training.attentions
        metadata = {
            "step": number,
            "first_of_start": number == self._first_step,
            "replicas": world.replicas,
            "pool": None if pool is None else [pool.nodes, pool.ranks_per_node],
            "device": world.device.type,
            "micro_batches": [rows for _, rows in sorted({replica: rows for _, replica, rows in gathered}.items())],
            "layers": layer_metadata(document_cost(settings, attentions).layers),
            "gradient_bytes": 4 * sum(p.numel() for p in self._training.model.parameters()),
            "settings": settings.model_dump(mode="json"),
        }
        path = trace_path(self._folder, number)
        try:
            everything = [event for rank_events, *_ in gathered for event in rank_events]
            write_step_trace(path, metadata, everything, world.size)
        except OSError as error:
            self._notify(f"{path}: the trace of the step cannot be written: {error_text(error)}")

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


class _TracedBatches:
    """Iterator over the micro-batches of a traced step.

    Attributes:
        rows: of each micro-batch, lengths of its documents, their parents (None: they have none), algorithm, options.
        pools: number of pools on which the ranks of several replicas compute them together; 0: on replicas.
    """

    def __init__(self, batches: Iterator[MicroBatch], recorder: Recorder, settings: Settings) -> None:
        self._batches, self._recorder, self.pools = batches, recorder, 0
        self._algorithm = settings.context_parallel_suite.algorithm, training_plan_options(settings)
        self.rows: list[tuple[list[int], list[int] | None, str, dict[str, Any]]] = []

    def __iter__(self) -> _TracedBatches:
        return self

    def __next__(self) -> MicroBatch:
        with timed_span(NEXT_BATCH):
            micro = next(self._batches)
        assert micro.params.plan is not None
        self.pools = micro.global_batch.dispatched.pools
        self._recorder.micro_batch = len(self.rows)
        documents = micro.params.plan.documents
        parents = None if documents.trees is None else documents.parents.tolist()
        self.rows.append((documents.lengths.tolist(), parents, *self._algorithm))
        return micro


@contextmanager
def _record_layer_numbers(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder within the block in which layer the engine is called. Recomputation calls core attention, or
    the whole layer, again; hidden states move in hooks of the attention module, which run after this one."""
    handles = []
    for module in model.modules():
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
