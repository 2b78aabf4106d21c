"""The notebooks of docs/notebooks run, their stored outputs are those of a run, and they are small and of no machine."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG
from tools.notebooks import FOLDER, METADATA, as_text, execute

NAMES = ("a_hugging_face_model", "a_plan_explained", "choosing_for_my_lengths")
SIZE_LIMIT = 600_000  # bytes of all notebooks, pictures included

#: Run by default are those without processes of their own and without transformers.
CASES = [pytest.param(name, marks=[pytest.mark.thorough] if name == "a_hugging_face_model" else []) for name in NAMES]


def stored(name: str) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))
    return notebook


def texts(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    """(Kind, text) of all outputs; of a picture only that it is one, as fonts differ between releases."""
    out = []
    for output in (output for cell in notebook["cells"] for output in cell.get("outputs", [])):
        for kind, value in output.get("data", {"stdout": output.get("text")}).items():
            text = "" if kind == "image/png" else "".join(value)
            out.append((kind, re.sub(r"size [\d.]+x[\d.]+", "size", text) if "Figure" in text else text))
    return out


@pytest.mark.timeout(HANG)
@pytest.mark.parametrize("name", CASES)
def test_stored_outputs_are_those_of_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "a_hugging_face_model" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; it has no release for Python 3.10")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = stored(name)
    assert texts(execute(FOLDER / f"{name}.ipynb")) == texts(notebook), "stale: run `python -m tools.notebooks`"


def test_the_notebooks_are_small() -> None:
    files = sorted(FOLDER.glob("*"))
    assert [file.stem for file in files] == sorted(NAMES)
    assert sum(file.stat().st_size for file in files) < SIZE_LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_as_it_is_written_says_nothing_of_a_machine_and_links_files(name: str) -> None:
    notebook = stored(name)
    assert as_text(notebook) == (FOLDER / f"{name}.ipynb").read_text("utf-8") and notebook["metadata"] == METADATA
    said = "".join(text for _, text in texts(notebook))
    assert not re.search(r"/(home|tmp|work|root|usr)/|\b20\d\d-\d\d-\d\d\b", said)
    words = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#:]+)\)", words) + re.findall(r"`(\w+\.ipynb)`", words)
    assert links and all((FOLDER / link).exists() for link in links)


def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.ipynb"
    cells = [{"cell_type": "code", "source": ["x = 1\n", "x / 0"]}]
    path.write_text(json.dumps({"cells": cells}), "utf-8")
    with pytest.raises(RuntimeError, match=r"(?s)broken\.ipynb failed:.*code cell 1.*ZeroDivisionError"):
        execute(path)
