"""Traces of the steps that the settings name: what this rank did in them, written while the next step runs.

A traced step begins with a barrier, so that the clocks of all ranks begin together. In it the engine and this module
take marks (:mod:`mindspeed_cp.engine.clock`); after it a thread writes the rank's file. Other steps pass unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_cp.config import Settings
from mindspeed_cp.config_errors import bad_value
from mindspeed_cp.engine.clock import COMPUTE, LAND, POST, Message, Record, Recorder, Span, recording, span
from mindspeed_cp.engine.clock import WAIT as WAITED
from mindspeed_cp.megatron import PlannedAttention, megatron_imports
from mindspeed_cp.report.measured import (
    ATTENTION,
    BATCH,
    COMMUNICATION,
    FOLDER,
    OPTIMIZER,
    RANKS,
    STEP,
    VERSION,
    WAIT,
    content,
    file_name,
    trace_files,
)
from mindspeed_cp.report.trace import Event
from mindspeed_cp.train.batches import MicroBatch
from mindspeed_cp.train.dealing import document_cost
from mindspeed_cp.train.files import RunFiles, write_text, writing
from mindspeed_cp.train.model import Parts
from mindspeed_cp.train.world import World

with megatron_imports():
    from megatron.core import parallel_state

#: Spans outside the engine, as `span` is given them: what a rank waits for, or does.
GATHER, REDUCTION, NEXT_BATCH, UPDATE = "gather", "reduction", "batch", "optimizer"

#: Name and category of the event of a span.
_SPANS = {
    COMPUTE: ("attention", ATTENTION),
    POST: ("posts messages", COMMUNICATION),
    WAITED: ("waits for messages", WAIT),
    LAND: ("puts rows in place", COMMUNICATION),
    GATHER: ("waits for all ranks", RANKS),
    REDUCTION: ("reduces gradients", RANKS),
    NEXT_BATCH: ("waits for a batch", BATCH),
    UPDATE: ("optimizer", OPTIMIZER),
}


class Tracer:
    """Traces this rank's part of some steps. A context manager: at its end all files are there.

    Args:
        settings: of the run; `output` says which steps.
        world: this rank's place.
        parts: what is trained.
        files: of the run. Traces behind the step that it goes on from are removed, as its metrics are.
        step: where the run stands.

    Raises:
        ConfigError: a step to trace comes after the last one.
    """

    def __init__(self, settings: Settings, world: World, parts: Parts, files: RunFiles, step: int) -> None:
        output, last = settings.output, settings.train.train_iters
        self._steps, self._interval, self._first = frozenset(output.trace_steps or ()), output.trace_interval, step + 1
        if max(self._steps, default=0) > last:
            rule = f"must be steps up to train.train_iters = {last}"
            raise bad_value("output.trace_steps", sorted(self._steps), rule)
        self._settings, self._world, self._parts = settings, world, parts
        self._folder = files.folder / FOLDER
        self._thread: ThreadPoolExecutor | None = None
        self._written: list[Future[None]] = []
        if world.is_first:
            with writing(files.folder):
                for number, traces in trace_files(files.folder).items():
                    for path in traces.values() if number > step else ():
                        path.unlink()

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if kind is None:
            self._check_written()

    @contextmanager
    def step(self, number: int, batches: Iterator[MicroBatch]) -> Iterator[Iterator[MicroBatch]]:
        """A step of the run: gives the iterator over micro-batches that the step takes.

        Raises:
            DiskError: the trace of an earlier step cannot be written.
        """
        if number not in self._steps and not (self._interval and number % self._interval == 0):
            yield batches
            return
        self._check_written()
        if self._world.device.type != "cpu":  # what is left of the step before
            torch.get_device_module(self._world.device).synchronize()
        self._world.barrier()
        recorder = Recorder(self._world.device)
        watched = _Watched(batches, recorder)
        with ExitStack() as stack:
            stack.enter_context(_layers_told(self._parts.gpt, recorder))
            stack.enter_context(_reduction_spanned(self._parts.config))
            stack.enter_context(recording(recorder))
            yield watched
        self._keep(number, recorder.read(), watched)

    def _keep(self, number: int, record: Record, watched: _Watched) -> None:
        """Have the file written, in a thread of its own."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="mindspeed-cp-traces")
        about, peers = self._about(number, record, watched), self._peers()
        self._written.append(self._thread.submit(self._write, number, about, record, peers))

    def _write(self, number: int, about: dict[str, Any], record: Record, peers: dict[str, list[int]]) -> None:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        events = events_of(record, number, self._world.rank, peers)
        write_text(self._folder / file_name(number, self._world.rank), content(about, events))

    def _check_written(self) -> None:
        """Raise what went wrong in the thread, once it has."""
        while self._written and self._written[0].done():
            self._written.pop(0).result()

    def _peers(self) -> dict[str, list[int]]:
        """By kind of message: the rank of each member of the group in which it goes."""
        cp = dist.get_process_group_ranks(self._world.cp_group)
        remap = cp
        if self._settings.train.sequence_parallel:
            remap = dist.get_process_group_ranks(parallel_state.get_tensor_and_context_parallel_group())
        return {"keys": cp, "gradients": cp, "move": cp, "remap": remap}

    def _about(self, number: int, record: Record, watched: _Watched) -> dict[str, Any]:
        """What the step was made of; all but rank, cp_rank, replica, seconds, documents and plans is the same on all
        ranks."""
        world, settings = self._world, self._settings
        kinds = list(dict.fromkeys(self._parts.attentions))
        layers = document_cost(settings, self._parts.attentions).layers
        return {
            "version": VERSION,
            "step": number,
            "first_of_start": number == self._first,
            "rank": world.rank,
            "ranks": world.size,
            "replica": world.replica,
            "replicas": world.replicas,
            "cp_rank": world.cp_rank,
            "device": world.device.type,
            "seconds": record.seconds,
            "documents": watched.documents,
            "plans": watched.plans,
            "attentions": [asdict(kind) for kind in kinds],
            "layers": [
                [kinds.index(kind), cost.flops_per_token, cost.hidden_size, cost.qkv_flops, cost.out_flops]
                for kind, cost in layers
            ],
            "bytes_per_element": 2 if settings.train.bf16 else 4,
            "gradient_bytes": 4 * sum(p.numel() for p in self._parts.gpt.parameters()),
            "settings": settings.model_dump(mode="json"),
        }


