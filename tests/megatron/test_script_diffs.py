"""The diffs of docs/megatron.md: at most five lines, and they fit the scripts of Megatron-LM that they are for."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from mindspeed_cp.megatron import pretrain
from tests.limits import HANG

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "megatron.md").read_text("utf-8")
DIFFS = dict(re.findall(r"core_v(0\.\d+)[^\n]*:\n\n```diff\n(.*?)```", PAGE, re.DOTALL))


def changed_lines(diff: str) -> list[str]:
    """The lines that the diff adds."""
    return [line[1:].strip() for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]


def test_there_is_a_diff_for_each_version() -> None:
    assert list(DIFFS) == ["0.12", "0.16", "0.19"]


@pytest.mark.parametrize("page", ["mindspeed.md", "mindspeed.zh.md"])
def test_the_pages_of_mindspeed_show_the_diff_of_its_megatron(page: str) -> None:
    assert f"```diff\n{DIFFS['0.12']}```" in (DOCS / page).read_text("utf-8")


@pytest.mark.parametrize("version", DIFFS)
def test_a_diff_changes_at_most_five_lines(version: str) -> None:
    added = changed_lines(DIFFS[version])
    removed = [line for line in DIFFS[version].splitlines() if line.startswith("-") and not line.startswith("---")]
    assert 3 <= len(added) <= 5
    assert len(removed) <= len(added)


@pytest.mark.parametrize("version", DIFFS)
def test_a_diff_names_functions_of_pretrain(version: str) -> None:
    added = changed_lines(DIFFS[version])
    assert added[0] == "from mindspeed_cp.megatron import pretrain as planned"
    names = {name for line in added for name in re.findall(r"planned\.(\w+)", line)}
    assert {"forward_step", "add_arguments", "is_dataset_built_on_rank"} < names
    assert names <= set(pretrain.__all__)


def test_a_diff_applies_to_the_script_of_its_version(tmp_path: Path) -> None:
    tree = os.environ.get("MEGATRON_LM")
    if not tree:
        pytest.skip("MEGATRON_LM names no source tree of Megatron-LM")
    info = (Path(tree) / "megatron" / "core" / "package_info.py").read_text("utf-8")
    version = "0." + re.findall(r"^MINOR = (\d+)", info, re.MULTILINE)[0]
    if version not in DIFFS:
        pytest.skip(f"MEGATRON_LM is {version}; the page has diffs for {', '.join(DIFFS)}")
    script = tmp_path / "pretrain_gpt.py"
    script.write_text((Path(tree) / "pretrain_gpt.py").read_text("utf-8"), "utf-8")
    done = subprocess.run(
        ["git", "apply", "--unidiff-zero", "-p1", "-"], cwd=tmp_path, input=DIFFS[version], text=True,
        capture_output=True, timeout=HANG,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    patched = script.read_text("utf-8")
    assert all(line in patched for line in changed_lines(DIFFS[version]))
    compile(patched, script.name, "exec")
