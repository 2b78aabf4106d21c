"""The summary of a run: summary.json, and the table and sentences at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import FileCorpus
from mindspeed_cp.report.text import Table, format_count
from mindspeed_cp.train.comparison import comparison_sentence
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.run_files import RunFiles, write_json

#: What is averaged over the lines of metrics.jsonl; a line that lacks some of it, or was changed by hand, is left out.
_FIGURES = ("loss", "tokens", "seconds", "imbalance", "documents")
LAST_STEPS = 10  # averaged, because the loss of a single step depends on its documents


def summarize_run(
    settings: Settings,
    files: RunFiles,
    lines: Sequence[dict[str, Any]],
    progress: Progress,
    first_step: int,
    saved: Path | None,
    stopped_by: str | None,
    corpus: FileCorpus,
) -> dict[str, Any]:
    """Write summary.json and return its content.

    Args:
        settings: settings of the run.
        files: files of the run.
        lines: lines of metrics.jsonl, those of earlier starts included.
        progress: state after the last step.
        first_step: number of steps done before this start.
        saved: folder of the newest checkpoint.
        stopped_by: reason for a stop before the last step, or None.
        corpus: the training documents.
    """
    lines = [line for line in lines if all(_is_figure(line.get(key)) for key in _FIGURES)]
    start_lines = [line for line in lines if line["step"] > first_step] or lines  # none: the run was complete
    seconds, tokens = (float(sum(line[key] for line in start_lines)) for key in ("seconds", "tokens"))
    context = settings.data.seq_length
    longer = corpus.lengths[corpus.lengths > context]
    summary = {
        "step": progress.step,
        "steps": settings.train.train_iters,
        "stopped_by": stopped_by,
        "first_loss": lines[0]["loss"] if lines else None,
        "last_loss": float(np.mean([line["loss"] for line in lines[-LAST_STEPS:]])) if lines else None,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "tokens_per_s": tokens / seconds if seconds else None,
        "imbalance": float(
            np.average([n["imbalance"] for n in start_lines], weights=[n["tokens"] for n in start_lines])
        )
        if start_lines
        else None,
        **_planning(start_lines),
        "documents": int(sum(line["documents"] for line in lines)),
        "corpus_documents": len(corpus),
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


def _planning(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return figures of replicas and planning; {} for lines of versions without them.

    waiting_seconds leaves out the first step, for whose batch nothing can be computed meanwhile.
    """
    lines = [line for line in lines if "planning_seconds" in line]
    if not lines:
        return {}
    return {
        "replica_imbalance": float(
            np.average([line["replica_imbalance"] for line in lines], weights=[line["tokens"] for line in lines])
        ),
        "planning_seconds": float(sum(line["planning_seconds"] for line in lines)),
        "waiting_seconds": float(sum(line["waiting_seconds"] for line in lines[1:])),
        "plans": int(sum(line["plans"] for line in lines)),
        # Lines of older versions have known_plans.
        "cached_plans": int(sum(line.get("cached_plans", line.get("known_plans", 0)) for line in lines)),
    }


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
    cut = summary["cut_documents"]
    rows.append(
        (
            "cut documents",
            f"{cut:,} of {summary['corpus_documents']:,} are longer than the context of {summary['context']:,}"
            + (f", and become {summary['document_chunks']:,} chunks" if cut else ""),
        )
    )
    rows.append(("metrics", summary["metrics"]))
    for key, name in (("loss_png", "curve"), ("checkpoint", "checkpoint")):
        if summary[key]:
            rows.append((name, summary[key]))
    return Table("Summary", ("", ""), tuple(rows))


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
