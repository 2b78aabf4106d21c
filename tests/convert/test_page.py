"""The example of docs/convert.md is what the command makes."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from mindspeed_cp.cli.main import run
from mindspeed_cp.config import SuiteSettings

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def example_diff(folder: Path) -> str:
    """Convert the script of the page in a folder; return the change of the script."""
    script = next(block for block in blocks("sh") if block.startswith("#!"))
    (folder / "launch.sh").write_text(script)
    assert run(["convert", "launch.sh", "--output", "suite.yaml", "--script", "launch_cp.sh"]) == 0
    lines = (script.splitlines(True), (folder / "launch_cp.sh").read_text().splitlines(True))
    return "".join(difflib.unified_diff(*lines, "launch.sh", "launch_cp.sh", n=1))


def test_the_example_is_converted_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (diff,) = blocks("diff")
    assert diff == example_diff(tmp_path)
    (settings,) = blocks("yaml")
    (tmp_path / "page.yaml").write_text(settings)
    assert SuiteSettings.from_yaml("suite.yaml") == SuiteSettings.from_yaml("page.yaml")
