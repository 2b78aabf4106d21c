"""Variables are named for what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("mindspeed_cp", "ops", "ascend_kernels", "benchmarks", "configs", "docs", "requirements", "tests", "tools")

#: Words that say nothing about a value.
VAGUE = {"at", "found", "here", "mine", "of", "one", "some"}


def vague_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable or parameter with a vague name."""
    for node in ast.walk(ast.parse(source)):
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else None
        if name in VAGUE and (isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)):
            yield node.lineno, name


def test_variables_say_what_they_hold() -> None:
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in vague_names(path.read_text("utf-8"))
    ]
    assert not uses, "\n".join(uses)


def test_a_vague_name_is_seen_wherever_it_is_bound() -> None:
    source = "def f(of): return [one for one in of]\nfound: int = 1\nfor some, x in y: pass\ng = lambda at: at\n"
    assert sorted(vague_names(source)) == [(1, "of"), (1, "one"), (2, "found"), (3, "some"), (4, "at")]
