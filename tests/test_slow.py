"""The list of slow tests names tests that exist; a new measurement replaces an old one."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import MEASURED
from tools.slow_tests import is_test, merge, read_seconds


def test_slow_list_names_tests_that_exist() -> None:
    assert [test for test in MEASURED if not is_test(test)] == []


def test_measurement_replaces_that_of_the_same_test(tmp_path: Path) -> None:
    report, kept = tmp_path / "main.xml", "tests/test_slow.py::test_slow_list_names_tests_that_exist"
    case = '<testcase classname="tests.test_slow" name="{}" time="{}">{}</testcase>'
    cases = (case.format("a[1]", 2.04, ""), case.format("fast", 0.1, ""), case.format("skipped", 9, "<skipped/>"))
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    old = {kept: 3.0, "tests/test_slow.py::gone": 4.0, "tests/test_slow.py::fast": 5.0}
    assert merge(old, read_seconds(report)) == {"tests/test_slow.py::a[1]": 2.0, kept: 3.0}
