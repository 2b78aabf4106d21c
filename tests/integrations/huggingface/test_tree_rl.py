"""examples/tree_rl.py: trees and flat trajectories give the same step, and a difference ends the program with 1."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.programs import run_programs

ROOT = Path(__file__).parents[3]
SMALL = ("--prompts", "3", "--answers", "3", "--prompt-tokens", "12", "--answer-tokens", "6", "--traces", "2", "--levels", "3", "--repeats", "1")  # fmt: skip


def example(_: list[str]) -> None:
    """The program; its ranks import it by its name."""
    sys.path.insert(0, str(ROOT / "examples"))
    import tree_rl

    tree_rl.main()


def differing(words: list[str]) -> None:
    """The program, to which every number differs from every other."""
    sys.path.insert(0, str(ROOT / "examples"))
    import tree_rl

    tree_rl.TOLERANCE = -1.0
    example(words)


def run(program: Callable[[list[str]], None], *arguments: str, **places: str) -> subprocess.CompletedProcess[str]:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **places}
    [done] = run_programs(program, [*arguments, *SMALL], [environment])
    return done


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ranks", "2"),
        pytest.param(("--ranks", "4", "--cp", "2", "--model", "gpt_oss"), marks=pytest.mark.thorough),
        pytest.param(("--ranks", "3", "--model", "deepseek_v3", "--algorithm", "ring"), marks=pytest.mark.thorough),
    ],
)
def test_trees_and_flat_trajectories_are_the_same_step(arguments: tuple[str, ...]) -> None:
    done = run(example, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in ("cross-entropy ", "clipped ratio ", " tokens as trees, "):  # once for each batch
        assert done.stdout.count(line) == 2


def test_a_difference_ends_with_1() -> None:
    places = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run(differing, **places)
    assert done.returncode == 1 and done.stdout.count("DIFFERS by more than -1.0") == 4, done.stderr[-3000:]
