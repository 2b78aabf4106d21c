"""Output folders that mislead: what a run writes, where, and what it says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.fresh_ranks import FreshRanks
from tests.train.test_launch import COMMAND, Run, write
from tests.train.test_training import curve, tiny


def endless(corpus: Path, folder: Path, start: Callable[..., Run]) -> Run:
    """A run that has done two steps, and would do many."""
    run = start(*COMMAND, write(tiny(corpus, folder, train__train_iters=100000), folder.parent))
    metrics = folder / "metrics.jsonl"
    run.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "step 2")
    return run


@pytest.mark.fault(
    fault="the output folder is removed while the run writes it",
    happens="the run ends after its step, with a failing code",
    lost="what was in the folder",
    printed="metrics.jsonl: was removed or replaced while the run wrote it",
)
def test_a_run_whose_folder_is_removed_ends_and_says_so(
    corpus: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    folder = tmp_path / "run"
    run = endless(corpus, folder, start)
    shutil.move(folder, tmp_path / "elsewhere")
    code, _, errors = run.end()
    assert code == 2 and len(errors) == 1, errors
    assert errors[0].startswith(f"error: {folder / 'metrics.jsonl'}: was removed or replaced while the run wrote it")
    assert not folder.exists()


@pytest.mark.fault(
    fault="somebody put links at the names of the run's files, and the folder is called $\\frac$",
    happens="links at names of files are replaced or refused; folders that are links are followed",
    lost="nothing",
    printed="nothing",
)
def test_nothing_is_written_through_a_link(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    folder, precious = tmp_path / "$\\frac$", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("not of this run")
    for name in ("metrics.jsonl", "settings.yaml", "loss.png", "summary.json"):
        (folder / f".{name}.new").symlink_to(precious)
    short = {"train__train_iters": 1, "train__lr_warmup_iters": 0, "train__min_lr": 0.0, "output__loss_png": True}
    curve(fresh_ranks, tiny(corpus, folder, **short), 1)
    assert precious.read_text() == "not of this run"
    assert (folder / "loss.png").is_file() and not list(folder.glob(".*.new"))
