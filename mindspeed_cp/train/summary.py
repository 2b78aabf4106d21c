"""The summary of a run: summary.json, and the table and sentences at its end."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from mindspeed_cp.config.data import POOL
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import FileCorpus, TrajectoryCorpus
from mindspeed_cp.report.text import Table, format_count
from mindspeed_cp.train.checkpoint import Progress
from mindspeed_cp.train.comparison import comparison_sentence
from mindspeed_cp.train.run_files import RunFiles, iter_metrics, write_json

#: What is summed over the lines of metrics.jsonl; a line that lacks some of it, or was changed by hand, is left out.
_SUMS = ("tokens", "seconds", "documents", "planning_seconds", "plans", "cached_plans")
_WEIGHTED = ("imbalance", "replica_imbalance")  # by tokens
LAST_STEPS = 10  # averaged, because the loss of a single step depends on its documents


def summarize_run(
    settings: Settings,
    files: RunFiles,
    progress: Progress,
    first_step: int,
    saved: Path | None,
    stopped_by: str | None,
    corpus: FileCorpus | TrajectoryCorpus,
) -> dict[str, Any]:
    """Write summary.json and return its content.

    Args:
        settings: settings of the run.
        files: files of the run.
        progress: state after the last step.
        first_step: number of steps done before this start.
        saved: folder of the newest checkpoint.
        stopped_by: reason for a stop before the last step, or None.
        corpus: the training documents.
    """
    every: dict[str, float] = defaultdict(float)  # over all starts
    start: dict[str, float] = defaultdict(float)  # over the steps of this one
    first_loss, losses = None, deque[float](maxlen=LAST_STEPS)
    for line in iter_metrics(files.metrics):
        if not all(_is_figure(line.get(key)) for key in (*_SUMS, *_WEIGHTED, "waiting_seconds")):
            continue
        if _is_figure(line.get("loss")):  # a skipped step may have none
            first_loss = line["loss"] if first_loss is None else first_loss
            losses.append(line["loss"])
        for totals in (every, start) if line["step"] > first_step else (every,):
            # The first step's batch has nothing to be computed meanwhile.
            totals["waiting_seconds"] += line["waiting_seconds"] if totals["tokens"] else 0.0
            for key in _SUMS:
                totals[key] += line[key]
            for key in _WEIGHTED:
                totals[key] += line[key] * line["tokens"]
        every["flat_tokens"] += line.get("flat_tokens", line["tokens"])
        every["pool_choices"] += "pooled" in line
        every["pooled_steps"] += line.get("pooled", 0) > 0
    totals = start or every  # none: the run was complete
    tokens, seconds, context = totals["tokens"], totals["seconds"], settings.data.seq_length
    longer = corpus.lengths[corpus.lengths > context]
    summary = {
        "step": progress.step,
        "steps": settings.train.train_iters,
        "stopped_by": stopped_by,
        "first_loss": first_loss,
        "last_loss": sum(losses) / len(losses) if losses else None,
        "skipped_steps": progress.skipped_steps,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "tokens_per_s": tokens / seconds if seconds else None,
        **{key: totals[key] / tokens if tokens else None for key in _WEIGHTED},
        "planning_seconds": totals["planning_seconds"],
        "waiting_seconds": totals["waiting_seconds"],
        "plans": int(totals["plans"]),
        "cached_plans": int(totals["cached_plans"]),
        **({k: int(every[k]) for k in ("pooled_steps", "pool_choices")} if settings.data.balance == POOL else {}),
        "documents": int(every["documents"]),
        "corpus_documents": len(corpus),
        "flat_tokens": int(every["flat_tokens"]) if settings.data.trajectories else None,
        "cut_documents": len(longer),
        "document_chunks": int((-(-longer // context)).sum()),
        "context": context,
        "comparison": _read_comparison(files),
        "folder": str(files.folder),
        "metrics": str(files.metrics),
        "loss_png": str(files.loss_png) if files.loss_png.exists() else None,
        "checkpoint": str(saved) if saved else None,
    }
    write_json(files.summary, summary)
    return summary


def _read_comparison(files: RunFiles) -> dict[str, Any] | None:
    """Return the comparison of algorithms that this start or an earlier one made, or None."""
    try:
        return json.loads(files.comparison.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) < math.inf


def summary_table(summary: dict[str, Any]) -> Table:
    """Return the summary as a table for people."""
    s = summary
    rows = [("steps", f"{s['step']:,} of {s['steps']:,}")]
    if s["last_loss"] is not None:
        last = f"{s['last_loss']:.3f} on average in the last {min(LAST_STEPS, s['step'])}"
        rows.append(("loss", f"{s['first_loss']:.3f} in the first step, {last}"))
    rows.append(("tokens", f"{format_count(s['tokens'])} in {s['documents']:,} documents and chunks"))
    if s["tokens_per_s"] is not None:
        plans = f"{s['cached_plans']:,} of {s['plans']:,} plans were in the cache"
        rows += [
            ("speed", f"{s['tokens_per_s']:,.0f} tokens/s"),
            ("imbalance", f"{s['imbalance']:.3f} (attention work of the slowest rank / mean)"),
            ("replicas", f"{s['replica_imbalance']:.3f} (modelled time of the slowest replica / mean)"),
            (
                "planning",
                f"{s['planning_seconds']:,.2f} s ahead of the steps, which waited {s['waiting_seconds']:,.2f} s for "
                f"batches; {plans}",
            ),
        ]
    if "pooled_steps" in s:
        steps = f"{s['pool_choices']:,} step{'s' * (s['pool_choices'] != 1)}"
        rows.append(("pool", f"taken in {s['pooled_steps']:,} of {steps}, where it was modelled to be faster"))
    if s["flat_tokens"] is not None:
        less = f", {1 - s['tokens'] / s['flat_tokens']:.0%} less" if s["flat_tokens"] else ""
        text = f"{format_count(s['tokens'])} tokens were computed for {format_count(s['flat_tokens'])} of trajectories"
        rows.append(("trees", text + less))
    else:
        text = f"{s['cut_documents']:,} of {s['corpus_documents']:,} are longer than the context of {s['context']:,}"
        chunks = f", and become {s['document_chunks']:,} chunks" if s["cut_documents"] else ""
        rows.append(("cut documents", text + chunks))
    for key, name in (
        ("skipped_steps", "skipped steps"), ("metrics", "metrics"), ("loss_png", "curve"), ("checkpoint", "checkpoint"),
    ):  # fmt: skip
        if s[key]:
            rows.append((name, str(s[key])))
    return Table("Summary", ("", ""), tuple(rows))


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """Return the sentences below the table: what the comparison of algorithms showed, and why the run stopped."""
    comparison = summary["comparison"]
    lines = [comparison_sentence(comparison)] if comparison else []
    if summary["stopped_by"] is not None:
        lines.append(
            f"stopped by {summary['stopped_by']} after step {summary['step']}; the state is in "
            f"{summary['checkpoint']}, and the same command goes on from there"
        )
    return [line for line in lines if line is not None]
