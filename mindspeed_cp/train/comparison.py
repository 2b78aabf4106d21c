"""Comparison of algorithms before a training (train.compare): the same first batches with each of them.

Every algorithm plans the first global batches and runs forward and backward on them; weights, optimizer and data
stream of the training stay as they are, so the training gives the same bits with and without it.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
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
from mindspeed_cp.train.step import forward_backward

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
        stop_request: ends the comparison early.

    Returns:
        For summary.json: `batches`, `documents` (lengths of the timed batches' documents on this replica),
        `one_machine` (true if all ranks share a machine), and `algorithms`, a list of mappings, the run's own last:
        algorithm, loss, imbalance, sent_bytes (of all ranks for attention in one step), seconds (forward and backward
        of one step).
    """
    world = training.world
    *others, own = compared_algorithms(world.settings)
    results: list[dict[str, Any]] = []
    lengths: list[int] = []
    for word in (*others, own):
        settings = world.settings if word == own else compared_settings(world.settings, word)
        variant = replace(training, world=replace(world, settings=settings))
        with MicroBatchLoader(variant, open_stream(), dispatcher, stop_request) as loader:
            result, lengths, stop = _run(word, loader, variant, stop_request)
        results.append({**result, "loss": None} if stop else result)
        if stop:
            break
    training.ddp_model.zero_grad_buffer()
    one_machine = len(set(world.gather_objects(socket.gethostname()))) == 1
    return {"batches": STEPS, "documents": lengths, "one_machine": one_machine, "algorithms": results}


def _run(
    word: str, loader: MicroBatchLoader, training: TrainingModel, stop_request: StopRequest
) -> tuple[dict[str, Any], list[int], bool]:
    """Return the figures of one algorithm, the documents that it computed, and whether a rank was asked to stop."""
    world, queue, stop = training.world, QueueProbe(training.world.device, training.world.rank), False
    losses, imbalances, seconds, planned = [], [], [], list[tuple[tuple[Plan, ...], int]]()

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
        if sums.nonfinite is not None:
            raise DivergenceError(f"train.compare: batch {step} with {word}: {sums.nonfinite}")
        if world.device.type != "cpu":
            torch.get_device_module(world.device).synchronize()
        seconds.append(time.perf_counter() - began)
        stop = sums.stop
        if step:
            losses.append(sums.loss)
            imbalances.append(sums.figures["imbalance"])
        if stop:
            break
    element, layers = 2 if world.settings.train.bf16 else 4, Counter(training.attentions).values()
    sent = sum(
        float(traffic(plan, element)["total"][rank]) * count
        for plans, rank in planned
        for plan, count in zip(plans, layers, strict=True)
    )
    lengths = [length for plans, _ in planned for length in plans[0].documents.lengths.tolist()]
    result = {
        "algorithm": word,
        "loss": float(np.mean(losses)) if losses else None,
        "imbalance": float(np.mean(imbalances)) if losses else None,
        "sent_bytes": float(world.gather([sent]).sum()) / max(1, len(losses)),
        "seconds": float(np.mean(seconds[1:] or seconds)),
    }
    return result, [length for length in lengths if length], stop


def comparison_table(comparison: dict[str, Any]) -> Table:
    """Return the comparison as a table; figures that a stop before its end left out are dashes."""
    lengths = comparison["documents"]
    sizes = f" ({len(lengths):,} documents of {min(lengths):,} to {max(lengths):,} tokens)" if lengths else ""
    title = f"The same {comparison['batches']} batches, forward and backward, with each algorithm{sizes}"
    rows = tuple(
        (
            row["algorithm"],
            *("-" if row[key] is None else f"{row[key]:.{digits}f}" for key, digits in (("loss", 4), ("imbalance", 3))),
            format_bytes(row["sent_bytes"]),
            f"{row['seconds'] * 1e3:,.0f}",
        )
        for row in comparison["algorithms"]
    )
    return Table(title, ("algorithm", "loss", "imbalance", "sent/step", "ms/step"), rows)


def comparison_sentence(comparison: dict[str, Any]) -> str | None:
    """Return what the run's algorithm did better than the first compared one, and what not; None without figures."""
    base, own = comparison["algorithms"][0], comparison["algorithms"][-1]
    if own["loss"] is None or base is own:
        return None
    sent, base_sent = own["sent_bytes"], base["sent_bytes"]
    share = f" ({abs(1 - sent / base_sent):.0%} {'less' if sent < base_sent else 'more'})" if base_sent else ""
    one_machine = " (its ranks share a machine, without slow links on which fewer bytes save time)"
    return (
        f"On these documents {own['algorithm']} sent {format_bytes(sent)} in a step and {base['algorithm']} "
        f"{format_bytes(base_sent)}{share}; its imbalance is {own['imbalance']:.3f} against {base['imbalance']:.3f}, "
        f"its step takes {own['seconds'] * 1e3:,.0f} ms against {base['seconds'] * 1e3:,.0f}"
        f"{one_machine * comparison['one_machine']}."
    )
