"""examples/tree_rl.py: trees and flat trajectories give the same step, and a difference ends the program with 1."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from mindspeed_cp import Documents
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


def test_batches_are_what_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from tree_rl_data import answers, branches

    sizes = Namespace(seed=1, answers=8, prompt_tokens=20, answer_tokens=10, levels=4)
    group = answers(0, sizes)
    shared = Documents.from_trajectories([answer.tokens for answer in group])
    assert len(group) == 8 and (shared.documents.roots == 0).all()  # one prompt
    trace = branches(0, sizes)
    packed = Documents.from_trajectories([path.tokens for path in trace])
    assert packed.documents.trees is not None and packed.documents.trees.depths.max() >= 3
    assert len(packed.documents.trees.leaves) == len(trace) > 2
    for batch in (group, trace):
        assert np.mean([path.advantage for path in batch]) == pytest.approx(0, abs=1e-6)
        assert all(path.weights.sum() == pytest.approx(1) and path.weights[0] == 0 for path in batch)
    assert [path.tokens.tolist() for path in branches(0, sizes)] == [path.tokens.tolist() for path in trace]
