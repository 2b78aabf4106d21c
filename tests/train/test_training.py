"""Training: the same curve for every way of splitting the work, and after every way of interrupting it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.run_files import RunFiles, read_metrics
from tests.limits import HANG
from tests.train.fresh_ranks import FreshRanks


def tiny(corpus: Path, folder: Path, **changes: Any) -> Settings:
    """Settings of a tiny model; `train__lr=...` changes settings.train.lr."""
    values: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2},
        "data": {"corpus": str(corpus), "seq_length": 517},
        "train": {"train_iters": 20, "global_batch_size": 2, "lr": 3e-3, "lr_warmup_iters": 3, "min_lr": 1e-4},
        "checkpoint": {"save_interval": 0},
        "output": {"folder": str(folder), "log_interval": 0},
        "context_parallel_suite": {"timeout_seconds": float(HANG)},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values[section][name] = value
    return Settings(**values)


def train_here(settings: str) -> dict[str, Any]:
    """In a rank: train; the first rank's metrics and summary."""
    from mindspeed_cp.megatron import megatron_compat, megatron_on_cpu
    from mindspeed_cp.train.loop import train
    from mindspeed_cp.train.world import join_ranks

    parsed = Settings.model_validate_json(settings)
    with megatron_on_cpu(), megatron_compat(), join_ranks(parsed) as world:
        summary = train(world)
    return {"lines": read_metrics(Path(parsed.output.folder) / "metrics.jsonl"), "summary": summary}


def curve(fresh_ranks: FreshRanks, settings: Settings, ranks: int) -> list[dict[str, Any]]:
    """Metrics of a run with `ranks` ranks."""
    return fresh_ranks.run(ranks, train_here, settings.model_dump_json())[0]["lines"]


def values(lines: list[dict[str, Any]], key: str = "loss") -> list[float]:
    return [line[key] for line in lines]


