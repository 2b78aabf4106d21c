"""benchmarks.planner --processes: processes share a planner over real sockets."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import planner


def test_processes_get_the_plans_of_one_of_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["planner", "--processes", "3", "--steps", "2", "--ranks", "16"]
    monkeypatch.setattr(sys, "argv", command)
    planner.main()
    words = (
        r"16 ranks, 2 steps, 3 processes: [\d.]+ s of CPU where each plans, [\d.]+ s with one planner .*: ratio [\d.]+"
    )
    assert re.fullmatch(words, capfd.readouterr().out.strip())
    monkeypatch.setattr(sys, "argv", [*command, "--ranks", "2"])
    with pytest.raises(SystemExit):
        planner.main()
    assert "--processes is 3; valid: 2 to 2, the ranks of a plan" in capfd.readouterr().err
