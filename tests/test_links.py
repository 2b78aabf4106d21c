"""What the documentation links and names exists: files, folders, modules and what is in them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "configs").rglob("*.md"),
    *(ROOT / "benchmarks" / "results").glob("*.md"),
]

#: Folders from which pages name files.
FOLDERS = (
    ROOT,
    *(ROOT / folder for folder in ("mindspeed_cp", "mindspeed_cp/megatron", "tests", "tests/npu", "configs/launch")),
)

#: Paths that the documentation names and that only runs write.
WRITTEN_BY_RUNS = {"runs/", "RUN/trace/step-0000003-rank-0001.json"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    paths = re.findall(r"`([\w-]+(?:/[\w.-]+)*/(?:[\w-]+\.(?:py|md|yaml|json|sh|tsv)|))`", text)
    names = re.findall(r"(?<![\w/.-])mindspeed_cp(?:\.\w+)+", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not any((folder / path).exists() for folder in FOLDERS)]
    missing += [name for name in names if not resolves(name)]
    assert not set(missing) - WRITTEN_BY_RUNS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_to_a_heading_names_one(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]*)\)", page.read_text("utf-8"))
    targets = [((page.parent / file if file else page), heading) for file, heading in links]
    assert not [f"{target.name}#{heading}" for target, heading in targets
                if target.suffix == ".md" and target.exists() and heading not in headings(target)]  # fmt: skip


def headings(page: Path) -> set[str]:
    """Return the names of a page's headings in links, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_that_a_page_calls_exist(page: Path) -> None:
    """A program that has gone since its table was made is marked by a dagger."""
    calls = re.findall(r"python -m ((?:benchmarks|tests|tools)(?:\.\w+)+)[^`\n]*`?(†?)", page.read_text("utf-8"))
    assert not [module for module, gone in calls if not gone and importlib.util.find_spec(module) is None]


def resolves(name: str) -> bool:
    """True if a dotted name is a module, or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
        return True
    except ModuleNotFoundError:
        pass
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return False


def test_a_name_that_is_not_there_does_not_resolve() -> None:
    assert resolves("mindspeed_cp.choose.compare") and resolves("mindspeed_cp.choose.compare.compare_algorithms")
    assert not resolves("mindspeed_cp.choose.compare.compare") and not resolves("mindspeed_cp.chosen.compare")