@pytest.fixture(scope="module")
def reference(fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """20 steps of one rank, in fp32."""
    return curve(fresh_ranks, tiny(corpus, tmp_path_factory.mktemp("one")), 1)


def assert_same_curve(lines: list[dict[str, Any]], reference: list[dict[str, Any]], tolerance: float = 1e-4) -> None:
    assert values(lines, "step") == values(reference[: len(lines)], "step")
    assert values(lines) == pytest.approx(values(reference[: len(lines)]), abs=tolerance, rel=0)
    assert values(lines, "grad_norm") == pytest.approx(values(reference[: len(lines)], "grad_norm"), rel=1e-3)
    for key in ("tokens", "documents", "lr"):
        assert values(lines, key) == values(reference[: len(lines)], key)


def test_the_model_learns(reference: list[dict[str, Any]]) -> None:
    losses = values(reference)
    assert losses[0] == pytest.approx(math.log(272), abs=0.2)
    assert losses[-1] < losses[0] - 1.5
    assert max(values(reference, "documents")) > 20, "rows of this corpus must be packed from many documents"


def test_a_resumed_run_goes_on_exactly(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    """In bf16; tests/faults has fp32."""
    common: dict[str, Any] = {
        "context_parallel_suite__context_parallel_size": 2, "train__lr_decay_iters": 12, "train__bf16": True,
    }  # fmt: skip
    whole = curve(fresh_ranks, tiny(corpus, tmp_path / "whole", train__train_iters=8, **common), 2)
    folder = tmp_path / "parts"
    first = tiny(corpus, folder, train__train_iters=6, **common, checkpoint__save_interval=2, checkpoint__keep=2)
    curve(fresh_ranks, first, 2)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        *("iter_0000004", "iter_0000006", "latest"),
    ]
    shutil.rmtree(folder / "checkpoints" / "iter_0000006")  # metrics of steps 5 and 6 must be replaced
    parts = curve(fresh_ranks, tiny(corpus, folder, train__train_iters=8, **common), 2)
    for key in ("step", "loss", "grad_norm", "lr", "tokens", "documents"):
        assert values(parts, key) == values(whole, key), key


def test_a_finished_run_does_nothing_and_keeps_its_settings(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    """A command with another algorithm on a complete run does nothing, says so, and leaves settings.yaml alone."""
    common: dict[str, Any] = {"train__train_iters": 2, "train__lr_warmup_iters": 0}
    ring = tiny(corpus, tmp_path, **common)
    direct = tiny(corpus, tmp_path, **common, context_parallel_suite__algorithm="direct")
    lines = curve(fresh_ranks, ring, 1)
    files = RunFiles(Path(ring.output.folder))
    before = files.settings.read_text()
    assert Settings(**yaml.safe_load(before)) == ring
    [again] = fresh_ranks.run(1, train_here, direct.model_dump_json())
    assert again["lines"] == lines and again["summary"]["step"] == 2
    assert again["summary"]["tokens_per_s"] is None, "no step of this start"
    assert files.settings.read_text() == before


def test_the_summary_names_speed_balance_cuts_and_files(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    settings = tiny(
        corpus, tmp_path, train__train_iters=3, train__lr_warmup_iters=0, data__seq_length=256,
        context_parallel_suite__context_parallel_size=2, checkpoint__save_interval=1,
    )  # fmt: skip
    results = fresh_ranks.run(2, train_here, settings.model_dump_json())
    summary, lines = results[0]["summary"], results[0]["lines"]
    assert results[1]["summary"] is None
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    lengths = [len(json.loads(line)["text"].encode()) + 1 for line in corpus.read_text().splitlines()]
    assert summary["cut_documents"] == sum(n > 256 for n in lengths) > 0
    assert summary["tokens"] == sum(values(lines, "tokens"))
    assert summary["tokens_per_s"] == pytest.approx(summary["tokens"] / sum(values(lines, "seconds")))
    assert summary["imbalance"] >= 1
    for key in ("metrics", "checkpoint"):
        assert Path(summary[key]).exists()


def watched(settings: str) -> tuple[list[dict[str, Any]], bool]:
    """In a rank: train; the metrics, and whether torch was bound to deterministic algorithms."""
    import torch

    return train_here(settings)["lines"], torch.are_deterministic_algorithms_enabled()


def test_two_deterministic_runs_give_the_same_bits(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    """Of a model with experts, windows, biases and dropout."""
    runs = []
    for number in range(2):
        settings = tiny(
            corpus, tmp_path / str(number), train__train_iters=4, train__lr_decay_iters=20, train__deterministic_mode=True,
            model__num_moe_experts=4, model__window_size=[40, 0], model__attention_dropout=0.2,
            model__position_embedding_type="alibi", context_parallel_suite__context_parallel_size=2,
            train__expert_model_parallel_size=2,
        )  # fmt: skip
        runs.append(fresh_ranks.run(2, watched, settings.model_dump_json())[0])
    (first, is_bound), (second, _) = runs
    assert is_bound
    for key in ("loss", "grad_norm"):
        assert values(first, key) == values(second, key)
    assert len(set(values(first))) == 4


def wrong_input(settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        train_here(settings)
    return str(caught.value)


def test_ranks_refuse_what_does_not_fit(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    settings = tiny(corpus, tmp_path, context_parallel_suite__context_parallel_size=2)
    [line] = fresh_ranks.run(1, wrong_input, settings.model_dump_json())
    assert line.startswith("1 ranks do not fit the settings")


def test_a_comparison_of_algorithms_leaves_the_training_as_it_is(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    """Not a bit differs; the run goes on later without comparing again."""
    suite: dict[str, Any] = {
        "context_parallel_suite__context_parallel_size": 2,
        "context_parallel_suite__algorithm": "direct",
        "train__lr_warmup_iters": 0,
    }
    plain = fresh_ranks.run(
        2, train_here, tiny(corpus, tmp_path / "plain", **suite, train__train_iters=3).model_dump_json()
    )
    settings = tiny(corpus, tmp_path / "compared", **suite, train__train_iters=3, train__compare=["ring", "ulysses"])
    compared = fresh_ranks.run(2, train_here, settings.model_dump_json())
    for key in ("loss", "grad_norm", "tokens"):
        assert values(plain[0]["lines"], key) == values(compared[0]["lines"], key), key
    comparison = compared[0]["summary"]["comparison"]
    rows = comparison["algorithms"]
    assert [row["algorithm"] for row in rows] == ["ring", "ulysses", "direct"]
    assert max(row["loss"] for row in rows) - min(row["loss"] for row in rows) < 1e-4
    assert all(row["sent_bytes"] > 0 and row["imbalance"] >= 1 for row in rows)
    longer = settings.model_copy(
        update={"train": settings.train.model_copy(update={"train_iters": 4, "lr_decay_iters": 3})}
    )
    again = fresh_ranks.run(2, train_here, longer.model_dump_json())
    assert again[0]["summary"]["comparison"] is None, "a run that goes on does not compare again"


def test_named_steps_leave_a_trace_of_each_rank(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"train__train_iters": 2, "train__lr_warmup_iters": 0, "output__trace_steps": [2]}
    fresh_ranks.run(2, train_here, tiny(corpus, tmp_path, **changes).model_dump_json())
    traces = sorted((tmp_path / "trace").iterdir())
    assert [path.name for path in traces] == ["step-0000002-rank-0.json", "step-0000002-rank-1.json"]
    assert all(json.loads(path.read_text())["traceEvents"] for path in traces)
