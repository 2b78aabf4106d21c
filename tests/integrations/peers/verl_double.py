"""A double of verl's FSDP engine, for environments without verl.

Source: class ``FSDPEngineWithLMHead`` of verl 0.9.1, verl/workers/engine/fsdp/transformer_impl.py: the attributes that
``planned_engine`` reads, and a step in the order in which the engine calls the methods that it overrides. The double has
no Ulysses of its own: it fails where it is asked to slice or gather over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.integrations.huggingface.models import make_model


class Engine:
    """One rank of an engine.

    Args:
        config: the model's configuration.
        mesh: device mesh with the dimension "sp".
        bucket: rows are padded to a multiple of this, as with the engine's ``pad_to_length``.
    """

    def __init__(self, config: Any, mesh: Any, bucket: int = 1) -> None:
        self.config, self.bucket = config, bucket
        self.ulysses_device_mesh = mesh
        self.ulysses_sequence_parallel_size = mesh["sp"].size()
        self.use_ulysses_sp = self.ulysses_sequence_parallel_size > 1
        self.module = self._build_module()

    def _build_module(self) -> torch.nn.Module:
        assert self.ulysses_sequence_parallel_size == 1, "the double has no attention over several ranks"
        return make_model(self.config, "sdpa")

    def prepare_model_inputs(self, micro_batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs of the model, and what the outputs need: tokens one ahead, temperatures, the padding at the end."""
        assert not self.use_ulysses_sp, "the double slices no rows"
        documents = micro_batch["input_ids"]
        ids = torch.cat(documents)[None]
        positions = torch.cat([torch.arange(len(tokens)) for tokens in documents])[None]
        ahead, padding = torch.roll(ids, -1, 1), -ids.shape[1] % self.bucket
        temperature = torch.full((1, ids.shape[1] + padding), micro_batch["temperature"])
        ids, ahead = (torch.nn.functional.pad(x, (0, padding)) for x in (ids, ahead))
        positions = torch.cat([positions, torch.arange(padding)[None]], 1)
        inputs = {"input_ids": ids, "attention_mask": None, "position_ids": positions}
        return inputs, {
            "pad_size": padding,
            "input_ids_rmpad_rolled": ahead.squeeze(0),
            "temperature_rmpad": temperature.squeeze(0),
        }

    def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Tensor:
        assert not self.use_ulysses_sp, "the double gathers no rows"
        return tensor[:-pad_size] if pad_size else tensor

    def forward_step(self, micro_batch: dict[str, Any]) -> Tensor:
        """Log-probability of each token's successor in the packed row, [tokens]."""
        inputs, outputs = self.prepare_model_inputs(micro_batch)
        logits = self.module(**inputs, use_cache=False).logits.squeeze(0)
        logits = logits / outputs["temperature_rmpad"][:, None]
        log_probs = logits.log_softmax(-1).gather(1, outputs["input_ids_rmpad_rolled"][:, None])[:, 0]
        return self._gather_and_unpad_packed(log_probs, outputs["pad_size"])
