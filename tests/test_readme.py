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

CHINESE = [ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.zh.md"))]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / name).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def names(text: str) -> set[str]:
    """What stands between backticks outside of blocks."""
    return {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", re.sub(r"(?ms)^```.*?^```$", "", text))}


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda page: page.name)
def test_a_translation_has_the_code_and_the_names_of_its_page(chinese: Path) -> None:
    original = chinese.with_name(chinese.name.replace(".zh.", ".")).read_text("utf-8")
    translation = chinese.read_text("utf-8")
    codes = [
        [re.sub(r"\s*#(?!!).*", "", block) for block in re.findall(r"(?ms)^```\w*\n(.*?)^```$", text)]
        for text in (original, translation)
    ]
    assert codes[0] == codes[1]
    if chinese.parent.name == "docs":
        assert names(translation) <= names(original)


@pytest.mark.parametrize("page", ["README", "docs/start"])
def test_both_languages_have_the_same_structure(page: str) -> None:
    first, second = ((ROOT / f"{page}{suffix}.md").read_text("utf-8") for suffix in ("", ".zh"))
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
