"""What is said at the end of a run, and kept in summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.config import Settings
from mindspeed_cp.data import FileCorpus
from mindspeed_cp.report.text import Table, count
from mindspeed_cp.train.checkpoint import Progress
from mindspeed_cp.train.files import RunFiles, write_json

LAST_STEPS = 10  # a single step's loss depends on its documents


def summarize_run(
    settings: Settings,
    files: RunFiles,
    lines: Sequence[dict[str, Any]],
    progress: Progress,
    first_step: int,
    saved: Path | None,
    reason: str | None,
    corpus: FileCorpus,
) -> dict[str, Any]:
    """Write summary.json and return it.

    Args:
        settings: of the run.
        files: of the run.
        lines: of metrics.jsonl, resumed ones included.
        progress: where the run stands.
        first_step: steps that were done before this start.
        saved: the newest checkpoint.
        reason: why the run stopped before its last step, or None.
        corpus: what was read.
    """
    own = [line for line in lines if line["step"] > first_step] or lines  # a complete run keeps its figures
    seconds, tokens = (float(sum(line[key] for line in own)) for key in ("seconds", "tokens"))
    context = settings.data.seq_length
    longer = corpus.lengths[corpus.lengths > context]
    summary = {
        "step": progress.step,
        "steps": settings.train.train_iters,
        "stopped_by": reason,
        "first_loss": lines[0]["loss"] if lines else None,
        "last_loss": float(np.mean([line["loss"] for line in lines[-LAST_STEPS:]])) if lines else None,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "tokens_per_s": tokens / seconds if seconds else None,
        "imbalance": float(np.average([n["imbalance"] for n in own], weights=[n["tokens"] for n in own]))
        if own
        else None,
        **_planning(own),
        "documents": int(sum(line["documents"] for line in lines)),
        "corpus_documents": len(corpus),
        "cut_documents": len(longer),
        "cut_pieces": int((-(-longer // context)).sum()),
        "context": context,
        "folder": str(files.folder),
        "metrics": str(files.metrics),
        "loss_png": str(files.loss_png) if files.loss_png.exists() else None,
        "checkpoint": str(saved) if saved else None,
    }
    write_json(files.summary, summary)
    return summary


def _planning(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How replicas were balanced, and what planning cost; nothing where the lines are those of an older version.

    The first step is left out of the waiting: there is nothing to compute while its batch is made.
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
        "known_plans": int(sum(line["known_plans"] for line in lines)),
    }


def summary_table(summary: dict[str, Any]) -> Table:
    """The summary as people read it."""
    rows = [("steps", f"{summary['step']:,} of {summary['steps']:,}")]
    if summary["last_loss"] is not None:
        last = min(LAST_STEPS, summary["step"])
        text = (
            f"{summary['first_loss']:.3f} in the first step, {summary['last_loss']:.3f} on average in the last {last}"
        )
        rows.append(("loss", text))
    rows.append(("tokens", f"{count(summary['tokens'])} in {summary['documents']:,} documents and pieces"))
    if summary["tokens_per_s"] is not None:
        rows.append(("speed", f"{summary['tokens_per_s']:,.0f} tokens/s"))
        rows.append(("imbalance", f"{summary['imbalance']:.3f} (attention work of the slowest rank / mean)"))
    if "plans" in summary:
        rows.append(("replicas", f"{summary['replica_imbalance']:.3f} (modelled time of the slowest replica / mean)"))
        ahead, waited = summary["planning_seconds"], summary["waiting_seconds"]
        text = f"{ahead:,.2f} s ahead of the steps, which waited {waited:,.2f} s for batches"
        rows.append(("planning", f"{text}; {summary['known_plans']:,} of {summary['plans']:,} plans were known"))
    cut = summary["cut_documents"]
    rows.append(
        (
            "cut documents",
            f"{cut:,} of {summary['corpus_documents']:,} are longer than the context of {summary['context']:,}"
            + (f", and become {summary['cut_pieces']:,} pieces" if cut else ""),
        )
    )
    rows.append(("metrics", summary["metrics"]))
    for key, name in (("loss_png", "curve"), ("checkpoint", "checkpoint")):
        if summary[key]:
            rows.append((name, summary[key]))
    return Table("Summary", ("", ""), tuple(rows))


def stopped_line(summary: dict[str, Any]) -> str | None:
    """One line if the run stopped before its last step."""
    if summary["stopped_by"] is None:
        return None
    return (
        f"stopped by {summary['stopped_by']} after step {summary['step']}; the state is in {summary['checkpoint']}, "
        "and the same command goes on from there"
    )
