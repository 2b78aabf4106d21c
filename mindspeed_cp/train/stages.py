"""The parts of a model that a rank holds: one, or one for each virtual stage of its pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from mindspeed_cp.config.derived import layers_of_stage
from mindspeed_cp.config.rules import VOCAB_SIZE_DIVISIBLE_BY
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import VOCAB_SIZE
from mindspeed_cp.megatron import install, install_model, local_spec, megatron_imports
from mindspeed_cp.megatron.adaptors.local import stage_arguments
from mindspeed_cp.train.fused_operators import FusedOperators
from mindspeed_cp.train.world import World

with megatron_imports():
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer


class SeededLayer(TransformerLayer):
    """A layer whose initial weights depend on its seed only, not on the layers that its rank makes before it.

    Args:
        initial_seed: seed of the CPU's generator while the layer is made.
        arguments: those of TransformerLayer.
    """

    def __init__(self, *arguments: Any, initial_seed: int, **named: Any) -> None:
        torch.default_generator.manual_seed(initial_seed)
        super().__init__(*arguments, **named)


def build_stage_models(
    settings: Settings, config: TransformerConfig, world: World, fused: FusedOperators
) -> list[GPTModel]:
    """Return the parts of the model that this rank holds, on its device, with planned attention.

    A weight has the same initial value for any number of ranks and stages.

    Raises:
        ConfigError: Megatron or planned attention cannot honour a setting.
    """
    virtual_stages = settings.train.virtual_pipeline_model_parallel_size
    return [_build(settings, config, world, fused, number) for number in range(virtual_stages)]


def _build(settings: Settings, config: TransformerConfig, world: World, fused: FusedOperators, number: int) -> GPTModel:
    """Return the model of virtual stage `number`."""
    model, seed = settings.model, settings.train.seed
    virtual_stages = settings.train.virtual_pipeline_model_parallel_size
    alibi = model.position_embedding_type == "alibi"
    vp_stage = number if virtual_stages > 1 else None
    layers = layers_of_stage(model.num_layers, world.stages, virtual_stages, world.stage, number)
    with _virtual_stage(vp_stage):
        spec = install(local_spec(config, vp_stage, norm=fused.norm), settings.context_parallel_suite, alibi=alibi)
        torch.default_generator.manual_seed(seed)
        gpt = GPTModel(
            config,
            _seeded(spec, seed, layers),
            vocab_size=padded_vocabulary(),
            max_sequence_length=settings.data.seq_length,
            pre_process=layers.start == 0,
            post_process=layers.stop == model.num_layers,
            position_embedding_type="none" if alibi else model.position_embedding_type,
            rotary_base=model.rotary_base,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            **stage_arguments(GPTModel, vp_stage),
        )
    numbers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
    if numbers != list(layers):
        raise NotImplementedError(f"Megatron gives virtual stage {number} the layers {numbers}, not {list(layers)}")
    install_model(gpt)
    fused.use_in_model(gpt)
    return gpt.to(world.device)


def _seeded(spec: TransformerBlockSubmodules, seed: int, layers: Sequence[int]) -> TransformerBlockSubmodules:
    """Return the spec with a seed for each layer, which depends on the run's and on the layer's number."""
    specs = [
        ModuleSpec(
            module=SeededLayer,
            params={**layer.params, "initial_seed": int(np.random.SeedSequence([seed, number]).generate_state(1)[0])},
            submodules=layer.submodules,
        )
        for layer, number in zip(spec.layer_specs, layers, strict=True)
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=spec.layer_norm)


@contextmanager
def _virtual_stage(number: int | None) -> Iterator[None]:
    """Tell Megatron within the block which virtual stage is made; before 0.14 it asks parallel_state alone."""
    if number is None:
        yield
        return
    before = parallel_state.get_virtual_pipeline_model_parallel_rank()
    parallel_state.set_virtual_pipeline_model_parallel_rank(number)
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_rank(before)


def padded_vocabulary() -> int:
    """Return the rows of the embedding: byte values and the end-of-document token, padded so that tensor-parallel ranks
    can share them. The number does not depend on these ranks, as padded rows take part in the softmax."""
    return -(-VOCAB_SIZE // VOCAB_SIZE_DIVISIBLE_BY) * VOCAB_SIZE_DIVISIBLE_BY


def count_parameters(models: Sequence[nn.Module], settings: Settings, world: World) -> int:
    """Return the number of weights of the whole model, shared ones counted once; every rank must call it.

    Tensor-parallel ranks hold parts of matrices, a rank holds only its own experts, and the last pipeline stage may
    hold a copy of the first one's embedding.
    """
    total = 0
    for model in models:
        for name, parameter in model.named_parameters():
            if getattr(parameter, "shared", False):
                continue
            shared_by = world.tp_size if getattr(parameter, "tensor_model_parallel", False) else 1
            is_expert = ".local_experts." in name
            total += parameter.numel() * (settings.train.expert_model_parallel_size if is_expert else shared_by)
    return int(world.gather([float(total)])[:: world.stage_size].sum())
