"""Comparison of algorithms before a training (train.compare): the same first batches with each of them.

Every algorithm plans the first global batches and runs forward and backward on them; weights, optimizer and data
stream of the training stay as they are, so the training gives the same bits with and without it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from mindspeed_cp.config.candidates import compared_algorithms, compared_settings
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import Dispatcher, PackedStream
from mindspeed_cp.engine.recorder import Recorder, recording
from mindspeed_cp.errors import DivergenceError
from mindspeed_cp.report.text import Table, format_bytes
from mindspeed_cp.train.failures import StopRequest
from mindspeed_cp.train.micro_batch_loader import MicroBatch, MicroBatchLoader
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.step import StepChecks, forward_backward
from mindspeed_cp.train.world import World

STEPS = 3  # global batches that are compared; one more at the start is not timed


def run_comparison(
    settings: Settings,
    world: World,
    training: TrainingModel,
    open_stream: Callable[[], PackedStream],
    dispatcher: Dispatcher,
    stop_request: StopRequest,
) -> dict[str, Any]:
    """Run the first batches of a training with each algorithm of train.compare and with its own; all ranks call it.

    Args:
        settings: settings of the run.
        world: this rank among all.
        training: the model; its weights are not changed.
        open_stream: returns a new stream at the first batch.
        dispatcher: that of the training, so that all algorithms compute the same micro-batches.
        stop_request: ends the comparison early.

    Returns:
        For summary.json: `batches`, `documents` (lengths of the timed batches' documents on this replica),
        `one_machine` (true if all ranks share a machine), and `algorithms`, a list of mappings, the run's own last:
        algorithm, loss, imbalance, sent_bytes (of all ranks in one step), seconds (forward and backward of one step).
    """
    *others, own = compared_algorithms(settings)
    results: list[dict[str, Any]] = []
    lengths: list[int] = []
    for word in (*others, own):
        variant = settings if word == own else compared_settings(settings, word)
        with MicroBatchLoader(open_stream(), dispatcher, variant, training.attentions, world, stop_request) as loader:
            result, lengths, stop = _run(word, loader, world, training, stop_request)
        results.append({**result, "loss": None} if stop else result)
        if stop:
            break
    training.ddp_model.zero_grad_buffer()
    one_machine = len(set(world.gather_objects(socket.gethostname()))) == 1
    return {"batches": STEPS, "documents": lengths, "one_machine": one_machine, "algorithms": results}


def _run(
    word: str, loader: MicroBatchLoader, world: World, training: TrainingModel, stop_request: StopRequest
) -> tuple[dict[str, Any], list[int], bool]:
    """Return the figures of one algorithm, the documents that it computed, and whether a rank was asked to stop."""
    losses, imbalances, seconds, sent, lengths = [], [], [], 0.0, list[int]()

    def watched() -> Iterator[MicroBatch]:
        for micro in loader:
            assert micro.params.plan is not None
            lengths.extend(micro.params.plan.documents.lengths.tolist())
            yield micro

    stop = False
    for step in range(STEPS + 1):
        if step == 1:
            lengths.clear()
        world.barrier()
        recorder = Recorder(world.device)
        began = time.perf_counter()
        with recording(recorder):
            sums = forward_backward(training, watched(), step, world, stop_request, StepChecks())
            if sums.nonfinite is not None:
                raise DivergenceError(f"train.compare: batch {step} with {word}: {sums.nonfinite}")
        if world.device.type != "cpu":
            torch.get_device_module(world.device).synchronize()
        seconds.append(time.perf_counter() - began)
        stop = sums.stop
        bytes_sent = float(sum(message.bytes for message in recorder.read().messages if message.sends))
        if step:
            losses.append(sums.loss)
            imbalances.append(sums.figures["imbalance"])
            sent += float(world.gather([bytes_sent]).sum())
        if stop:
            break
    count = max(1, len(losses))
    result = {
        "algorithm": word,
        "loss": float(np.mean(losses)) if losses else None,
        "imbalance": float(np.mean(imbalances)) if losses else None,
        "sent_bytes": sent / count,
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
