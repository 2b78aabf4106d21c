"""get_batch: rows and documents of the micro-batches of Megatron's data sets."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron import planned_batch, pretrain
from mindspeed_cp.megatron.adaptors import batch as batch_module
from tests.megatron.gpt import build, megatron, transformer_config
from tests.megatron.ranks import MegatronRanks
from tests.megatron.script_arguments import PADDED, TABLE, rows, stand_in


@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_is_the_rows_of_the_plan_of_its_documents(
    run: Callable[..., Namespace], alone: None, monkeypatch: Any, rank: int
) -> None:
    run(context_parallel_size=2)
    monkeypatch.setattr(batch_module.parallel_state, "get_context_parallel_rank", lambda: rank)
    batch, params = pretrain.get_batch(iter([rows()]), transformer_config(cp=2))
    assert params.rank == rank
    assert params.plan.documents.lengths.tolist() == [5, 11, 8, 24]
    whole = rows()
    del whole["position_ids"]
    expected, _ = planned_batch({key: value.reshape(-1) for key, value in whole.items()}, params.plan, rank)
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(batch[name], value), name


@pytest.mark.parametrize(
    ("count", "ends"),
    [
        (1, {"cu_seqlens": TABLE[:1]}),  # 0.16: micro-batch size 1
        (2, {"cu_seqlens": TABLE}),  # 0.19: as long as the longest row of ends
        (2, PADDED),
        (2, {"cu_seqlens": torch.tensor([0, 5, 16, 24, 48], dtype=torch.int32)}),
    ],
    ids=["one row of ends", "filled up with the length of the row", "padded", "of the whole micro-batch"],
)
def test_documents_of_supervised_fine_tuning_are_those_of_cu_seqlens(
    run: Callable[..., Namespace], alone: None, count: int, ends: dict[str, torch.Tensor]
) -> None:
    run(sft=True, reset_position_ids=False, reset_attention_mask=False)
    whole = {name: value[:count] for name, value in rows().items()}
    _, params = pretrain.get_batch(iter([{**whole, **ends, "max_seqlen": torch.tensor([11])}]), transformer_config())
    assert params.plan.documents.lengths.tolist() == [5, 11, 8, 24][: 3 * count]


@pytest.mark.parametrize(("name", "value"), [("tokens", 97), ("tokens", -1), ("labels", 97), ("labels", -100)])
def test_a_token_beyond_the_vocabulary_is_one_line(
    run: Callable[..., Namespace], alone: None, name: str, value: int
) -> None:
    run(padded_vocab_size=97)
    whole = rows()
    for key in ("tokens", "labels"):
        whole[key] %= 97
    pretrain.get_batch(iter([dict(whole)]), transformer_config())
    whole[name][0, 3], whole["loss_mask"][0, 3] = value, 0
    if name == "labels":  # it does not count
        pretrain.get_batch(iter([dict(whole)]), transformer_config())
    whole["loss_mask"][0, 3] = 1
    with pytest.raises(ConfigError, match=f"{name} of the batch have {value}; valid: 0 to 96"):
        pretrain.get_batch(iter([whole]), transformer_config())


def batch_of_tensor_rank(
    rank: int, group: None, path: str, ends: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], list[int], int | None]:
    """Batch, documents and seed of one of two tensor-parallel ranks, of which the first has the data."""
    modules, start = stand_in(path)
    with pytest.MonkeyPatch.context() as patch, megatron(tp=2):
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        start(
            sft=True, reset_position_ids=False, reset_attention_mask=False, tensor_model_parallel_size=2, curr_iteration=3
        )  # fmt: skip
        data = iter([{**rows(), **ends}]) if rank == 0 else None
        batch, params = pretrain.get_batch(data, transformer_config(tp=2, attention_dropout=0.1))
        rows_of_rank = {name: value.tolist() for name, value in batch.items()}
        return rows_of_rank, params.plan.documents.lengths.tolist(), params.dropout_seed


@pytest.mark.parametrize("ends", [{}, {"cu_seqlens": TABLE}, PADDED], ids=["positions", "cu_seqlens", "padded"])
def test_all_tensor_parallel_ranks_get_the_documents_of_the_first(
    ranks: MegatronRanks, plan_file: str, ends: dict[str, torch.Tensor]
) -> None:
    first, second = ranks.run(2, batch_of_tensor_rank, plan_file, ends)
    assert first == second and first[1] == [5, 11, 8, 24] and first[2] is not None
    assert {name: value[0] for name, value in first[0].items()} == {
        name: value.flatten().tolist() for name, value in rows().items()
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(attention_mask=torch.ones(2, 1, 24, 24)), "--no-create-attention-mask-in-dataloader"),
        (dict(labels=None), r"lacks \['labels'\]"),
        (dict(local_cp_size=torch.tensor(1)), "would drop"),
        (dict(cu_seqlens=torch.zeros(2, 1, 4, dtype=torch.int32)), r"cu_seqlens of the batch has shape \[2, 1, 4\]"),
        (dict(tokens=torch.zeros(48, dtype=torch.int64)), r"tokens of the batch has shape \[48\]; valid: \[rows, tok"),
        (dict(cu_seqlens=torch.tensor([[0, 12, 24], [0, 12, 24]], dtype=torch.int32)), "valid: the same"),
    ],
)
def test_a_batch_that_cannot_be_planned_is_refused(
    run: Callable[..., Namespace], alone: None, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        pretrain.get_batch(iter([{**rows(), **changes}]), transformer_config())


def test_a_stage_without_data_is_told_what_to_change(run: Callable[..., Namespace], alone: None) -> None:
    assert pretrain.is_dataset_built_on_rank(vp_stage=1)
    with pytest.raises(ConfigError, match="use is_dataset_built_on_rank of mindspeed_cp"):
        pretrain.get_batch(None, transformer_config())


def test_dropout_differs_between_steps_and_batches_alone(run: Callable[..., Namespace], alone: None) -> None:
    config = transformer_config(attention_dropout=0.1)
    other = {**rows(), "tokens": rows()["tokens"].flip(1)}

    def seed(iteration: int, batch: dict[str, torch.Tensor]) -> int | None:
        run(curr_iteration=iteration)
        return pretrain.get_batch(iter([batch]), config)[1].dropout_seed

    assert seed(1, rows()) == seed(1, rows()) is not None
    assert len({seed(1, rows()), seed(2, rows()), seed(1, other)}) == 3


def test_evaluation_has_no_iteration_and_needs_no_seed(run: Callable[..., Namespace], alone: None) -> None:
    """As with --skip-train: Megatron then sets no curr_iteration."""
    assert not hasattr(run(), "curr_iteration")
    config = transformer_config(attention_dropout=0.1)
    model = pretrain.wrap_model_provider(lambda: build(config, pretrain.spec))().eval()
    losses, _ = pretrain.forward_step(iter([rows()]), model)
    again, _ = pretrain.forward_step(iter([rows()]), model)
    assert losses.isfinite().all() and torch.equal(losses, again)
    assert pretrain.get_batch(iter([rows()]), config, training=False)[1].dropout_seed is None
