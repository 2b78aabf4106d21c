"""The steps of a run: batches in, optimizer steps, metrics and checkpoints out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.comm.directional_groups import warm_up
from mindspeed_cp.config.derived import training_plan_options
from mindspeed_cp.data.corpus import open_corpus
from mindspeed_cp.data.stream import PackedStream
from mindspeed_cp.engine.attention_check import AttentionCheck
from mindspeed_cp.layout import Documents
from mindspeed_cp.megatron import check_tokens_per_step
from mindspeed_cp.train.checkpoint import check_storage, resume, save_checkpoint
from mindspeed_cp.train.checks import BadStepPolicy, QueueProbe, check_same_start
from mindspeed_cp.train.comparison import run_comparison
from mindspeed_cp.train.failures import StopRequest, stop_signals_to
from mindspeed_cp.train.micro_batch_loader import MicroBatchLoader, make_dispatcher
from mindspeed_cp.train.model import TrainingModel, build_training_model
from mindspeed_cp.train.output import RunWriter, check_tensorboard
from mindspeed_cp.train.run_files import RunFiles
from mindspeed_cp.train.step import run_step
from mindspeed_cp.train.world import World


def train(world: World) -> dict[str, Any] | None:
    """Train until train.train_iters, or until asked to stop.

    Returns:
        The summary on the first rank, which is also in summary.json; None on the others.

    Raises:
        ConfigError: A setting cannot be used (`algorithm: auto` must be resolved first, by
            config.candidates.resolve_auto).
        CorruptionError: Attention is not what the reference computes (all ranks raise it).
        DivergenceError: The loss or the gradient is not finite, or the loss is a spike, and the policy is to stop (all
            ranks raise it).
        OSError: A checkpoint cannot be written.
        PeerError: Another rank died.
    """
    settings = world.settings
    check_tensorboard(settings)
    check_storage()
    files = RunFiles(Path(settings.output.folder))
    with ExitStack() as stack:
        if world.is_first:
            files.create()
            stack.enter_context(files.locked())
        world.barrier()
        corpus = open_corpus(settings.data.corpus)
        check_same_start(world, corpus.digest)
        context, rows = settings.data.seq_length, settings.train.global_batch_size
        check_tokens_per_step(rows * context)

        def new_stream() -> PackedStream:
            return PackedStream(corpus, context, settings.train.seed, world.replica, world.replicas)

        stream = new_stream()
        if settings.train.deterministic_mode:  # operators without deterministic algorithms are refused
            torch.use_deterministic_algorithms(True)
        training = build_training_model(world)
        _warm_up_connections(training)
        progress, folder, notes = resume(training)
        if progress.data is not None:
            stream.load_state_dict(progress.data)
        writer = None
        if world.is_first:
            writer = RunWriter(files, training, progress.step)
            stack.callback(writer.close)
            for note in notes:
                writer.note(note)
        stop_request = StopRequest()
        stack.enter_context(stop_signals_to(stop_request))
        dispatcher = make_dispatcher(training)
        if settings.train.compare and folder is None:
            if writer is not None:
                writer.note("comparing algorithms before the training (train.compare)")
            comparison = run_comparison(training, new_stream, dispatcher, stop_request)
            if writer is not None:
                writer.comparison(comparison)
        policy, queue = BadStepPolicy(settings), QueueProbe(world.device, world.rank)
        interval, check_interval = settings.checkpoint.save_interval, settings.train.check_attention_interval
        last, stopped_by = settings.train.train_iters, None
        batches = stack.enter_context(MicroBatchLoader(training, stream, dispatcher))
        while progress.step < last and stopped_by is None:
            step = progress.step + 1
            with _traced(training, files, step):
                began = time.perf_counter()
                check = None
                if check_interval and step % check_interval == 0:  # alike on all ranks
                    timeout = settings.context_parallel_suite.timeout_seconds
                    check = AttentionCheck(settings.model.num_layers, (settings.train.seed, step), timeout)
                result = run_step(training, batches, step, stop_request, queue, check, policy, progress.losses)
                seconds = time.perf_counter() - began
            progress = progress.after(result, seconds)
            if writer is not None:
                writer.step(step, result, seconds)
            if result.stop or step == last or (interval and step % interval == 0):
                folder = save_checkpoint(files, training, progress)
            if result.stop and step < last:  # a request in the last step changes nothing
                stopped_by = stop_request.reason or "a signal to another rank"
        return None if writer is None else writer.summary(progress, folder, stopped_by, corpus)


def _warm_up_connections(training: TrainingModel) -> None:
    """Let devices connect before the first step, as for rows of one document; connections that only other rows need are
    made when these come."""
    world, settings = training.world, training.world.settings
    if world.device.type == "cpu":
        return
    algorithm, options = settings.context_parallel_suite.algorithm, training_plan_options(settings)
    for pooled in (False,) if world.pool is None else (True, False):
        topology, _ = world.plan_ranks(pooled)
        if topology.ranks > 1:
            rows = Documents([settings.data.seq_length] * (world.replicas if pooled else 1))
            plan = build_plan(rows, topology, training.attentions[0], algorithm, **options)
            warm_up(plan, world.plan_group(pooled), world.device)


@contextmanager
def _traced(training: TrainingModel, files: RunFiles, step: int) -> Iterator[None]:
    """Write what torch.profiler sees of a step within the block, a file of each rank for ui.perfetto.dev, if
    output.trace_steps names the step."""
    world = training.world
    if step not in (world.settings.output.trace_steps or ()):
        yield
        return
    with torch.profiler.profile() as profiler:
        yield
    path = files.folder / "trace" / f"step-{step:07d}-rank-{world.rank}.json"
    path.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(path))
