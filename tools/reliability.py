"""The table of docs/reliability.md, from the marks of the tests in tests/faults; written by `make docs-tables`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "faults"
COLUMNS = ("fault", "happens", "lost", "printed")
HEAD = "| fault | what happens | what is lost | what is printed | test |\n|---|---|---|---|---|\n"


def rows() -> str:
    """Return the rows of the table of faults in docs/reliability.md."""
    return "".join(line for path in sorted(TESTS.glob("test_*.py")) for line in _lines(path))


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
            test = f"[`{function.name}`](../{path.relative_to(ROOT)})"
            lines.append("".join(f"| {cell.replace('|', '/')} " for cell in (*cells.values(), test)) + "|\n")
    return lines
