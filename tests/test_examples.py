"""The examples of docs/ run."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


def test_the_sweep_of_contexts_and_nodes_prints_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["scaling.py", "--lengths", "wikipedia", "--contexts", "32768", "1048576", "--png", str(tmp_path / "out.png")],
    )
    monkeypatch.setenv("MPLBACKEND", "Agg")
    runpy.run_path(str(EXAMPLES / "scaling.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all("ms a layer" in line for line in lines)
    assert (tmp_path / "out.png").stat().st_size > 10_000
    slowest, fastest = (float(lines[i].split(":")[1].split()[0]) for i in (5, 9))  # 1M tokens on 1 and 16 nodes
    assert 8 < slowest / fastest <= 16.5


def test_the_picture_of_the_readme_is_drawn_on_one_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README and the picture's name for it have the times that the simulator gives."""
    monkeypatch.setattr(sys, "argv", ["ring_beside_hierarchical.py", str(tmp_path / "out.png")])
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names = runpy.run_path(str(EXAMPLES / "ring_beside_hierarchical.py"), run_name="__main__")
    assert (tmp_path / "out.png").stat().st_size > 10_000
    text = (EXAMPLES.parents[1] / "README.md").read_text("utf-8")
    ring, hierarchical = re.findall(r"'\w+': '([\d.]+) ms'", capsys.readouterr().out)
    assert f"takes {float(ring):.0f} ms" in text and f"takes {float(hierarchical):.0f} ms" in text
    assert f"same {len(names['DOCUMENTS'])} documents" in text
