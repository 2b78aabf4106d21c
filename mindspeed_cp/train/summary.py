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

#: What is averaged over the lines of metrics.jsonl; a line that lacks some of it, or was changed by hand, is left out.
_FIGURES = (
    *("tokens", "seconds", "imbalance", "documents", "waiting_seconds", "replica_imbalance"),
    *("planning_seconds", "plans", "cached_plans"),
)
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
    lines, start = _Totals(), _Totals()
    for line in iter_metrics(files.metrics):
        if all(_is_figure(line.get(key)) for key in _FIGURES):
            lines.add(line)
            if line["step"] > first_step:
                start.add(line)
    totals = start.sums if start.sums else lines.sums  # none: the run was complete
    seconds, tokens = totals["seconds"], totals["tokens"]
    context = settings.data.seq_length
    longer = corpus.lengths[corpus.lengths > context]
    summary = {
        "step": progress.step,
        "steps": settings.train.train_iters,
        "stopped_by": stopped_by,
        "first_loss": lines.first_loss,
        "last_loss": sum(lines.last_losses) / len(lines.last_losses) if lines.last_losses else None,
        "skipped_steps": progress.skipped_steps,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "tokens_per_s": tokens / seconds if seconds else None,
        "imbalance": totals["imbalance"] / tokens if tokens else None,
        **_planning(totals),
        **(_pool_steps(lines.sums) if settings.data.balance == POOL else {}),
        "documents": int(lines.sums["documents"]),
        "corpus_documents": len(corpus),
        "flat_tokens": int(lines.sums["flat_tokens"]) if settings.data.trajectories else None,
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


class _Totals:
    """Totals over lines of metrics.jsonl, none of which is kept.

    Attributes:
        first_loss, last_losses: loss of the first line, or None, and those of the last LAST_STEPS.
        sums: sums of the figures; imbalances are weighted with tokens.
    """

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self.last_losses: deque[float] = deque(maxlen=LAST_STEPS)
        self.sums: dict[str, float] = defaultdict(float)

    def add(self, line: dict[str, Any]) -> None:
        """Count a line."""
        if _is_figure(line.get("loss")):  # a skipped step may have none
            self.first_loss = line["loss"] if self.first_loss is None else self.first_loss
            self.last_losses.append(line["loss"])
        for key in ("seconds", "tokens", "documents"):
            self.sums[key] += line[key]
        self.sums["flat_tokens"] += line.get("flat_tokens", line["tokens"])
        self.sums["imbalance"] += line["imbalance"] * line["tokens"]
        if _is_figure(line.get("pooled")):  # lines of steps without data.balance: pool have none
            self.sums["pool_choices"] += 1
            self.sums["pooled_steps"] += line["pooled"] > 0
        # The first step's batch has nothing to be computed meanwhile.
        self.sums["waiting_seconds"] += line["waiting_seconds"] if self.sums["planned_tokens"] else 0.0
        self.sums["planned_tokens"] += line["tokens"]
        self.sums["replica_imbalance"] += line["replica_imbalance"] * line["tokens"]
        for key in ("planning_seconds", "plans", "cached_plans"):
            self.sums[key] += line[key]


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) < math.inf


def _planning(totals: dict[str, float]) -> dict[str, Any]:
    """Return figures of replicas and planning; {} without lines.

    waiting_seconds leaves out the first step, for whose batch nothing can be computed meanwhile.
    """
    if not totals["planned_tokens"]:
        return {}
    return {
        "replica_imbalance": totals["replica_imbalance"] / totals["planned_tokens"],
        "planning_seconds": totals["planning_seconds"],
        "waiting_seconds": totals["waiting_seconds"],
        "plans": int(totals["plans"]),
        "cached_plans": int(totals["cached_plans"]),
    }


def _pool_steps(sums: dict[str, float]) -> dict[str, int]:
    """Return in how many steps pools were taken, and in how many the choice was made, over all starts of the run."""
    return {key: int(sums[key]) for key in ("pooled_steps", "pool_choices")}


def summary_table(summary: dict[str, Any]) -> Table:
    """Return the summary as a table for people."""
    rows = [("steps", f"{summary['step']:,} of {summary['steps']:,}")]
    if summary["last_loss"] is not None:
        last = min(LAST_STEPS, summary["step"])
        text = (
            f"{summary['first_loss']:.3f} in the first step, {summary['last_loss']:.3f} on average in the last {last}"
        )
        rows.append(("loss", text))
    rows.append(("tokens", f"{format_count(summary['tokens'])} in {summary['documents']:,} documents and chunks"))
    if summary["tokens_per_s"] is not None:
        rows.append(("speed", f"{summary['tokens_per_s']:,.0f} tokens/s"))
        rows.append(("imbalance", f"{summary['imbalance']:.3f} (attention work of the slowest rank / mean)"))
    if "plans" in summary:
        rows.append(("replicas", f"{summary['replica_imbalance']:.3f} (modelled time of the slowest replica / mean)"))
        ahead, waited = summary["planning_seconds"], summary["waiting_seconds"]
        text = f"{ahead:,.2f} s ahead of the steps, which waited {waited:,.2f} s for batches"
        rows.append(
            ("planning", f"{text}; {summary['cached_plans']:,} of {summary['plans']:,} plans were in the cache")
        )
    if "pooled_steps" in summary:
        taken, choices = summary["pooled_steps"], summary["pool_choices"]
        text = f"taken in {taken:,} of {choices:,} step{'s' * (choices != 1)}, where it was modelled to be faster"
        rows.append(("pool", text))
    rows.append(_corpus_row(summary))
    if summary["skipped_steps"]:
        rows.append(("skipped steps", f"{summary['skipped_steps']:,}"))
    rows.append(("metrics", summary["metrics"]))
    for key, name in (("loss_png", "curve"), ("checkpoint", "checkpoint")):
        if summary[key]:
            rows.append((name, summary[key]))
    return Table("Summary", ("", ""), tuple(rows))


def _corpus_row(summary: dict[str, Any]) -> tuple[str, str]:
    """Return the row of cut documents, or that of what trees save."""
    tokens, flat, cut = summary["tokens"], summary.get("flat_tokens"), summary["cut_documents"]
    if flat is not None:
        share = f", {1 - tokens / flat:.0%} less" if flat else ""
        return "trees", f"{format_count(tokens)} tokens were computed for {format_count(flat)} of trajectories{share}"
    text = f"{cut:,} of {summary['corpus_documents']:,} are longer than the context of {summary['context']:,}"
    return "cut documents", text + (f", and become {summary['document_chunks']:,} chunks" if cut else "")


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """Return the sentences below the table: what the comparison of algorithms showed, and why the run stopped."""
    comparison = summary.get("comparison")
    sentence = comparison_sentence(comparison) if comparison else None
    return [line for line in (sentence, stopped_line(summary)) if line is not None]


def stopped_line(summary: dict[str, Any]) -> str | None:
    """Return one line if the run stopped before its last step, else None."""
    if summary["stopped_by"] is None:
        return None
    return (
        f"stopped by {summary['stopped_by']} after step {summary['step']}; the state is in {summary['checkpoint']}, "
        "and the same command goes on from there"
    )
