"""register(check_attention=N): attention that one rank computes wrong raises in the backward."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.errors import CorruptionError
from mindspeed_cp.integrations import huggingface as cp
from mindspeed_cp.integrations.huggingface import attention as module
from tests.integrations.huggingface.models import make_config, make_model, mesh_of, whole_batch

BATCHES = 6


def train(rank: int, group: Any, name: str, every: int, factor: float, recompute: str) -> list[tuple[int, str]]:
    """Number and error of each batch of a model of one layer, whose output is `factor` times too large on rank 1."""
    one_layer = {"num_hidden_layers": 1} | ({"layer_types": ["sliding_attention"]} if name == "gpt_oss" else {})
    right = module.context_parallel_attention
    model, errors = make_model(make_config(name, **one_layer), cp.register(check_attention=every)).train(), []
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    documents = Documents((19, 5, 23))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_CHECKS", module.BatchChecks())
        module.BATCH_CHECKS.every = every
        wrong = factor if rank == 1 else 1.0
        patch.setattr(module, "context_parallel_attention", lambda *a, **named: right(*a, **named) * wrong)
        for number in range(1, BATCHES + 1):
            batch, mesh = whole_batch((19, 5, 23)), mesh_of(3, rank, group)
            rows, labels = cp.planned_batch(batch, model.config, mesh, "ring", documents=documents)
            loss = cp.loss(model(**rows).logits, labels, cp.count_labels(labels, group), group)
            try:
                loss.backward()
            except CorruptionError as error:
                errors.append((number, str(error)))
    return errors


@pytest.mark.parametrize(
    ("name", "recompute"), [("llama", ""), ("gpt_oss", ""), ("llama", "reentrant"), ("llama", "not reentrant")]
)
def test_a_batch_whose_attention_is_wrong_raises_in_its_backward(pool, name: str, recompute: str) -> None:
    problems = pool.run(3, train, name, 2, 1.05, recompute)
    assert [text for rank in (0, 2) for text in problems[rank]] == []
    assert problems[1] and all(number % 2 == 0 for number, _ in problems[1])
    for _, text in problems[1]:
        assert "attention of layer 1, head" in text and "computed on rank 1" in text and "\n" not in text


@pytest.mark.parametrize(("every", "factor"), [(1, 1.0), (0, 1.05)])
def test_right_attention_and_a_run_without_checks_go_on(pool, every: int, factor: float) -> None:
    assert pool.run(3, train, "llama", every, factor, "") == [[], [], []]


def test_an_interval_that_is_no_number_of_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="check_attention is -1; valid: a number of batches, 0 or more"):
        cp.register(check_attention=-1)
