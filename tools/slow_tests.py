"""Measure how long tests take and write tests/slow.json, by which `make test` and `make test-quick` leave tests out.

    python -m tools.slow_tests                    # runs what `make test-all` runs, without the modes of the queue
    python -m tools.slow_tests main.xml npu.xml   # reads JUnit files that pytest wrote (--junitxml)

A measurement replaces that of the same test; entries of tests that were not measured stay if the test still exists, as
far as its file and function tell. Seconds are those of setup, call and teardown: measure on a quiet machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "slow.json"
LEAST = 0.5  # seconds


def read_seconds(report: Path) -> dict[str, float]:
    """Return pytest's id of each test that ran -> seconds, from a JUnit file."""
    seconds = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "")
        if case.find("skipped") is None and module:
            seconds[f"{module.replace('.', '/')}.py::{name}"] = float(case.get("time", 0))
    return seconds


def merge(old: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """Return the entries of at least `LEAST` seconds; old ones where a test was not measured and still exists."""
    kept = {test: seconds for test, seconds in old.items() if test not in measured and is_test(test)}
    kept |= {test: round(seconds, 1) for test, seconds in measured.items() if seconds >= LEAST}
    return dict(sorted(kept.items()))


def is_test(test: str) -> bool:
    """True if the file of a test has a function of its name."""
    path, _, name = test.partition("::")
    function = name.partition("[")[0]
    return (ROOT / path).is_file() and f"def {function}(" in (ROOT / path).read_text("utf-8")


def main(reports: Iterable[str]) -> int:
    """Write tests/slow.json from JUnit files, or from a run of all tests."""
    paths = [Path(report) for report in reports]
    with tempfile.TemporaryDirectory() as folder:
        if not paths:
            subprocess.run(["make", "test", "FULL=--thorough", f"TIMES_FOLDER={folder}"], cwd=ROOT, check=True)
            paths = list(Path(folder).glob("*.xml"))
        measured: dict[str, float] = {}
        for path in paths:
            measured |= read_seconds(path)
    merged = merge(json.loads(FILE.read_text("utf-8")), measured)
    FILE.write_text(json.dumps(merged, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{FILE.relative_to(ROOT)}: {len(merged)} tests of {LEAST} s or more, {sum(merged.values()):.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
