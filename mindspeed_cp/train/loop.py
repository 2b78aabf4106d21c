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
from mindspeed_cp.config.derived import training_corpus, training_plan_options
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import PackedStream, TrajectoryCorpus, check_learnable, corpus_digests, open_stream
from mindspeed_cp.errors import ConfigError, CorruptionError, DivergenceError, PeerError
from mindspeed_cp.layout import Documents
from mindspeed_cp.megatron import check_tokens_per_step
from mindspeed_cp.schema.messages import name_ranks
from mindspeed_cp.train.attention_canary import canary_of_step
from mindspeed_cp.train.bad_steps import BadStepPolicy, with_loss
from mindspeed_cp.train.checkpoint_folder import check_place
from mindspeed_cp.train.checkpoint_loading import resume
from mindspeed_cp.train.checkpoint_saver import CheckpointSaver
from mindspeed_cp.train.comparison import run_comparison
from mindspeed_cp.train.data_checks import check_same_start
from mindspeed_cp.train.dispatch import make_dispatcher
from mindspeed_cp.train.hang_watch import HangWatch
from mindspeed_cp.train.metrics_writer import MetricsWriter
from mindspeed_cp.train.micro_batch_loader import MicroBatchLoader
from mindspeed_cp.train.model import TrainingModel, build_training_model
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.queue_probe import QueueProbe
from mindspeed_cp.train.replica_digest import ReplicaCheck
from mindspeed_cp.train.run_files import RunFiles
from mindspeed_cp.train.step import StepChecks, StepResult, run_step
from mindspeed_cp.train.step_trace import StepTracer
from mindspeed_cp.train.stop_request import StopRequest
from mindspeed_cp.train.stragglers import ComputeProbe
from mindspeed_cp.train.summary import summarize_run
from mindspeed_cp.train.tensorboard_writer import check_tensorboard
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
    hang_watch: HangWatch

    def note(self, text: str) -> None:
        """Show a line; on the first rank."""
        if self.writer is not None:
            self.writer.note(text)


def train(settings: Settings, world: World) -> dict[str, Any] | None:
    """Train until train.train_iters, or until asked to stop.

    Returns:
        The summary on the first rank, which is also in summary.json; None on the others.

    Raises:
        ConfigError: A setting cannot be used (`algorithm: auto` must be resolved first, by
            algorithm_choice.resolve_auto).
        CorruptionError: Replicas differ, or attention is not what the reference computes (all ranks raise it).
        DivergenceError: The loss or the gradient is not finite, or the loss is a spike, and the policy is to stop (all
            ranks raise it).
        PeerError: Another rank died.
        Stopped: The rank was asked to stop while a batch did not come.
    """
    if settings.context_parallel_suite.algorithm == AUTO:  # process groups depend on it, and exist already
        raise ConfigError(
            "context_parallel_suite.algorithm is 'auto': give "
            "mindspeed_cp.train.algorithm_choice.resolve_auto(settings)"
        )
    check_tensorboard(settings)
    files = RunFiles(Path(settings.output.folder))
    with ExitStack() as stack:
        if world.is_first:
            files.create()
            stack.enter_context(files.locked())
        world.barrier()
        corpus = training_corpus(settings)
        check_learnable(corpus, settings.data.corpus)
        contents = corpus_digests(corpus)
        check_same_start(settings, world, corpus, contents)
        context, rows = settings.data.seq_length, settings.train.global_batch_size
        repeats = corpus.most_repeated if isinstance(corpus, TrajectoryCorpus) else 1
        check_tokens_per_step(rows * context * repeats)

        def new_stream() -> PackedStream:
            return open_stream(corpus, context, settings.train.seed, world.replica, world.replicas, contents=contents)

        stream = new_stream()
        stack.enter_context(_deterministic(settings.train.deterministic_mode))
        training = build_training_model(settings, world)
        stack.enter_context(training.fused.applied())
        _warm_up_connections(settings, world, training)
        check_place(settings, world)
        progress, folder, notes = resume(settings, training, world)
        if folder is not None:
            progress = replace(progress, restarts=progress.restarts + 1)
        if progress.data is not None:
            stream.load_state_dict(progress.data)
            if "contents" not in progress.data:
                notes.append(
                    f"{folder}: was written before contents of corpora were compared, so data.corpus is compared by "
                    "its lengths only"
                )
        stop_request = stack.enter_context(StopRequest())
        dispatcher = make_dispatcher(settings, training.attentions, world, corpus)
        tracer = stack.enter_context(StepTracer(settings, world, training, files, progress.step))
        writer = None
        if world.is_first:
            writer = MetricsWriter(files, settings, progress, training.parameters, world.device)
            stack.callback(writer.close)
            for note in filter(None, (training.fused.note(), *notes)):
                writer.note(note)
        if settings.train.compare and folder is None:
            if writer is not None:
                writer.note("Comparing algorithms before training (train.compare)")
            comparison = run_comparison(settings, world, training, new_stream, dispatcher, stop_request)
            if writer is not None:
                writer.comparison(comparison)
        hang_watch = stack.enter_context(HangWatch(world.rank, settings.context_parallel_suite.timeout_seconds))
        run = _Run(settings, world, training, files, stop_request, writer, hang_watch)
        with MicroBatchLoader(stream, dispatcher, settings, training.attentions, world, stop_request) as batches:
            progress, saved, stopped_by = _run_steps(run, batches, progress, tracer)
    if writer is None:
        return None
    return summarize_run(settings, files, progress, writer.first_step, saved, stopped_by, corpus)


