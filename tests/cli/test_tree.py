"""`mindspeed-cp plan --tree`: files of trees, their table and picture, and bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.cli.lengths import read_trees
from mindspeed_cp.cli.main import run
from mindspeed_cp.report.notebook import show
from mindspeed_cp.report.tile_map import computed_squares, visible
from tests.cli.test_cli import failure

LINES = '{"lengths": [1300, 700, 100, 900], "parents": [-1, 0, 0, 2]}\n\n{"trajectories": [[5, 6, 7], [5, 6, 8, 9]]}\n'
DOCUMENTS = Documents([1300, 700, 100, 900, 2, 1, 2], [-1, 0, 0, 2, -1, 4, 4])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trees.jsonl"
    path.write_text(LINES)
    return path


def test_trees_are_read_line_by_line(file: Path) -> None:
    assert read_trees(file) == DOCUMENTS


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_the_table_and_the_picture_show_trees(
    file: Path, algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--tree", str(file), "--ranks", "3", "--algorithm", algorithm]
    png = tmp_path / "map.png"
    assert run([*arguments, "--verify", "--png", str(png)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "trees 2, up to 3 documents deep; as trajectories 4 documents, 4,307 tokens" in text and "proved" in text
    assert png.read_bytes().startswith(b"\x89PNG")
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == DOCUMENTS.tokens


@pytest.mark.parametrize("window", [None, (400, 0)])
def test_the_picture_has_all_that_is_computed(window: tuple[int, int] | None) -> None:
    documents = Documents([300, 120, 80, 200], [-1, 0, 0, 2], [(20, 90), (310, 400)])
    plan = build_plan(documents, Topology(1, 3), AttentionConfig(1, window=window), "ring")
    tokens = np.arange(documents.tokens)
    seen = visible(plan, tokens, tokens)
    drawn = sum((computed_squares(plan, rank, tokens, tokens, seen) >= 0).sum() for rank in range(3))
    assert drawn == seen.sum() == plan.work().sum()
    assert "trees" in show(plan).html and "2, of 160 tokens that see both ways" in show(plan).html


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "line 1: .* is not a tree; valid"),
        ('{"lengths": [3]}', "line 1: .* is not a tree; valid"),
        (
            '{"lengths": [3, 2], "parents": [-1, 0]}\n{"lengths": [3, 2], "parents": [-1, 1]}',
            r"line 2: parents\[1\] is 1",
        ),
        ('{"trajectories": [[1, 2], []]}', r"line 1: trajectories\[1\] has no tokens"),
        ('{"trajectories": 5}', "line 1: .* is not a tree"),
        ("lengths", "line 1: "),
        ("\n", "no document; valid: lines such as"),
    ],
)
def test_files_that_hold_no_trees_are_refused(
    text: str, says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert re.search(says, failure(capsys, "plan", "--tree", file))


def test_other_arguments_that_do_not_fit_are_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "given together with --lengths" in failure(capsys, "plan", "--tree", file, "--lengths", "5")
    assert "valid: a file of lines such as" in failure(capsys, "plan", "--tree", file.parent / "none")
    assert "documents have parents, with attention.mask 'full'" in failure(
        capsys, "plan", "--tree", file, "--mask", "full"
    )
