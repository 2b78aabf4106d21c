"""What the documentation says of plans is so, and what it shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_cp.algorithms import ALGORITHMS
from tools.capabilities import FEATURES

DOCS = Path(__file__).parent.parent / "docs"


def test_every_algorithm_is_explained() -> None:
    text = (DOCS / "algorithms.md").read_text("utf-8")
    assert all(f"**{name}.**" in text for name in ALGORITHMS)
    assert set(FEATURES["algorithm"]) == set(ALGORITHMS)


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_the_page_on_attention_runs() -> None:
    blocks = python_blocks("attention.md")
    assert len(blocks) == 14
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/attention.md", "exec"), scope)


def test_the_algorithm_of_the_page_on_plans_is_proved() -> None:
    (block,) = (block for block in python_blocks("plans.md") if "register_algorithm(" in block)
    try:
        exec(compile(block, "docs/plans.md", "exec"), {})  # ends with verify_plan
        assert "one_by_one" in ALGORITHMS
    finally:
        ALGORITHMS.pop("one_by_one", None)


def test_commands_of_the_documentation_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Those that only plan."""
    from mindspeed_cp.cli.main import run

    commands = []
    for page in DOCS.glob("*.md"):
        text = " ".join(re.sub(r" +# .*", "`", page.read_text("utf-8")).split())  # a command may go over two lines
        commands += re.findall(r"mindspeed-cp (plan --lengths [^`]*?) *`", text)
    assert len(commands) >= 3
    (tmp_path / "lengths.txt").write_text("700\n30\n4100\n")
    for command in commands:
        words = [str(tmp_path / word) if word.endswith((".png", ".txt")) else word for word in command.split()]
        assert run(words) == 0, command
        assert capsys.readouterr().out
