"""The seeded faults of tests/mutants still fit the tree; `python tools/mutants.py` shows that tests catch them."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("mindspeed_cp/", "ops/", "ascend_kernels/")
MUTANTS = runpy.run_path(str(ROOT / "tools" / "mutants.py"))["all_mutants"]()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_every_patch_applies_to_the_tree() -> None:
    command = ["git", "apply", "--check", *(str(mutant.patch) for mutant in MUTANTS)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, f"adapt these patches of tests/mutants to the code:\n{ran.stderr}"


def test_every_patch_is_one_fault_of_product_code() -> None:
    for mutant in MUTANTS:
        text = mutant.patch.read_text("utf-8")
        files, lines = (
            re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE),
            re.findall(r"^\+(?!\+\+)", text, re.MULTILINE),
        )
        assert files and all(file.startswith(PRODUCT) for file in files), mutant.name
        assert len(lines) <= 3, f"{mutant.name} changes {len(lines)} lines"


def test_every_patch_names_tests_that_exist() -> None:
    assert len(MUTANTS) >= 60
    for mutant in MUTANTS:
        for path in mutant.tests:
            file, _, function = path.partition("::")
            assert (ROOT / file).exists(), f"{mutant.name}: {file}"
            assert not function or f"def {function}(" in (ROOT / file).read_text("utf-8"), f"{mutant.name}: {path}"
