"""Comparison of algorithms before a training (train.compare): the same first batches with each of them.

Every algorithm plans the first global batches and runs forward and backward on them; weights, optimizer and data
stream of the training stay as they are, so the training gives the same bits with and without it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from mindspeed_cp.config.candidates import compared_algorithms, compared_settings
from mindspeed_cp.data.dispatch import Dispatcher
from mindspeed_cp.data.stream import PackedStream
from mindspeed_cp.errors import DivergenceError
from mindspeed_cp.plan import Plan, traffic
from mindspeed_cp.report.text import Table, format_bytes
from mindspeed_cp.train.checks import QueueProbe
from mindspeed_cp.train.failures import StopRequest
from mindspeed_cp.train.micro_batch_loader import MicroBatch, MicroBatchLoader
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.step import StepResult, forward_backward

STEPS = 3  # global batches that are compared; one more at the start is not timed


def run_comparison(
    training: TrainingModel,
    open_stream: Callable[[], PackedStream],
    dispatcher: Dispatcher,
    stop_request: StopRequest,
) -> dict[str, Any]:
    """Run the first batches of a training with each algorithm of train.compare and with its own; all ranks call it.

    Args:
        training: the model; its weights are not changed.
        open_stream: returns a new stream at the first batch.
        dispatcher: that of the training, so that all algorithms compute the same micro-batches.
        stop_request: ends the comparison early, without the algorithms that did not finish.

    Returns:
        For summary.json: `batches`, and `algorithms`, a list of mappings, the run's own last: algorithm, loss,
        imbalance, sent_bytes (of all ranks for attention in one step), seconds (forward and backward of one step).
    """
    world = training.world
    *others, own = compared_algorithms(world.settings)
    results: list[dict[str, Any]] = []
    for word in (*others, own):
        settings = world.settings if word == own else compared_settings(world.settings, word)
        variant = replace(training, world=replace(world, settings=settings))
        with MicroBatchLoader(variant, open_stream(), dispatcher) as loader:
            result = _run(word, loader, variant, stop_request)
        if result is None:
            break
        results.append(result)
    training.ddp_model.zero_grad_buffer()
    return {"batches": STEPS, "algorithms": results}


def _run(
    word: str, loader: MicroBatchLoader, training: TrainingModel, stop_request: StopRequest
) -> dict[str, Any] | None:
    """Return the figures of one algorithm; None if a rank was asked to stop."""
    world, queue = training.world, QueueProbe(training.world.device, training.world.rank)
    planned: list[tuple[tuple[Plan, ...], int]] = []
    steps: list[tuple[StepResult, float]] = []

    def watched() -> Iterator[MicroBatch]:
        for micro in loader:
            planned.append((micro.params.plans, micro.params.rank))
            yield micro

    for step in range(STEPS + 1):
        if step == 1:
            planned.clear()
        world.barrier()
        began = time.perf_counter()
        sums = forward_backward(training, watched(), step, stop_request, queue)
        if world.device.type != "cpu":
            torch.get_device_module(world.device).synchronize()
        steps.append((sums, time.perf_counter() - began))
        if sums.nonfinite is not None:
            raise DivergenceError(f"train.compare: batch {step} with {word}: {sums.nonfinite}")
        if sums.stop:
            return None
    element, layers = 2 if world.settings.train.bf16 else 4, Counter(training.attentions).values()
    sent = sum(
        float(traffic(plan, element)["total"][rank]) * count
        for plans, rank in planned
        for plan, count in zip(plans, layers, strict=True)
    )
    return {
        "algorithm": word,
        "loss": mean(sums.loss for sums, _ in steps[1:]),
        "imbalance": mean(sums.figures["imbalance"] for sums, _ in steps[1:]),
        "sent_bytes": float(world.gather([sent]).sum()) / STEPS,
        "seconds": mean(seconds for _, seconds in steps[1:]),
    }


def comparison_table(comparison: dict[str, Any]) -> Table:
    """Return the comparison as a table."""
    rows = tuple(
        (
            row["algorithm"],
            f"{row['loss']:.4f}",
            f"{row['imbalance']:.3f}",
            format_bytes(row["sent_bytes"]),
            f"{row['seconds'] * 1e3:,.0f}",
        )
        for row in comparison["algorithms"]
    )
    title = f"The same {STEPS} batches, forward and backward, with each algorithm"
    return Table(title, ("algorithm", "loss", "imbalance", "sent/step", "ms/step"), rows)
