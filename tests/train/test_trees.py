"""Training on trajectories: the same curve as trees and flat, for every way of splitting the work, and after a stop."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_cp.config.settings import Settings, load_settings
from mindspeed_cp.errors import ConfigError
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_balance import compared
from tests.train.test_training import curve, tiny, train_here, values

CONFIG = Path(__file__).parents[2] / "configs" / "tree_rl.yaml"
CP4: dict[str, Any] = dict(context_parallel_suite__context_parallel_size=4)
CP2: dict[str, Any] = dict(context_parallel_suite__context_parallel_size=2)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 groups of 1 to 6 answers, some of which share more than the prompt, with weights of all kinds."""
    generator = random.Random(3)
    words = ["plan", "ring", "rank", "tile", "token", "the", "a", "sends", "holds", "key", "value"]

    def text(most: int) -> str:
        return " ".join(generator.choice(words) for _ in range(generator.randint(0, most)))

    path = tmp_path_factory.mktemp("groups") / "groups.jsonl"
    with open(path, "w") as file:
        for _ in range(40):
            begun = text(4)
            answers = [generator.choice((begun, "")) + text(8) for _ in range(generator.randint(1, 6))]
            weights = [generator.choice((1.0, 0.0, -0.25, generator.gauss(0, 1))) for _ in answers]
            file.write(json.dumps({"prompt": text(20), "trajectories": answers, "weights": weights}) + "\n")
    return path


def trees(groups: Path, folder: Path, **changes: Any) -> Settings:
    """Settings of a tiny model that learns from trajectories."""
    common = dict(data__trajectories=True, train__train_iters=4, train__lr_decay_iters=20)
    return tiny(groups, folder, **{**common, **changes})


def train_flat(settings: str) -> dict[str, Any]:
    """In a rank: train on the same rows with each trajectory as a document of its own."""
    from mindspeed_cp.data import EOD, PackedRow, TreeRow, TreeStream
    from mindspeed_cp.layout import Documents

    load = TreeStream._load

    def flat(self: TreeStream, *arguments: Any, **named: Any) -> PackedRow:
        row: TreeRow = load(self, *arguments, **named)
        paths = row.trajectories.tree_tokens
        listed = [row.tokens[path] for path in paths]
        masks = [np.append(weight[1:], 0.0) for weight in row.weights]
        return PackedRow(
            np.concatenate(listed),
            np.concatenate([np.append(tokens[1:], EOD) for tokens in listed]),
            np.concatenate(masks).astype(np.float32),
            Documents([len(path) for path in paths]),
            row.index,
            row.dropout_stream_id,
        )

    TreeStream._load = flat  # type: ignore[assignment, method-assign]
    return train_here(settings)


@pytest.fixture(scope="module")
def reference(fresh_ranks: FreshRanks, groups: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """4 steps of one rank."""
    return curve(fresh_ranks, trees(groups, tmp_path_factory.mktemp("one")), 1)


def assert_same(lines: list[dict[str, Any]], reference: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    assert values(lines, "step") == values(reference, "step")
    for key in ("loss", "grad_norm"):
        assert values(lines, key) == pytest.approx(values(reference, key), rel=tolerance, abs=tolerance), key
    for key in ("tokens", "flat_tokens", "documents"):
        assert values(lines, key) == values(reference, key), key


def test_trees_train_as_flat_trajectories(
    fresh_ranks: FreshRanks, groups: Path, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    outcome = fresh_ranks.run(1, train_flat, trees(groups, tmp_path).model_dump_json())[0]
    lines = outcome["lines"]
    for key in ("loss", "grad_norm"):
        assert values(lines, key) == pytest.approx(values(reference, key), rel=1e-5, abs=1e-5), key
    assert values(lines, "tokens") == values(reference, "flat_tokens")
    assert all(line["tokens"] < 0.8 * line["flat_tokens"] for line in reference)


#: The first is tested by default.
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "hierarchical, two nodes": (
        4, {**CP4, "context_parallel_suite__algorithm": "hierarchical", "context_parallel_suite__nodes": 2,
            "context_parallel_suite__verify_plans": True},
    ),
    "tp2-cp2": (4, {**CP2, "train__tensor_model_parallel_size": 2, "train__sequence_parallel": True}),
    "dp2-cp2, balanced": (
        4, {**CP2, "data__balance": "time", "context_parallel_suite__algorithm": "ulysses",
            "train__check_attention_interval": 1},
    ),
    "direct, balanced layout": (
        3, {"context_parallel_suite__context_parallel_size": 3, "context_parallel_suite__algorithm": "direct",
            "context_parallel_suite__layout": "balanced"},
    ),
    "pool": (4, {**CP2, "data__balance": "pool", "context_parallel_suite__algorithm": "hierarchical"}),
    "recomputed": (2, {**CP2, "model__recompute_granularity": "full"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(*split, id=name, marks=pytest.mark.thorough if number else ())
        for number, (name, split) in enumerate(SPLITS.items())
    ],
)
def test_the_way_of_splitting_does_not_change_the_curve(
    fresh_ranks: FreshRanks,
    groups: Path,
    tmp_path: Path,
    reference: list[dict[str, Any]],
    ranks: int,
    changes: dict[str, Any],
) -> None:
    assert_same(curve(fresh_ranks, trees(groups, tmp_path, **changes), ranks), reference)


@pytest.mark.thorough
def test_a_resumed_run_goes_on_exactly(
    fresh_ranks: FreshRanks, groups: Path, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    first = trees(groups, tmp_path, train__train_iters=2)
    curve(fresh_ranks, first, 1)
    outcome = fresh_ranks.run(1, train_here, trees(groups, tmp_path).model_dump_json())[0]
    assert compared(outcome["lines"]) == compared(reference)
    summary = outcome["summary"]
    assert summary["tree_tokens"][1] == sum(values(reference[2:], "flat_tokens"))  # of this start
    assert (summary["cut_documents"], summary["corpus_documents"]) == (0, 40)


@pytest.mark.thorough
def test_the_configuration_has_the_losses_of_one_rank(groups: Path, fresh_ranks: FreshRanks, tmp_path: Path) -> None:
    changes = (f"data.corpus={groups}", "data.seq_length=512", "train.train_iters=2", "train.lr_warmup_iters=1",
               "model.hidden_size=48", f"output.folder={tmp_path}", "output.log_interval=0")  # fmt: skip
    settings = load_settings(CONFIG, changes)
    lines = curve(fresh_ranks, settings, 4)
    alone = load_settings(CONFIG, (*changes, "context_parallel_suite.context_parallel_size=1", "context_parallel_suite.nodes=1",
                                 f"output.folder={tmp_path}/one"))  # fmt: skip
    assert_same(lines, curve(fresh_ranks, alone, 1))
    assert all(line["tokens"] < 0.8 * line["flat_tokens"] for line in lines)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(data__corpus="stdlib"), r"^data\.corpus = \"stdlib\": has documents, no trajectories; use a \.jsonl file"),
        (dict(data__trajectories=False, data__min_shared_tokens=2), r"^data\.min_shared_tokens = 2: has an effect only with trajectories: true"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_named(groups: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trees(groups, tmp_path, **changes)
