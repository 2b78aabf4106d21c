"""The launch script of docs/mindspeed.md is converted as the page shows it."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from mindspeed_cp.cli.main import run
from mindspeed_cp.config import SuiteSettings

PAGE = (Path(__file__).parents[2] / "docs" / "mindspeed.md").read_text("utf-8")


def block(language: str, start: str) -> str:
    """The one block of code in a language that begins so."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (match,) = [text for text in blocks if text.startswith(start)]
    return str(match)


def test_the_launch_is_converted_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = block("sh", "#!/bin/bash")
    Path("launch.sh").write_text(before)
    assert run(["convert", "launch.sh", "--output", "suite.yaml", "--script", "launch_cp.sh"]) == 0
    after = Path("launch_cp.sh").read_text()
    diff = difflib.unified_diff(before.splitlines(True), after.splitlines(True), "launch.sh", "launch_cp.sh", n=1)
    assert block("diff", "--- launch.sh") == "".join(diff)
    Path("page.yaml").write_text(block("yaml", "context_parallel_suite"))
    assert SuiteSettings.from_yaml("suite.yaml") == SuiteSettings.from_yaml("page.yaml")


def test_the_launch_keeps_what_the_page_says_stays(tmp_path: Path) -> None:
    diff = block("diff", "--- launch.sh")
    removed = {line[1:].split()[0] for line in diff.splitlines() if line.startswith("-    ")}
    assert removed == {"--context-parallel-algo", "--attention-mask-type", "--reset-attention-mask"}
