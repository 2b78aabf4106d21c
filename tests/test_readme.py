"""The README's example runs, and its two versions say the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = ("README.md", "README.zh.md")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / name).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def without_comments(code: str) -> str:
    return re.sub(r"\s*#.*", "", code)


@pytest.mark.parametrize("language", ["python", "sh", "yaml"])
def test_both_languages_show_the_same_code(language: str) -> None:
    english, chinese = ([without_comments(code) for code in blocks(name, language)] for name in LANGUAGES)
    assert english and english == chinese


def test_both_languages_have_the_same_structure() -> None:
    english, chinese = ((ROOT / name).read_text("utf-8") for name in LANGUAGES)
    for pattern in (r"^#+ ", r"^\|", r"^- ", r"^```"):
        assert len(re.findall(pattern, english, re.MULTILINE)) == len(re.findall(pattern, chinese, re.MULTILINE)), (
            pattern
        )


def test_the_settings_section_is_valid(tmp_path: Path) -> None:
    from mindspeed_cp.config import SuiteSettings

    (section,) = blocks("README.md", "yaml")
    (tmp_path / "suite.yaml").write_text(section)
    suite = SuiteSettings.from_yaml(tmp_path / "suite.yaml")
    assert suite.algorithm == "hybrid" and suite.options == {"ulysses_degree": 4} and suite.topology.nodes == 2


def test_the_example_runs_on_two_ranks(tmp_path: Path) -> None:
    example = next(code for code in blocks("README.md", "python") if "init_process_group" in code)
    (tmp_path / "example.py").write_text(example)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launcher, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    held = [int(count) for count in re.findall(r"rank \d: (\d+) of 6237 tokens", done.stdout)]
    assert len(held) == 2 and sum(held) == 6237
