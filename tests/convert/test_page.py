"""The launches of docs/convert.md, docs/mindspeed.md and its translation become what the pages show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mindspeed_cp.convert import Conversion, convert_script

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def converted(page: str, folder: Path) -> tuple[str, Conversion]:
    """Convert the launch of a page in a folder; return its text, too."""
    (script,) = (block for block in blocks(page, "sh") if block.startswith("#!"))
    (folder / "launch.sh").write_text(script)
    return script, convert_script(folder / "launch.sh")[1]


@pytest.mark.parametrize("page", ["convert.md", "mindspeed.md", "mindspeed.zh.md"])
def test_the_page_shows_the_settings_and_the_flags_that_change(page: str, tmp_path: Path) -> None:
    script, conversion = converted(page, tmp_path)
    (settings,) = (block for block in blocks(page, "yaml") if block.startswith("context_parallel_suite"))
    assert yaml.safe_load(settings) == {"context_parallel_suite": conversion.settings, **conversion.sections}
    (diff,) = (block for block in blocks(page, "diff") if not block.startswith("--- a/"))
    removed = [line[2:].split()[0] for line in diff.splitlines() if line.startswith("- ")]
    added = [word for line in diff.splitlines() if line.startswith("+ ") for word in line[2:].split()]
    assert added == list(conversion.added)
    given = re.findall(r"--[a-z][a-z0-9-]*", script.partition("torchrun")[0])
    assert removed == [flag for flag in given if flag not in conversion.kept and not flag.startswith("--n")]
    assert conversion.exit_code == 0
