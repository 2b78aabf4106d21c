"""The steps of a run: batches in, optimizer steps, metrics and checkpoints out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_cp.algorithms import AUTO, build_plan
from mindspeed_cp.comm import warm_up
from mindspeed_cp.config.candidates import candidate_settings
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import PackedStream, check_learnable, open_corpus
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.megatron import check_tokens_per_step
from mindspeed_cp.train import checkpoint
from mindspeed_cp.train.comparison import compare_algorithms
from mindspeed_cp.train.dispatch import make_dispatcher
from mindspeed_cp.train.metrics_writer import MetricsWriter
from mindspeed_cp.train.micro_batch_loader import MicroBatchLoader
from mindspeed_cp.train.model import TrainingModel, build_training_model
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.run_files import RunFiles
from mindspeed_cp.train.step import run_step
from mindspeed_cp.train.step_trace import StepTracer
from mindspeed_cp.train.stop_request import StopRequest
from mindspeed_cp.train.summary import summarize_run
from mindspeed_cp.train.world import World


@dataclass(frozen=True)
class _Run:
    """What all steps of a run use; `writer` is None except on the first rank."""

    settings: Settings
    world: World
    training: TrainingModel
    files: RunFiles
    stop_request: StopRequest
    writer: MetricsWriter | None


def train(settings: Settings, world: World) -> dict[str, Any] | None:
    """Train until train.train_iters, or until asked to stop.

    Returns:
        The summary on the first rank, which is also in summary.json; None on the others.

    Raises:
        ConfigError: A setting cannot be used (`algorithm: auto` must be resolved first, by
            algorithm_choice.resolve_auto), or the loss is not finite (all ranks raise it).
        PeerError: Another rank died.
        Stopped: The rank was asked to stop while a batch did not come.
    """
    if settings.context_parallel_suite.algorithm == AUTO:  # process groups depend on it, and exist already
        raise ConfigError(
            "context_parallel_suite.algorithm is 'auto': give "
            "mindspeed_cp.train.algorithm_choice.resolve_auto(settings)"
        )
    files = RunFiles(Path(settings.output.folder))
    with ExitStack() as stack:
        if world.is_first:
            files.create()
            stack.enter_context(files.locked())
        world.barrier()
        corpus = open_corpus(settings.data.corpus)
        check_learnable(corpus, settings.data.corpus)
        context, rows = settings.data.seq_length, settings.train.global_batch_size
        check_tokens_per_step(rows * context)

        def open_stream() -> PackedStream:
            return PackedStream(corpus, context, settings.train.seed, world.replica, world.replicas)

        stream = open_stream()
        stack.enter_context(_deterministic(settings.train.deterministic_mode))
        training = build_training_model(settings, world)
        _warm_up_connections(settings, world, training)
        progress, folder, notes = checkpoint.resume(settings, training, world)
        if progress.data is not None:
            stream.load_state_dict(progress.data)
        stop_request = stack.enter_context(StopRequest())
        dispatcher = make_dispatcher(settings, training.attentions, world)
        tracer = stack.enter_context(StepTracer(settings, world, training, files, progress.step))
        writer = None
        if world.is_first:
            writer = MetricsWriter(files, settings, progress, training.parameters, world.device)
            stack.callback(writer.close)
            for note in notes:
                writer.note(note)
        if settings.train.compare and folder is None:
            if writer is not None:
                writer.note("Comparing algorithms before training (train.compare)")
            comparison = compare_algorithms(settings, world, training, open_stream, dispatcher, stop_request)
            if writer is not None:
                writer.comparison(comparison)
        run = _Run(settings, world, training, files, stop_request, writer)
        with MicroBatchLoader(stream, dispatcher, settings, training.attentions, world, stop_request) as batches:
            progress, saved, stopped_by = _run_steps(run, batches, progress, tracer)
    if writer is None:
        return None
    return summarize_run(settings, files, writer.lines, progress, writer.first_step, saved, stopped_by, corpus)


def _warm_up_connections(settings: Settings, world: World, training: TrainingModel) -> None:
    """Let devices connect before the first step.

    The connections are those of a row that is one document and, where a window skips ranks, of shorter documents, which
    reach over more ranks. Connections that only other rows need are made when these come.
    """
    if world.device.type == "cpu" or world.cp_size == 1:
        return
    suite = settings.context_parallel_suite
    cases = [
        (attention, variant)
        for attention in dict.fromkeys(training.attentions)
        for variant in candidate_settings(settings)
    ]
    for attention, variant in cases:
        length = settings.data.seq_length
        while True:
            row, algorithm = Documents([length]), variant.context_parallel_suite.algorithm
            plan = build_plan(row, suite.topology, attention, algorithm, **variant.plan_options)
            warm_up(plan, world.cp_group, world.device)
            length //= 2
            if attention.window is None or length < 2 * world.cp_size:
                break


def _run_steps(
    run: _Run, batches: MicroBatchLoader, progress: Progress, tracer: StepTracer
) -> tuple[Progress, Path | None, str | None]:
    """Run all remaining steps; return the progress, the newest checkpoint and the reason for an early stop."""
    settings, world, writer = run.settings, run.world, run.writer
    interval, last = settings.checkpoint.save_interval, settings.train.train_iters
    compare_digests = settings.context_parallel_suite.verify_plans
    saved: Path | None = run.files.checkpoint(progress.step) if progress.step else None
    while progress.step < last:
        with tracer.step(progress.step + 1, batches) as step_batches:
            began = time.perf_counter()
            result = run_step(run.training, step_batches, progress.step + 1, world, run.stop_request, compare_digests)
            seconds = time.perf_counter() - began
        progress = replace(
            progress,
            step=progress.step + 1,
            tokens=progress.tokens + result.tokens,
            seconds=progress.seconds + seconds,
            data=result.data,
        )
        if writer is not None:
            writer.step(progress.step, result, seconds)
        if result.stop or progress.step == last or (interval and progress.step % interval == 0):
            saved = checkpoint.save(run.files, run.training, progress, settings, world)
            if writer is not None:
                writer.draw()
        if result.stop and progress.step < last:  # a request in the last step changes nothing
            return progress, saved, run.stop_request.reason or "a signal to another rank"
    return progress, saved, None


@contextmanager
def _deterministic(required: bool) -> Iterator[None]:
    """Make torch use deterministic algorithms within the block, and refuse operators that have none."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(before or required, warn_only=warns and not required)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
