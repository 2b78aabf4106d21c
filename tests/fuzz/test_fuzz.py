"""100,000 hostile inputs in the full matrix, some hundred by default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.fuzzers import FUZZERS
from tests.limits import HANG

ROOT = Path(__file__).parents[2]
DEFAULT_SHARE = 400  # one of so many


def faults(wanted: dict[str, int]) -> dict[str, str]:
    """Give so many inputs of each kind to their readers, in a process with limits; return what is wrong."""
    words = [word for name, count in wanted.items() for word in (name, "0", str(count))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.fuzzers", *words], capture_output=True, text=True, cwd=ROOT, timeout=HANG,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["faults"] or result["inputs"] == sum(wanted.values())
    return result["faults"]


def test_some_inputs_of_every_kind_end_in_a_result_or_one_line() -> None:
    assert faults({fuzzer.__name__: count // DEFAULT_SHARE for fuzzer, count in FUZZERS.items()}) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [fuzzer.__name__ for fuzzer in FUZZERS])
def test_100_000_inputs_end_in_a_result_or_one_line(name: str) -> None:
    assert sum(FUZZERS.values()) == 100_000
    assert faults({fuzzer.__name__: count for fuzzer, count in FUZZERS.items() if fuzzer.__name__ == name}) == {}
