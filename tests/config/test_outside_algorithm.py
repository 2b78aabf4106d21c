"""An algorithm of another package: its options are keys of the settings and of the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.cli.main import run
from mindspeed_cp.config import load_settings
from mindspeed_cp.errors import ConfigError

MODULE = '''
from typing import Annotated
from mindspeed_cp.algorithms import register_algorithm
from mindspeed_cp.algorithms.options import AtLeast
from mindspeed_cp.algorithms.ring import build_ring

def build_toy(documents, kv_documents, topology, attention, *, laps: Annotated[int, AtLeast(0)] = 0, way: str = "left",
              eager: bool = False, share: float | None = None):
    """A ring.

    Args:
        laps: number of laps, of which
            there may be none.
        way, eager, share: unused.
    """
    return build_ring(documents, kv_documents, topology, attention)

register_algorithm("toy", build_toy)
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A settings file that uses an algorithm of the module `toy_algorithm`."""
    (tmp_path / "toy_algorithm.py").write_text(MODULE)
    path = tmp_path / "settings.yaml"
    path.write_text(
        "context_parallel_suite:\n  context_parallel_size: 4\n  algorithm_modules: [toy_algorithm]\n"
        "  algorithm: toy\n  laps: 2\n  way: right\n  share: 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    ALGORITHMS.pop("toy", None)
    sys.modules.pop("toy_algorithm", None)


def test_its_options_are_keys_of_a_settings_file(toy: Path) -> None:
    suite = load_settings(toy).context_parallel_suite
    assert (suite.algorithm, suite.options) == ("toy", {"laps": 2, "way": "right", "share": 1})
    assert load_settings(toy, ["laps=0", "eager=true"]).context_parallel_suite.options["eager"] is True
    for override, expected in (
        ("laps=-1", "laps = -1: must be an integer >= 0"),
        ("laps=two", 'laps = "two": must be an integer'),
        ("eager=1", "eager = 1: must be true or false or null"),
        ("share=a", 'share = "a": must be a number or null'),
        ("lapz=1", "lapz: unknown key; did you mean"),
        ("layout=zigzag", "layout = \"zigzag\": algorithm toy has no such option; algorithms that have it: ring"),
        ("algorithm_modules=[no_such_module]", "'no_such_module' cannot be imported: No module named"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            load_settings(toy, [f"context_parallel_suite.{override}"])
        assert expected in str(caught.value)


def test_bare_keys_of_its_options_are_known_before_anything_else_is_read(toy: Path) -> None:
    assert load_settings(toy, ["laps=1"]).context_parallel_suite.options["laps"] == 1


def test_it_is_used_by_the_command_line(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--heads", "8", "--head-dim", "64"]
    assert run(["plan", str(toy), "--lengths", "700,30", *sizes, "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"]
    set_all = ["--set", "algorithm_modules=[toy_algorithm]", "--set", "laps=2", "--set", "way=right"]
    assert run(["plan", "--lengths", "700,30", "--algorithm", "toy", *set_all]) == 0
    ALGORITHMS.pop("toy")
    sys.modules.pop("toy_algorithm")
    assert run(["plan", "--lengths", "700,30", *set_all, "--set", "algorithm=toy"]) == 0
    assert (
        run(["simulate", str(toy), "--lengths", "700,30", *sizes, "--algorithms", "toy,toy:laps=0,ring", "--json"]) == 0
    )
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["algorithms"]) == 3
