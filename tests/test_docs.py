"""What the documentation says of plans is so, and what it shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mindspeed_cp.algorithms import ALGORITHMS
from tools.capabilities import FEATURES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path, start: str) -> set[str]:
    """Return the commands of a page that begin with a text; a command may go over two lines."""
    text = " ".join(re.sub(r" +# .*", "`", page.read_text("utf-8")).replace("\\\n", " ").replace("\n```", "`").split())
    return set(re.findall(rf"mindspeed-cp ({re.escape(start)} [^`]*?) *(?:`|(?= mindspeed-cp ))", text))


def run_command(command: str, folder: Path) -> int:
    """Run a command that reads and writes files in a folder."""
    from mindspeed_cp.cli.main import run

    return run([str(folder / word) if word.endswith((".png", ".txt")) else word for word in command.split()])


def test_every_algorithm_is_explained() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    assert all(f"**{name}.**" in text for name in ALGORITHMS)
    assert set(FEATURES["algorithm"]) == set(ALGORITHMS)


def test_the_page_on_attention_runs() -> None:
    blocks = code_blocks(ROOT / "docs" / "attention.md", "python")
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/attention.md", "exec"), scope)


def test_the_page_on_simulation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = code_blocks(ROOT / "docs" / "simulate.md", "python")
    exec(compile(block, "docs/simulate.md", "exec"), {})
    assert "hierarchical: " in capsys.readouterr().out


def test_the_algorithm_that_a_page_writes_is_proved() -> None:
    (block,) = (block for page in PAGES for block in code_blocks(page, "python") if "register_algorithm(" in block)
    try:
        exec(compile(block, "docs", "exec"), {})  # ends with verify_plan
        assert "one_by_one" in ALGORITHMS
    finally:
        ALGORITHMS.pop("one_by_one", None)


def test_commands_that_plan_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = set().union(*(commands(page, "plan --lengths") for page in PAGES))
    assert shown
    (tmp_path / "lengths.txt").write_text("700\n30\n4100\n")
    for command in sorted(shown):
        assert run_command(command, tmp_path) == 0, command
        assert capsys.readouterr().out


def test_the_first_pages_simulate_the_lengths_that_they_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start page and the README end in the same command and a picture."""
    start = ROOT / "docs" / "start.md"
    shown = commands(start, "simulate --lengths")
    assert len(shown) == 1 and shown == commands(ROOT / "README.md", "simulate --lengths")
    monkeypatch.chdir(tmp_path)
    (block,) = code_blocks(start, "python")
    exec(compile(block, "docs/start.md", "exec"), {})
    assert np.loadtxt("lengths.txt").tolist() == [5000, 37, 1200]
    assert run_command(*shown, tmp_path) == 0
    assert "times as fast as the even ring" in capsys.readouterr().out
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_the_table_of_the_start_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run_command("simulate --lengths wikipedia --cluster a2 --nodes 4", tmp_path) == 0
    printed = {
        line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1] == " " and line.strip()
    }
    text = (ROOT / "docs" / "start.md").read_text("utf-8")
    rows = re.findall(r"^ (\w+) +([\d.]+) +([\d.]+) +([\d.]+) % +([\d.]+) +([\d.]+ MiB) +(.+)$", text, re.MULTILINE)
    assert len(rows) == 4 and all(cell in printed[name] for name, *cells in rows for cell in cells)