class _Watched:
    """Micro-batches on their way into a traced step.

    Attributes:
        documents: lengths of those that were taken.
        plans: algorithm and options of each one's plans.
    """

    def __init__(self, batches: Iterator[MicroBatch], recorder: Recorder) -> None:
        self._batches, self._recorder = batches, recorder
        self.documents: list[list[int]] = []
        self.plans: list[tuple[str, dict[str, Any]]] = []

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> MicroBatch:
        with span(NEXT_BATCH):
            micro = next(self._batches)
        assert micro.params.plan is not None
        self._recorder.micro_batch = len(self.documents)
        self.documents.append(micro.params.plan.documents.lengths.tolist())
        self.plans.append((micro.chosen.algorithm, micro.chosen.options))
        return micro


@contextmanager
def _layers_told(gpt: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Within the block the recorder is told in which layer the engine is called. Recomputation calls core attention, or
    the whole layer, again; hidden states move in hooks of the attention module, before which this one comes."""
    handles = []
    for module in gpt.modules():
        core = getattr(module, "core_attention", None)
        if not isinstance(core, PlannedAttention):
            continue

        def tell(*_: object, number: int = core.layer_number) -> None:
            recorder.layer = number

        handles += [one.register_forward_pre_hook(tell, prepend=True) for one in (module, core)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _reduction_spanned(config: Any) -> Iterator[None]:
    """Within the block the reduction of gradients at the end of Megatron's schedule is a span."""
    reduce = config.finalize_model_grads_func

    def spanned(*given: Any, **named: Any) -> Any:
        with span(REDUCTION):
            return reduce(*given, **named)

    config.finalize_model_grads_func = spanned
    try:
        yield
    finally:
        config.finalize_model_grads_func = reduce


def events_of(record: Record, step: int, rank: int, peers: dict[str, list[int]]) -> Iterator[Event]:
    """A rank's record of a step as events of a trace.

    Args:
        record: what the rank did.
        step: its number.
        rank: of all ranks.
        peers: by kind of message, the rank of each member of its group.
    """
    yield Event(rank, STEP, f"step {step}", 0.0, record.seconds, STEP)
    for one in record.spans:
        name, category = _SPANS[one.what]
        if one.place is not None:
            name = f"{name} {one.place.direction}"
        yield Event(rank, "compute", name, one.begin, one.end - one.begin, category, _details(one))
    together: dict[tuple[Any, ...], list[Message]] = {}
    for message in record.messages:
        key = message.kind, message.place, message.sends, message.step, message.due, message.begin, message.end
        together.setdefault(key, []).append(message)
    for messages in together.values():
        yield _of_messages(messages, rank, peers)


def _of_messages(messages: Sequence[Message], rank: int, peers: dict[str, list[int]]) -> Event:
    """Messages that were posted together and waited for together."""
    one = messages[0]
    others = sorted({peers[one.kind][message.peer] for message in messages})
    details = {
        "kind": one.kind,
        "sends": one.sends,
        "bytes": sum(message.bytes for message in messages),
        "messages": len(messages),
        "src": rank if one.sends else others,
        "dst": others if one.sends else rank,
        **_details(one),
        **({} if one.due is None else {"due_in_step": one.due}),
    }
    thread = "send" if one.sends else "receive"
    name = f"{one.kind} {one.place.direction}"
    return Event(rank, thread, name, one.begin, one.end - one.begin, one.kind, details)


def _details(one: Span | Message) -> dict[str, Any]:
    """Where in the step something was; `step` is that of the plan."""
    if one.place is None:
        return {}
    found = {"micro_batch": one.place.micro_batch, "layer": one.place.layer, "part": one.place.part}
    return found if one.step is None else {**found, "step": one.step}
