"""Rows that choose their algorithm: the same curve, and traces that say what each row took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_cp import Documents
from mindspeed_cp.config import Settings
from mindspeed_cp.config.candidates import candidate_settings
from mindspeed_cp.report.step_trace import compare_with_prediction, read_traced_steps
from mindspeed_cp.train.algorithm_choice import RowChooser, resolve_auto
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, tiny, train_here, values

ALSO = ["ulysses", "direct:layout=balanced:prefetch=2", "hierarchical"]


def choosing(corpus: Path, folder: Path, **changes: Any) -> Settings:
    given = {"context_parallel_suite__context_parallel_size": 2, "context_parallel_suite__candidates": ALSO}
    return tiny(corpus, folder, **(given | changes))


def train_by_turns(settings: str) -> dict[str, Any]:
    """In a rank: train, where rows choose by their number of documents, so that all are chosen."""
    from mindspeed_cp.choose.batch_chooser import BatchChooser

    BatchChooser.__call__ = lambda self, row: self.candidates[len(row) % len(self.candidates)]  # type: ignore[method-assign]
    return train_here(settings)


def test_rows_of_many_algorithms_train_as_one_rank_does(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    settings = choosing(corpus, tmp_path, train__train_iters=6, output__trace_steps=[1, 2, 3, 4, 5, 6])
    made = fresh_ranks.run(2, train_by_turns, settings.model_dump_json())[0]["lines"]
    alone = curve(fresh_ranks, tiny(corpus, tmp_path / "one", train__train_iters=6), 1)
    assert values(made) == pytest.approx(values(alone), rel=1e-5)
    steps = read_traced_steps(tmp_path)
    taken = {(name, tuple(options.items())) for step in steps for _, name, options in step.micro_batches(0)}
    assert len({name for name, _ in taken}) >= 3
    words = ["ring", *ALSO]
    assert all(sum(line["algorithms"].values()) == 2 and set(line["algorithms"]) <= set(words) for line in made)
    assert {word.partition(":")[0] for line in made for word in line["algorithms"]} == {name for name, _ in taken}
    direct = {options for name, options in taken if name == "direct"}
    assert direct <= {(("layout", "balanced"), ("prefetch", 2))}
    for predicted, step in zip(
        [pair.predicted for pair in compare_with_prediction(tmp_path).pairs], steps, strict=True
    ):
        assert np.allclose(predicted.sent, step.breakdown.sent)


def test_all_ranks_choose_the_same_algorithm(corpus: Path, tmp_path: Path) -> None:
    settings = choosing(corpus, tmp_path, context_parallel_suite__context_parallel_size=4)
    chooser, other = RowChooser(settings), RowChooser(settings)
    assert [choice.algorithm for choice in chooser.choices] == ["ring", "ulysses", "direct", "hierarchical"]
    assert chooser.choices[3].options["hidden_size"] == 48
    assert chooser.choices[2] == ("direct", {"layout": "balanced", "prefetch": 2}, ALSO[1])
    for lengths in ([517], [5, 500, 12], [100] * 5 + [17]):
        assert (
            chooser(Documents(lengths)) == other(Documents(lengths)) and chooser(Documents(lengths)) in chooser.choices
        )
    alone = RowChooser(tiny(corpus, tmp_path, context_parallel_suite__context_parallel_size=4))
    assert alone(Documents([517])) == ("ring", {}, "ring") and len(alone.choices) == 1


def test_auto_gives_rows_a_few_candidates(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mindspeed_cp.choose.batch_chooser.SHORTLIST_WITHIN", 100.0
    )  # rows so short are all launches and latencies
    suite = {"algorithm": "auto", "candidates": "auto", "context_parallel_size": 4, "cluster": "h200"}
    settings = tiny(corpus, tmp_path, **{f"context_parallel_suite__{key}": value for key, value in suite.items()})
    chosen, decision = resolve_auto(settings)
    assert decision is not None and chosen.context_parallel_suite.algorithm == decision.candidate.algorithm
    also = chosen.context_parallel_suite.candidates
    assert also and len(also) <= 3
    every = candidate_settings(chosen)
    assert len(every) == 1 + len(also)
    assert [candidate.context_parallel_suite.candidates for candidate in every] == [None] * len(every)
    assert RowChooser(chosen)(Documents([517])) in RowChooser(chosen).choices
    assert Settings(**chosen.model_dump(exclude_unset=True)) == chosen