def _warm_up_connections(settings: Settings, world: World, training: TrainingModel) -> None:
    """Let devices connect before the first step.

    The connections are those of a row that is one document and, where a window skips ranks, of shorter documents, which
    reach over more ranks. Connections that only other rows need are made when these come.
    """
    if world.device.type == "cpu":
        return
    if world.pool is not None and world.pool.ranks > 1:
        algorithm, options = settings.context_parallel_suite.algorithm, training_plan_options(settings)
        # Of several pools; one of all ranks, which few steps are on then, connects when it first comes.
        pools = 1 if world.subpools is None else world.subpools.count
        rows = Documents([settings.data.seq_length] * world.replicas_of_plan(pools))
        plan = build_plan(rows, world.pool_topology(pools), training.attentions[0], algorithm, **options)
        warm_up(plan, world.plan_group(pools), world.device)
    if world.cp_size == 1:
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
            plan = build_plan(row, suite.topology, attention, algorithm, **training_plan_options(variant))
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
    # Ranks that choose differently between pools and replicas would wait for each other.
    compare_digests = settings.context_parallel_suite.verify_plans or world.pool is not None
    policy = BadStepPolicy(settings)
    newest = run.files.checkpoint(progress.step) if progress.step else None
    saver = CheckpointSaver(run.files, run.training, settings, world, newest)
    probe, queue = ComputeProbe(world.device), QueueProbe(world.device, world.rank)
    replicas = ReplicaCheck(run.training, world, progress.step)
    replicas_interval = settings.train.check_weight_hash_across_dp_replicas_interval
    try:
        while progress.step < last:
            step = progress.step + 1
            with run.hang_watch.step(step), tracer.step(step, batches) as step_batches:
                began = time.perf_counter()
                checks = StepChecks(compare_digests, canary_of_step(settings, step), probe.seconds(), queue)
                result = run_step(
                    run.training, step_batches, step, world, run.stop_request, checks, policy, progress.losses
                )
                seconds = time.perf_counter() - began
            if result.action == "rollback":
                saver.finish()
                progress = _roll_back(run, policy, progress, result)
                saver.newest = run.files.checkpoint(progress.step)
                replicas.agreed_step = progress.step
                continue
            skipped = result.action == "skip"
            progress = replace(
                progress,
                step=step,
                tokens=progress.tokens + result.tokens,
                seconds=progress.seconds + seconds,
                data=result.data,
                losses=progress.losses if skipped else with_loss(progress.losses, result.loss),
                spike=result.problem is not None and not skipped,
                skipped_steps=progress.skipped_steps + skipped,
            )
            if writer is not None:
                writer.step(step, result, seconds)
            if result.problem is not None:
                run.note(f"step {step}: {result.problem}{'; its update was left out' if skipped else ''}")
            saves = result.stop or step == last or (interval and step % interval == 0)
            if replicas_interval and (saves or step % replicas_interval == 0):
                replicas(step, saver.newest.name if saver.newest else None)
            if saves:
                saver.save(progress)
                if progress.spike:
                    stays = saver.newest.name if saver.newest else "none"
                    run.note(f"the checkpoint of step {step} is that of a spike: `latest` stays at {stays}")
                if writer is not None:
                    writer.draw()
            else:
                saver.finish_if_written()
            if result.stop and progress.step < last:  # a request in the last step changes nothing
                saved = saver.close()
                if result.orphans and run.stop_request.reason is None:
                    raise PeerError(
                        f"rank {world.rank}: the launcher of {name_ranks(result.orphans)} was killed; all ranks "
                        f"stopped after step {step}, and {saved.name if saved else 'nothing'} is the newest checkpoint"
                    )
                return progress, saved, run.stop_request.reason or "a signal to another rank"
    except (CorruptionError, DivergenceError):  # all ranks raise these, so they can complete what is written
        saver.finish()
        raise
    return progress, saver.close(), None


def _roll_back(run: _Run, policy: BadStepPolicy, progress: Progress, result: StepResult) -> Progress:
    """Load the newest checkpoint; return its progress, with the data stream behind the bad step.

    Raises:
        DivergenceError: there is none, or the run went back to it too often.
    """
    bad, problem = progress.step + 1, result.problem or ""
    own = run.settings.checkpoint.model_copy(update={"resume": True})  # the run's own, also after --no-resume
    loaded, folder, notes = resume(run.settings.model_copy(update={"checkpoint": own}), run.training, run.world)
    if folder is None:
        raise DivergenceError(f"step {bad}: {problem}; there is no checkpoint to go back to: lower train.lr")
    policy.rolled_back(bad, loaded.step, problem)
    for note in notes:
        run.note(note)
    text = (
        f"step {bad}: {problem}; went back to {folder.name}, and the batches of steps {loaded.step + 1} to {bad} are "
        "left out"
    )
    if run.writer is not None:
        run.writer.roll_back(loaded.step, text)
    run.note(text)
    return replace(
        loaded,
        data=result.data,
        restarts=progress.restarts,
        rollbacks=progress.rollbacks + 1,
        skipped_steps=progress.skipped_steps,
    )


@contextmanager
def _deterministic(required: bool) -> Iterator[None]:
    """Make torch use deterministic algorithms within the block, and refuse operators that have none."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(before or required, warn_only=warns and not required)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
