"""A stand-in for the arguments of Megatron's training scripts, and a micro-batch of theirs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from mindspeed_cp import Documents
from mindspeed_cp.megatron import shift_labels
from tests.megatron.gpt import VOCABULARY, transformer_config

LENGTHS = ((5, 11, 8), (24,))  # of the two rows
TABLE = torch.tensor([[0, 5, 16, 24], [0, 24, 24, 24]], dtype=torch.int32)
#: Ends of documents, without and with padding.
PADDED = {"cu_seqlens": torch.tensor([[0, 4, 14, 22], [0, 24, 24, 24]], dtype=torch.int32), "cu_seqlens_padded": TABLE}


class Timer:
    def start(self) -> None: ...
    def stop(self) -> None: ...


def stand_in(path: str) -> tuple[dict[str, ModuleType], Callable[..., Namespace]]:
    """Modules that stand for megatron.training, and a function that sets the arguments of Megatron's script.

    There is no curr_iteration, which Megatron sets where it trains.
    """
    module: Any = ModuleType("megatron.training")
    arguments: Any = ModuleType("megatron.training.arguments")

    def start(**changes: Any) -> Namespace:
        values: dict[str, Any] = dict(
            cp_plan=path, cp_plan_set=[], context_parallel_size=1, tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, sequence_parallel=False,
            expert_model_parallel_size=1, num_experts=None, multi_latent_attention=False, q_lora_rank=None,
            reset_position_ids=True, reset_attention_mask=True, create_attention_mask_in_dataloader=False,
            calculate_per_token_loss=True, apply_rope_fusion=False, cp_comm_type=["p2p"], position_embedding_type="rope",
            transformer_impl="local", attention_backend="auto", yaml_cfg=None, seed=3, sft=False,
            spec=None, check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=False, variable_seq_lengths=False,
        )  # fmt: skip
        namespace = Namespace(**{**values, **changes})
        module.get_args = lambda: namespace
        module.get_timers = lambda: lambda name, log_level=0: Timer()
        arguments.core_transformer_config_from_args = lambda args: transformer_config()
        return namespace

    start()
    return {module.__name__: module, arguments.__name__: arguments}, start


def rows() -> dict[str, torch.Tensor]:
    """A micro-batch as Megatron's data set gives it, and positions that restart in every document."""
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    labels, mask = shift_labels(tokens, Documents([n for row in LENGTHS for n in row]))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
