"""The steps of a run: batches in, optimizer steps, metrics and checkpoints out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_cp.comm import warm_up
from mindspeed_cp.config import Settings
from mindspeed_cp.config_variants import variants
from mindspeed_cp.data import PackedStream, check_learnable, open_corpus
from mindspeed_cp.devices import cann_version, unknown_cann
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.megatron import check_tokens_per_step
from mindspeed_cp.plan import AUTO, build_plan
from mindspeed_cp.report.loss import draw_loss
from mindspeed_cp.train import checkpoint
from mindspeed_cp.train.batches import Batches
from mindspeed_cp.train.checkpoint import Progress
from mindspeed_cp.train.dealing import make_dealer
from mindspeed_cp.train.display import open_display
from mindspeed_cp.train.files import RunFiles, keep_metrics, write_text
from mindspeed_cp.train.identity import complete_note, other_settings_note
from mindspeed_cp.train.measured import Tracer
from mindspeed_cp.train.model import Parts, build
from mindspeed_cp.train.resume import checkpoint_to_resume
from mindspeed_cp.train.step import StepResult, run_step
from mindspeed_cp.train.stop import StopRequest
from mindspeed_cp.train.summary import summarize_run
from mindspeed_cp.train.world import World, unused_device


def train(settings: Settings, world: World) -> dict[str, Any] | None:
    """Train until train.train_iters, or until asked to stop.

    Returns:
        On the first rank the summary, which is also in summary.json; None on the others.

    Raises:
        ConfigError: a setting cannot be used (algorithm: auto needs :func:`.auto.resolved` first), or the loss is no
            number (all ranks raise it).
        PeerError: another rank died.
        Stopped: asked to stop while a batch did not come.
    """
    if settings.context_parallel_suite.algorithm == AUTO:  # groups of ranks depend on it, and are there already
        raise ConfigError("context_parallel_suite.algorithm is 'auto': give mindspeed_cp.train.auto.resolved(settings)")
    files = RunFiles(Path(settings.output.folder))
    with ExitStack() as stack:
        if world.is_first:
            files.make()
            stack.enter_context(files.locked())
        world.barrier()
        corpus = open_corpus(settings.data.corpus)
        check_learnable(corpus, settings.data.corpus)
        context, rows = settings.data.seq_length, settings.train.global_batch_size
        check_tokens_per_step(rows * context)
        stream = PackedStream(corpus, context, settings.train.seed, world.replica, world.replicas)
        folder = checkpoint_to_resume(settings)
        stack.enter_context(_deterministic(settings.train.deterministic_mode))
        parts = build(settings, world)
        _connect(settings, world, parts)
        progress = checkpoint.load(folder, parts, world) if folder is not None else Progress()
        if progress.data is not None:
            stream.load_state_dict(progress.data)
        stop = stack.enter_context(StopRequest())
        dealer = make_dealer(settings, parts.attentions, world)
        batches = stack.enter_context(Batches(stream, dealer, settings, parts.attentions, world, stop))
        tracer = stack.enter_context(Tracer(settings, world, parts, files, progress.step))
        writer = _Writer(files, settings, progress, parts.parameters, world.device) if world.is_first else None
        try:
            progress, saved, reason = _steps(settings, world, parts, batches, progress, stop, writer, files, tracer)
        finally:
            if writer is not None:
                writer.close()
        if writer is None:
            return None
        return summarize_run(settings, files, writer.lines, progress, writer.first_step, saved, reason, corpus)


def _connect(settings: Settings, world: World, parts: Parts) -> None:
    """Let devices connect before the first step: over the edges of a row that is one document and, where a window skips
    ranks, of shorter documents, which reach over more of them. Edges that only other rows have are made when they
    come."""
    if world.device.type == "cpu" or world.cp == 1:
        return
    suite = settings.context_parallel_suite
    kinds = [(attention, one) for attention in dict.fromkeys(parts.attentions) for one in variants(settings)]
    for attention, one in kinds:
        length = settings.data.seq_length
        while True:
            row, algorithm = Documents([length]), one.context_parallel_suite.algorithm
            plan = build_plan(row, suite.topology, attention, algorithm, **one.plan_options)
            warm_up(plan, world.cp_group, world.device)
            length //= 2
            if attention.window is None or length < 2 * world.cp:
                break


def _steps(
    settings: Settings,
    world: World,
    parts: Parts,
    batches: Batches,
    progress: Progress,
    stop: StopRequest,
    writer: _Writer | None,
    files: RunFiles,
    tracer: Tracer,
) -> tuple[Progress, Path | None, str | None]:
    """All steps that are left.  Returns where the run stands, its newest checkpoint and why it stopped early."""
    interval, last = settings.checkpoint.save_interval, settings.train.train_iters
    checked = settings.context_parallel_suite.verify_plans
    saved: Path | None = files.checkpoint(progress.step) if progress.step else None
    while progress.step < last:
        with tracer.step(progress.step + 1, batches) as taken:
            began = time.perf_counter()
            result = run_step(parts, taken, progress.step + 1, world, stop, checked)
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
            saved = checkpoint.save(files, parts, progress, settings, world)
            if writer is not None:
                writer.draw()
        if result.stop and progress.step < last:  # a request in the last step changes nothing
            return progress, saved, stop.reason or "a signal to another rank"
    return progress, saved, None


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Within the block torch takes algorithms that give the same bits every time, and refuses what has none."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(before or wanted, warn_only=warns and not wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


class _Writer:
    """What the first rank writes and shows for each step."""

    def __init__(
        self, files: RunFiles, settings: Settings, progress: Progress, parameters: int, device: torch.device
    ) -> None:
        self._files, self._settings = files, settings
        self.first_step = progress.step
        self.lines = keep_metrics(files.metrics, progress.step)
        self._file = files.metrics.open("a", encoding="utf-8")
        complete = progress.step >= settings.train.train_iters
        self._has_settings = False  # written after the first step: a start that fails before leaves settings.yaml alone
        other = other_settings_note(files.settings, settings) if progress.step else None
        self._display = open_display(
            settings.output.progress, progress.step, settings.train.train_iters, settings.output.log_interval
        )
        suite = settings.context_parallel_suite
        algorithms = ", or by row ".join((suite.algorithm, *(suite.also or ())))
        resumed = f", resumed after step {progress.step}" if progress.step else ""
        self._display.note(
            f"{parameters:,} parameters, context {settings.data.seq_length:,} over {suite.context_parallel_size} ranks "
            f"({algorithms}) on {device.type}{resumed}"
        )
        if other is not None:
            self._display.note(other)
        if complete:
            self._display.note(complete_note(files, settings))
        unknown = unknown_cann(cann_version()) if device.type == "npu" else None
        if unknown is not None:
            self._display.note(unknown)
        unused = unused_device(device)
        if unused is not None:
            self._display.note(f"{unused} was found but is not used: this version trains on the CPU or an NPU")

    def step(self, step: int, result: StepResult, seconds: float) -> None:
        line: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "tokens_per_s": result.tokens / seconds,
            "imbalance": result.imbalance,
            "seconds": seconds,
            "documents": result.documents,
            "replica_imbalance": result.replica_imbalance,
            "planning_seconds": result.planning,
            "waiting_seconds": result.waiting,
            "plans": result.plans,
            "known_plans": result.known,
        }
        if self._settings.context_parallel_suite.also:
            line["algorithms"] = result.algorithms  # of the first replica's rows
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if not self._has_settings:
            write_text(self._files.settings, _as_yaml(self._settings))
            self._has_settings = True
        self._display.step(line)

    def draw(self) -> None:
        draw_loss(self.lines, self._files.loss_png, self._files.folder.name)

    def close(self) -> None:
        self._display.close()
        self._file.close()


def _as_yaml(settings: Settings) -> str:
    import yaml

    return yaml.safe_dump(settings.model_dump(), sort_keys=False)
