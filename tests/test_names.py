"""Variables are named for what they hold, docstrings of functions start with a verb, retired words do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("mindspeed_cp", "ops", "ascend_kernels", "benchmarks", "tools")

#: Words that say nothing about a value.
VAGUE = {"at", "found", "here", "mine", "of", "one", "some"}


def vague_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable or parameter with a vague name."""
    for node in ast.walk(ast.parse(source)):
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else None
        if name in VAGUE and (isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)):
            yield node.lineno, name


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


def uses(folders: tuple[str, ...], search: Callable[[str], Iterator[tuple[int, str]]]) -> list[str]:
    """Return what a search yields in the sources of folders, with file and line."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in search(path.read_text("utf-8"))
    ]


def test_variables_say_what_they_hold() -> None:
    assert list(vague_names("for some, x in y: pass\ng = lambda at: at\n")) == [(1, "some"), (2, "at")]
    vague = uses((*CODE, "configs", "docs", "requirements", "tests"), vague_names)
    assert not vague, "\n".join(vague)


@pytest.mark.parametrize("folder", CODE)
def test_docstrings_of_functions_start_with_a_verb(folder: str) -> None:
    nouns = uses((folder,), noun_docstrings)
    assert not nouns, "\n".join(nouns)


def early_starts(source: str) -> Iterator[tuple[int, str]]:
    """Yield where a file runs as a program before its end: what stands behind that is not there yet."""
    for node in ast.parse(source).body[:-1]:
        if isinstance(node, ast.If) and "__main__" in ast.dump(node.test):
            yield node.lineno, "main() before the end"


def test_programs_begin_at_the_end_of_their_files() -> None:
    assert not uses(("benchmarks", "tools", "docs", "examples", "requirements"), early_starts)


#: One line for each name or phrase: retired, tab, replacement.
RETIRED = Path(__file__).parent / "retired_words.tsv"
FOLDERS = (*CODE, ".ci", "tests", "configs", "docs", "requirements")
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh", ".patch", ".txt", ""}


def test_retired_words_are_not_used() -> None:
    words = dict(line.split("\t") for line in RETIRED.read_text("utf-8").splitlines()[1:])
    assert all(words.values()) and not set(words) & set(words.values())
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + r")(?!\w)")
    paths = [*ROOT.glob("*.md"), *(ROOT / name for name in ("pyproject.toml", "Makefile", "MANIFEST.in", "setup.py"))]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    used = [
        f"{path.relative_to(ROOT)}:{number}: {word}: say {words[word]}"
        for path in paths
        if path.is_file() and "runs" not in path.parts
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for word in pattern.findall(line)
    ]
    assert not used, "\n".join(used)
