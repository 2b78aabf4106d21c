"""transformers' Trainer with planned attention: a data set, a collator and a callback.

The Trainer gives each process the next row of the data set and knows no context-parallel groups. So every packed row
comes once for each rank of a group, one after the other, and the collator keeps this rank's part of it::

    rows = [[document, ...], ...]                           # packed rows: {"input_ids": [...], "labels": [...]}
    collator = PlannedCollator(model.config, mesh["cp"])
    Trainer(model, arguments, data_collator=collator, train_dataset=RepeatedRows(rows, mesh["cp"].size()),
            callbacks=[planned_callback(collator)])

Processes of a group have consecutive ranks, as in ``init_device_mesh(device, (replicas, ranks))``. The loss is that of
the model: shift_labels say what each row predicts, and the Trainer divides by the labels of all processes. Evaluation,
with the rows in RepeatedRows as well, gives the mean over steps, each the mean over the labels of all processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.batch import planned_batch
from mindspeed_cp.integrations.huggingface.families import dropout_rate

#: Settings of TrainingArguments, or of what they hold, with their only valid value and why.
_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("train_sampling_strategy", "sequential", "the ranks of a group take the same row; shuffle the rows yourself"),
    ("dataloader_num_workers", 0, "a plan is bound to the process groups of this process"),
    ("remove_unused_columns", False, "rows are lists of documents"),
    ("average_tokens_across_devices", True, "the loss is divided by the labels of all processes"),
    ("label_smoothing_factor", 0.0, "the Trainer would shift labels itself"),
    ("accelerator_config.dispatch_batches", None, "each process cuts its own rows; a plan cannot be sent"),
    ("accelerator_config.split_batches", False, "a row of the data set is one packed row of one process"),
)


class RepeatedRows(Dataset[dict[str, Any]]):
    """Packed rows, each once for every rank of a context-parallel group.

    Args:
        rows: packed rows; each is a list of documents with input_ids, labels and, in all of them, other keys of
            planned_batch such as loss_mask; each [tokens].
        ranks: context-parallel ranks.
    """

    def __init__(self, rows: Sequence[Sequence[Mapping[str, Any]]], ranks: int) -> None:
        self._rows, self._ranks = rows, ranks

    def __len__(self) -> int:
        return len(self._rows) * self._ranks

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = index // self._ranks
        return {"number": number, "documents": self._rows[number]}


class PlannedCollator:
    """Packs the documents of a row, builds their plans, and keeps this rank's part.

    Args:
        config: the model's configuration.
        mesh: device mesh of the context-parallel ranks.
        algorithm: as for build_plans.
        seed: of attention dropout; other rows and epochs drop other weights.
        arguments: as for planned_batch.
    """

    def __init__(
        self, config: Any, mesh: Any, algorithm: str = "hierarchical", seed: int = 0, **arguments: Any
    ) -> None:
        self.config, self.mesh, self.algorithm, self.seed, self.arguments = config, mesh, algorithm, seed, arguments
        self.epoch = 0
        self._dropout_rate = dropout_rate(config)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the keyword arguments of the model for one row.

        Raises:
            ConfigError: there are several rows, or the row has no tokens or documents with other keys.
        """
        if len(rows) != 1 or "documents" not in rows[0]:
            raise ConfigError(
                f"the collator got {len(rows)} rows; valid: 1 row of RepeatedRows, with per_device_train_batch_size=1 "
                "and per_device_eval_batch_size=1"
            )
        documents = rows[0]["documents"]
        if not isinstance(documents, Sequence):
            raise ConfigError(
                f"row {rows[0]['number']} is a {type(documents).__name__}; valid under the Trainer, whose loss is the "
                "model's own: lists of documents; for trees a loop of your own with planned_trajectories and tree_loss"
            )
        names = dict.fromkeys(("input_ids", "labels", *(name for document in documents for name in document)))
        for index, document in enumerate(documents):
            missing = [name for name in names if name not in document]
            if missing:
                raise ConfigError(
                    f"document {index} of row {rows[0]['number']} has no {missing[0]}; valid: documents with "
                    f"{', '.join(names)}, alike in a row"
                )
        documents = [document for document in documents if len(document["input_ids"])]
        if not documents:
            raise ConfigError(f"row {rows[0]['number']} has no tokens; valid: rows with one token or more")
        batch = {name: torch.cat([torch.as_tensor(document[name]) for document in documents])[None] for name in names}
        lengths = [len(document["input_ids"]) for document in documents]
        batch["cu_seq_lens_q"] = torch.tensor([0, *lengths]).cumsum(0)
        seed = np.random.SeedSequence([self.seed, self.epoch, rows[0]["number"]]).generate_state(1, np.uint32)[0]
        arguments = {"dropout_seed": int(seed), **self.arguments} if self._dropout_rate else self.arguments
        cut, labels = planned_batch(batch, self.config, self.mesh, self.algorithm, **arguments)
        return {**cut, "labels": labels, "shift_labels": labels}


def planned_callback(collator: PlannedCollator) -> Any:
    """Return a TrainerCallback that checks the Trainer's settings and tells the collator the epoch.

    Raises:
        ConfigError: when the training begins, if a setting of the Trainer or the model does not work with planned
            batches; names it.
    """
    from transformers import TrainerCallback

    class PlannedCallback(TrainerCallback):
        is_training, has_evaluated = False, False

        def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.has_evaluated = self.has_evaluated or not self.is_training

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.is_training = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if self.has_evaluated and args.world_size > 1:
                raise ConfigError(
                    "evaluate() or predict() came before train(), after which the Trainer trains the model of each "
                    "process by itself, without DDP; valid: train() first (eval_on_start=True evaluates before its "
                    "first step), or another Trainer and model for the evaluation"
                )
            self.is_training = True
            for name, valid, why in _SETTINGS:
                value = reduce(lambda holder, part: getattr(holder, part, valid), name.split("."), args)
                if value != valid and (value or valid is not None):
                    raise ConfigError(f"{name} is {value!r}; valid with planned batches: {valid!r} ({why})")
            model = others.get("model")
            if getattr(getattr(model, "config", None), "output_router_logits", False):
                raise ConfigError(
                    "output_router_logits is True; valid under the Trainer with planned batches: False: the model adds "
                    "an auxiliary loss of each rank's rows, with a weight that would grow with the number of ranks"
                )

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            collator.epoch = int(state.epoch or 0)

    return PlannedCallback()
