"""Run the notebooks of docs/notebooks, each in a process of its own, and write their outputs.

    python -m tools.notebooks                                # all
    python -m tools.notebooks docs/notebooks/NAME.ipynb      # some

What a cell prints and what its last line returns are stored as Jupyter stores them, with HTML and PNG where the value
has them. Jupyter is not needed: cells are plain Python, without magics. tests/test_notebooks.py compares stored outputs
with those of a run.
"""

from __future__ import annotations

import argparse
import ast
import base64
import builtins
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "notebooks"

#: The same in all notebooks: nothing of the machine that runs them is stored.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

#: Methods that give a value another form than its repr, as IPython calls them.
FORMS = {"text/html": "_repr_html_", "image/png": "_repr_png_"}


def run_cells(sources: Sequence[str], name: str) -> list[list[dict[str, Any]]]:
    """Run code cells one after the other in this process, and return the outputs of each as Jupyter's JSON.

    Args:
        sources: text of each cell.
        name: of the notebook, for tracebacks.
    """
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    outputs = []
    for number, source in enumerate(sources, 1):
        printed = io.StringIO()
        with redirect_stdout(printed):
            value = _run_cell(source, f"{name}, code cell {number}", scope)
        cell: list[dict[str, Any]] = []
        if printed.getvalue():
            cell.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
        if value is not None:
            data = _forms(value)
            cell.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
        outputs.append(cell)
    return outputs


def _run_cell(source: str, name: str, scope: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last line; None if that is a statement or ends with a semicolon."""
    body = ast.parse(source, name)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, name, "exec"), scope)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
    return None if source.rstrip().endswith(";") else value


def _forms(value: Any) -> dict[str, Any]:
    """Return the forms of a value by their media types."""
    data: dict[str, Any] = {}
    for media_type, method in FORMS.items():
        form = getattr(value, method)() if hasattr(type(value), method) else None
        if isinstance(form, bytes):
            data[media_type] = base64.b64encode(form).decode() + "\n"
        elif form is not None:
            data[media_type] = _lines(form)
    return {**data, "text/plain": _lines(repr(value))}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def execute(path: Path) -> dict[str, Any]:
    """Run a notebook in a new process and return it with the outputs of this run; the file keeps its own.

    Raises:
        RuntimeError: a cell failed; holds its traceback.
    """
    notebook = json.loads(path.read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    with tempfile.TemporaryDirectory() as folder:
        exchange = Path(folder) / "cells.json"
        exchange.write_text(json.dumps(sources), "utf-8")
        command = [sys.executable, "-m", "tools.notebooks", "--cells", str(exchange), path.name]
        paths = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
        process = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
        )
        if process.returncode:
            raise RuntimeError(f"{path.name} failed:\n{process.stdout}{process.stderr}")
        outputs = json.loads(exchange.read_text("utf-8"))
    for count, (cell, cell_outputs) in enumerate(zip(cells, outputs, strict=True), 1):
        cell.update(execution_count=count, outputs=cell_outputs, metadata={})
    for number, cell in enumerate(notebook["cells"], 1):
        cell["id"] = f"cell-{number:02}"
    return {"cells": notebook["cells"], "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def as_text(notebook: dict[str, Any]) -> str:
    """Return a notebook as Jupyter writes it to its file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="default: all of docs/notebooks")
    parser.add_argument("--cells", help=argparse.SUPPRESS)  # in the new process: a file of sources, then of outputs
    options = parser.parse_args(arguments)
    if options.cells:
        exchange = Path(options.cells)
        outputs = run_cells(json.loads(exchange.read_text("utf-8")), options.notebooks[0])
        exchange.write_text(json.dumps(outputs), "utf-8")
        return
    for path in map(Path, options.notebooks or sorted(map(str, FOLDER.glob("*.ipynb")))):
        path.write_text(as_text(execute(path)), "utf-8")
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
