"""The README's example runs, and pages in two languages say the same."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.processes import preload
from tests.programs import run_programs

preload("mindspeed_cp.engine")

ROOT = Path(__file__).resolve().parent.parent

#: English and Chinese pages of one structure.
PAGES = (("README.md", "README.zh.md"), ("docs/start.md", "docs/start.zh.md"))


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / name).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def without_comments(code: str) -> str:
    return re.sub(r"\s*#.*", "", code)


@pytest.mark.parametrize(("english", "chinese"), PAGES)
def test_both_languages_show_the_same_code(english: str, chinese: str) -> None:
    for language in ("python", "sh", "yaml"):
        first, second = ([without_comments(code) for code in blocks(page, language)] for page in (english, chinese))
        assert first == second


@pytest.mark.parametrize(("english", "chinese"), PAGES)
def test_both_languages_have_the_same_structure(english: str, chinese: str) -> None:
    first, second = ((ROOT / page).read_text("utf-8") for page in (english, chinese))
    for pattern in (r"^#+ ", r"^\|", r"^- ", r"^```"):
        assert len(re.findall(pattern, first, re.MULTILINE)) == len(re.findall(pattern, second, re.MULTILINE)), pattern


def test_the_settings_section_is_valid(tmp_path: Path) -> None:
    from mindspeed_cp.config import SuiteSettings

    (section,) = blocks("README.md", "yaml")
    (tmp_path / "suite.yaml").write_text(section)
    suite = SuiteSettings.from_yaml(tmp_path / "suite.yaml")
    assert suite.algorithm == "hybrid" and suite.options == {"ulysses_degree": 4} and suite.topology.nodes == 2


def script(words: list[str]) -> None:
    runpy.run_path(words[0], run_name="__main__")


def test_the_example_runs_on_two_ranks(tmp_path: Path) -> None:
    """With the variables that torchrun gives."""
    example = next(code for code in blocks("README.md", "python") if "init_process_group" in code)
    (tmp_path / "example.py").write_text(example)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    ranks = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ended = run_programs(script, [str(tmp_path / "example.py")], ranks)
    assert [done.returncode for done in ended] == [0, 0], [done.stderr for done in ended]
    output = "".join(done.stdout for done in ended)
    held = [int(count) for count in re.findall(r"rank \d: (\d+) of 6237 tokens", output)]
    assert len(held) == 2 and sum(held) == 6237
