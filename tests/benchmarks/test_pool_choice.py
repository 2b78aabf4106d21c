"""The benchmark of a step's choice between replicas and pools: its rows, and that the plan is of what was chosen."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from benchmarks import pool_choice
from mindspeed_cp import AttentionConfig, Topology

GQA = AttentionConfig(heads=32, kv_heads=8, head_dim=128)


def test_rows_are_full_and_have_every_token_once() -> None:
    lengths = np.array([5, 0, 19, 1, 7])
    rows = pool_choice.full_rows(lengths, 4)
    assert [row["length"].sum() for row in rows] == [8, 8, 8, 8]
    chunks = np.concatenate(rows)
    assert (np.bincount(chunks["document"], chunks["length"], 5) == lengths).all()
    for document in range(5):
        own = chunks[chunks["document"] == document]
        assert (own["start"] == np.cumsum(own["length"]) - own["length"]).all()


@pytest.mark.parametrize(
    ("lengths", "pool_ranks", "pools", "planned_ranks"),
    [
        pytest.param([4096] * 32, 32, 0, 8, id="replicas"),
        pytest.param([32768, *[64] * 1536], 32, 1, 32, id="one pool"),
        pytest.param([24000, 24000, *[64] * 1298], 16, 2, 16, id="two pools"),
    ],
)
def test_what_is_chosen_is_planned(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], pool_ranks: int, pools: int, planned_ranks: int
) -> None:
    planned: list[tuple[int, int]] = []
    build = pool_choice.build_plan

    def counted(documents: Any, topology: Topology, *given: Any, **options: Any) -> Any:
        planned.append((documents.tokens, topology.ranks))
        return build(documents, topology, *given, **options)

    monkeypatch.setattr(pool_choice, "build_plan", counted)
    figures = pool_choice.choose(pool_choice.full_rows(np.array(lengths), 4), Topology(1, 8, "a2"), GQA, pool_ranks)
    assert figures.pools == pools and {ranks for _, ranks in planned} == {planned_ranks}
    assert sum(tokens for tokens, _ in planned) == pytest.approx(sum(lengths) / max(pools, 4 * (not pools)), rel=0.1)
    assert figures.documents >= len(lengths) and figures.choosing > 0 and figures.planning > 0


def test_a_line_is_printed_for_each_batch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = "--ranks 16 32 --pool-ranks 16 --lengths wikipedia --tokens 1024 --batches 2"
    monkeypatch.setattr(sys, "argv", ["pool_choice", *arguments.split()])
    pool_choice.main()
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["16", "16", "32", "32"]


def test_ranks_that_are_no_whole_replicas_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pool_choice", "--ranks", "12"])
    with pytest.raises(SystemExit):
        pool_choice.main()
    assert "--ranks 12: valid: a multiple of 8" in capsys.readouterr().err
