"""What the documentation computes is up to date; `make docs-tables` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_cp.algorithms import ALGORITHMS, ALIASES, register_algorithm
from mindspeed_cp.algorithms.ring import build_ring
from tools.docs_tables import BATCHES, PAGES, readme_page

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    page = (ROOT / name).read_text("utf-8")
    assert PAGES[name](page) == page, f"{name} is stale: run `make docs-tables`"


def test_the_table_of_bytes_is_of_the_batches_that_the_text_names() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    assert sum(BATCHES[0]) == sum(BATCHES[1]) == 32768 and ",".join(map(str, BATCHES[1])) in text


def test_a_new_algorithm_gets_a_row_of_the_readme() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    register_algorithm("new_ring", build_ring, aliases=("newer_ring",))
    try:
        assert readme_page(page, ", ").count("| `new_ring` | `newer_ring` | One ring over all ranks |\n") == 1
    finally:
        del ALGORITHMS["new_ring"], ALIASES["newer_ring"]
