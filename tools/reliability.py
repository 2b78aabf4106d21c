"""docs/reliability.md, from the marks of the tests in tests/faults; written by `make docs-tables`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "faults"
COLUMNS = ("fault", "happens", "lost", "printed")
HEAD = """\
# Reliability

What can go wrong in a run, what happens then, what is lost, and what is printed. Each row is a test in `tests/faults`
that makes the fault with real processes or files; `make docs-tables` writes this table from their `fault` marks.
[performance.md](performance.md) tells what the checks cost.

| fault | what happens | what is lost | what is printed | test |
|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of docs/reliability.md."""
    lines = [line for path in sorted(TESTS.glob("test_*.py")) for line in _lines(path)]
    return HEAD + "".join(lines)


def _lines(path: Path) -> list[str]:
    """Return the rows of one file with tests.

    Raises:
        ValueError: a mark lacks a column.
    """
    lines = []
    for function in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for mark in function.decorator_list:
            if not isinstance(mark, ast.Call) or ast.unparse(mark.func) != "pytest.mark.fault":
                continue
            cells = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in mark.keywords}
            if tuple(cells) != COLUMNS:
                raise ValueError(f"{path}: the fault mark of {function.name} has {tuple(cells)}, and needs {COLUMNS}")
            test = f"[{function.name.removeprefix('test_').replace('_', ' ')}](../{path.relative_to(ROOT)})"
            lines.append("".join(f"| {cell.replace('|', '/')} " for cell in (*cells.values(), test)) + "|\n")
    return lines
