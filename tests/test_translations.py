"""Chinese pages show the code and name the flags, files and settings of the English pages that they translate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_blocks(text: str) -> list[str]:
    """All blocks of code, without comments."""
    return [re.sub(r" *#(?!!).*", "", block) for block in BLOCK.findall(text)]


def names(text: str) -> set[str]:
    """What stands between backticks outside of blocks."""
    return {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", BLOCK.sub("", text))}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.zh.md")), ids=lambda page: page.name)
def test_a_translation_has_the_code_and_the_names_of_its_page(page: Path) -> None:
    original = page.with_name(page.name.replace(".zh.", ".")).read_text("utf-8")
    translation = page.read_text("utf-8")
    assert code_blocks(translation) == code_blocks(original)
    assert names(translation) <= names(original)
