"""Names and phrases that were replaced do not come back."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RETIRED = Path(__file__).parent / "retired_words.tsv"  # one line for each name or phrase: retired, tab, replacement
FOLDERS = (
    ".ci", "mindspeed_cp", "ops", "ascend_kernels", "tests", "benchmarks", "configs", "docs", "requirements", "tools",
)  # fmt: skip
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".js", ".html", ".sh", ".patch", ".txt", ""}


def retired_words() -> dict[str, str]:
    head, *lines = RETIRED.read_text("utf-8").splitlines()
    assert head == "retired\treplacement"
    return dict(line.split("\t") for line in lines)


def test_retired_words_have_replacements_that_are_not_retired() -> None:
    words = retired_words()
    assert all(word.strip() == word and word and replacement for word, replacement in words.items())
    assert not set(words) & set(words.values())


def test_retired_words_are_not_used() -> None:
    words = retired_words()
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + r")(?!\w)")
    paths = [*ROOT.glob("*.md"), *(ROOT / name for name in ("pyproject.toml", "Makefile", "MANIFEST.in", "setup.py"))]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    uses = [
        f"{path.relative_to(ROOT)}:{number}: {word}: say {words[word]}"
        for path in paths
        if path.is_file() and "runs" not in path.parts
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for word in pattern.findall(line)
    ]
    assert not uses, "\n".join(uses)
