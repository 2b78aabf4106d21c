"""Variables are named for what they hold, and docstrings of functions start with a verb."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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


#: First words of a docstring that are no verb in the imperative, beside words that end in "s".
NO_VERBS = {
    "a", "all", "an", "as", "at", "by", "each", "every", "everything", "for", "from", "how", "in", "no", "not", "of",
    "on", "one", "own", "some", "that", "the", "these", "this", "those", "what", "when", "where", "whether", "which",
    "with", "within",
}  # fmt: skip


def noun_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and first word of the docstrings of functions that do not start with a verb.

    Properties, fixtures and builders of algorithms are named for what they are, and the first line of a builder's
    docstring is its summary in tables.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith(("build_", "__init__")):
            continue
        if any("property" in ast.dump(decorator) for decorator in node.decorator_list):
            continue
        word = (ast.get_docstring(node) or "Return").split()[0].rstrip(".,:;").lower()
        if word[0] == "[":  # only the shapes of argument and result
            continue
        if word in NO_VERBS or (word.endswith("s") and not word.endswith("ss")):
            yield node.lineno, word


@pytest.mark.parametrize("folder", ["mindspeed_cp", "ops", "ascend_kernels", "benchmarks", "tools"])
def test_docstrings_of_functions_start_with_a_verb(folder: str) -> None:
    nouns = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, word in noun_docstrings(path.read_text("utf-8"))
    ]
    assert not nouns, "\n".join(nouns)
