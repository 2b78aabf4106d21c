"""Write the table of algorithms and options into docs/algorithms.md; run by `make docs-tables`."""

from __future__ import annotations

from pathlib import Path

from mindspeed_cp.algorithms import ALGORITHMS, Algorithm, AlgorithmOption

PAGE = Path(__file__).parent.parent / "docs" / "algorithms.md"
HEAD = "| algorithm | Megatron, MindSpeed | options (defaults) | use it for |\n|---|---|---|---|\n"


def table() -> str:
    """Return the table, one line for each registered algorithm."""
    return HEAD + "".join(_line(algorithm) for algorithm in ALGORITHMS.values())


def replaced(page: str) -> str:
    """Return the text of the page with the table in place of the one that it has."""
    start = page.index(HEAD)
    return page[:start] + table() + page[page.index("\n\n", start) + 1 :]


def _line(algorithm: Algorithm) -> str:
    names = ", ".join(f"`{alias}`" for alias in algorithm.aliases)
    options = ", ".join(f"`{option.name}` ({_default(option)})" for option in algorithm.options.values())
    cells = [f"`{algorithm.name}`", names, options, algorithm.use_for]
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|\n"


def _default(option: AlgorithmOption) -> str:
    if option.from_model:
        return "the model's"
    if option.default is None:
        return option.description.rpartition("default: ")[2].rstrip(".")
    return str(option.default).lower() if isinstance(option.default, bool) else str(option.default)


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text("utf-8")), "utf-8")
