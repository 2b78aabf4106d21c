"""transformers' Trainer on four ranks, two replicas of two context-parallel ranks, and on one rank."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")

import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.integrations import huggingface as cp
from tests.integrations.huggingface.models import make_config, make_model, mesh_of, whole_batch

#: Lengths of the documents of packed rows: two rows a step, one for each replica.
ROWS = ((23, 1, 40), (9, 30), (5, 17, 2), (61, 3), (12, 12), (50,))
SETTINGS = {
    "per_device_train_batch_size": 1, "train_sampling_strategy": "sequential", "remove_unused_columns": False,
    "learning_rate": 0.05, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 1.0, "report_to": [],
    "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True,
    "eval_strategy": "epoch", "per_device_eval_batch_size": 1,
}  # fmt: skip


def rows() -> list[list[dict[str, torch.Tensor]]]:
    packed = [whole_batch(lengths, seed) for seed, lengths in enumerate(ROWS)]
    return [
        [{"input_ids": ids, "labels": labels} for ids, labels in zip(*(batch[key][0].split(lengths) for key in ("input_ids", "labels")), strict=True)]
        for batch, lengths in zip(packed, ROWS, strict=True)
    ]  # fmt: skip


def train(
    rank: int, group: Any, folder: str, ranks: tuple[int, int], dropout: float
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses that the Trainer logs, that of an evaluation behind them, and the weights after an epoch."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Trainer, TrainingArguments

    world = ranks[0] * ranks[1]
    if world > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
        )
        mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("dp", "cp"))["cp"]
    else:
        mesh = mesh_of()
    model = make_model(make_config("llama", attention_dropout=dropout), cp.register())
    collator = cp.PlannedCollator(model.config, mesh, "ring", seed=3)
    arguments = TrainingArguments(folder, num_train_epochs=1, gradient_accumulation_steps=2 // ranks[0], **SETTINGS)
    trainer = Trainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=cp.RepeatedRows(rows(), mesh.size()),
        eval_dataset=cp.RepeatedRows([row for row in rows()[:2] for _ in range(ranks[0])], mesh.size()),
        callbacks=[cp.planned_callback(collator)],
    )
    trainer.train()
    logged = trainer.state.log_history
    losses = [entry[name] for name in ("loss", "eval_loss") for entry in logged if name in entry]
    return losses, {name: x.detach().clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.2, marks=pytest.mark.thorough)])
def test_four_ranks_train_as_one(pool, tmp_path: Path, dropout: float) -> None:
    alone, weights = train(0, None, str(tmp_path / "alone"), (1, 1), dropout)
    assert len(alone) == 3 + 1
    for losses, parameters in pool.run(4, train, str(tmp_path / "four"), (2, 2), dropout):
        assert losses == pytest.approx(alone, abs=1e-4)  # the log rounds
        assert max(float((parameters[name] - weights[name]).abs().max()) for name in weights) < 2e-6


@pytest.mark.parametrize(
    ("setting", "value"),
    [("train_sampling_strategy", "random"), ("dataloader_num_workers", 1), ("average_tokens_across_devices", False),
     ("label_smoothing_factor", 0.1)],
)  # fmt: skip
def test_settings_that_would_change_the_result_are_refused(tmp_path: Path, setting: str, value: object) -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(tmp_path), **{**SETTINGS, setting: value})
    callback = cp.planned_callback(cp.PlannedCollator(make_config("llama"), mesh_of()))
    with pytest.raises(ConfigError, match=f"{setting} is {value!r}; valid with planned batches"):
        callback.on_train_begin(arguments, None, None)


def begin(tmp_path: Path, model: Any = None, **changes: Any) -> None:
    """What the callback says to the beginning of a training."""
    from transformers import TrainingArguments

    callback = cp.planned_callback(cp.PlannedCollator(make_config("llama"), SimpleNamespace(mesh=[0])))
    callback.on_train_begin(TrainingArguments(str(tmp_path), **{**SETTINGS, **changes}), None, None, model=model)


def test_a_loader_that_hands_out_one_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dispatch_batches is True; valid with planned batches: None"):
        begin(tmp_path, accelerator_config={"dispatch_batches": True})
    with pytest.raises(ConfigError, match="split_batches is True; valid with planned batches: False"):
        begin(tmp_path, accelerator_config={"split_batches": True})


def test_an_auxiliary_loss_of_experts_is_refused(tmp_path: Path) -> None:
    begin(tmp_path, SimpleNamespace(config=make_config("qwen3_moe")))
    with pytest.raises(ConfigError, match=r"output_router_logits is True; valid under the Trainer .* False"):
        begin(tmp_path, SimpleNamespace(config=make_config("qwen3_moe", output_router_logits=True)))


def test_an_evaluation_before_the_training_is_refused(tmp_path: Path) -> None:
    """The Trainer then leaves the model without DDP, and every process trains by itself."""
    callback = cp.planned_callback(cp.PlannedCollator(make_config("llama"), SimpleNamespace(mesh=[0])))
    alone, several = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)
    callback.on_train_begin(several, None, None)
    callback.on_prediction_step(several, None, None)  # inside the training
    callback.on_train_end(several, None, None)
    callback.on_train_begin(several, None, None)
    callback.on_train_end(several, None, None)
    callback.on_prediction_step(several, None, None)
    callback.on_train_begin(alone, None, None)
    callback.on_train_end(alone, None, None)
    with pytest.raises(ConfigError, match=r"evaluate\(\) or predict\(\) came before train\(\)"):
        callback.on_train_begin(several, None, None)


def test_the_collator_passes_loss_masks_on() -> None:
    collator = cp.PlannedCollator(make_config("llama"), mesh_of(), "ring")
    document = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "loss_mask": [0, 0, 1]}
    (row,) = cp.RepeatedRows([[document, document]], 1)._rows
    made = collator([{"number": 0, "documents": row}])
    assert made["shift_labels"].tolist() == [[-100, 7, -100, -100, 7, -100]]


def test_empty_documents_have_no_rows_and_missing_labels_are_named() -> None:
    collator = cp.PlannedCollator(make_config("llama"), mesh_of(), "ring")
    document, empty = {"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [], "labels": []}
    made = [collator([{"number": 0, "documents": row}]) for row in ([document], [empty, document, empty])]
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(made[0][name], made[1][name]) and made[1][name].dtype == torch.int64
    for row in ([], [empty]):
        with pytest.raises(ConfigError, match="row 7 has no tokens; valid: rows with one token or more"):
            collator([{"number": 7, "documents": row}])
    for row, says in (([{"input_ids": [5]}], "document 0 of row 7 has no labels"), ([document, {**document, "loss_mask": [0, 1]}], "document 0 of row 7 has no loss_mask")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{says}; valid: documents with input_ids, labels"):
            collator([{"number": 7, "documents": row}])


@pytest.mark.parametrize("kind", ["Gemma3Config", "Llama4Config", "Mistral3Config"])
def test_configurations_of_several_models_are_refused_by_name(kind: str) -> None:
    import transformers

    config = getattr(transformers, kind)()
    with pytest.raises(ConfigError, match=f"model_type is '{config.model_type}': .*; valid: "):
        cp.PlannedCollator(config, SimpleNamespace(mesh=[0]))


def test_the_collator_takes_one_row() -> None:
    collator = cp.PlannedCollator(make_config("llama"), None)
    with pytest.raises(ConfigError, match="the collator got 2 rows; valid: 1 row of RepeatedRows"):
        collator(list(cp.RepeatedRows(rows(), 1))[:2])
