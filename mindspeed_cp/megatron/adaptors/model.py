"""install_model: one call that sets up a built model for planned batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.attention import Attention
from torch import nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.core_attention import PlannedAttention
from mindspeed_cp.megatron.hidden import HiddenMove
from mindspeed_cp.megatron.latent import PlannedMLASelfAttention
from mindspeed_cp.megatron.rotary import LatentRotary, PlannedRotary

ModelT = TypeVar("ModelT", nn.Module, Sequence[nn.Module])


def install_model(model: ModelT) -> ModelT:
    """Let rotary positions come from the plan of each batch, and hidden states move to attention's rows where linear
    layers have their own; needed once for every model built from an installed spec.

    Replaces the model's ``rotary_pos_emb`` by :class:`PlannedRotary` in place, tells every PlannedAttention about it,
    and puts hooks around every self attention (:class:`mindspeed_cp.megatron.hidden.HiddenMove`). Models with learned
    positions or none need the call too: it is what says so. Calling it again changes nothing.

    Args:
        model: a GPTModel, bare or wrapped (DDP, Float16Module), or a list of them (virtual pipeline stages).

    Returns:
        The model itself.

    Raises:
        ConfigError: the model has no planned attention, some other attention, or rotary positions that a plan cannot
        give.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    found = sum([_install_chunk(chunk) for chunk in chunks])
    if not found:
        raise ConfigError(
            "install_model: the model has no planned attention; build it from install(spec, suite), the spec with "
            "planned attention"
        )
    return model


def _install_chunk(chunk: nn.Module) -> int:
    """Install one model; how many planned attentions it has."""
    attentions: list[PlannedAttention] = []
    latent: list[PlannedMLASelfAttention] = []
    for name, module in chunk.named_modules():
        if isinstance(module, PlannedAttention):
            attentions.append(module)
        elif isinstance(module, Attention):
            if not isinstance(module.core_attention, PlannedAttention):
                raise ConfigError(
                    f"install_model: {name}.core_attention is {type(module.core_attention).__name__}; valid: "
                    "PlannedAttention in every layer, from install(spec, suite)"
                )
            HiddenMove.install(module)
            if isinstance(module, PlannedMLASelfAttention):
                latent.append(module)
    of_layers = _replace_latent_rotaries(latent)
    rotary = _replace_rotary(chunk)
    for attention in attentions:
        attention.use_rotary(of_layers.get(id(attention), rotary))
    return len(attentions)


def _replace_latent_rotaries(layers: Sequence[PlannedMLASelfAttention]) -> dict[int, LatentRotary]:
    """Replace the rotary module of every layer of multi-latent attention, in place; layers that rotate alike share one.
    By the id of the layer's core attention."""
    made: list[LatentRotary] = []
    found = {}
    for layer in layers:
        rotary = layer.rotary_pos_emb
        if not isinstance(rotary, LatentRotary):
            rotary = LatentRotary(rotary, layer.config.qk_pos_emb_head_dim)
        rotary = next((other for other in made if other.is_like(rotary)), rotary)
        made.append(rotary)
        layer.rotary_pos_emb = rotary
        found[id(layer.core_attention)] = rotary
    return found


def _replace_rotary(chunk: nn.Module) -> PlannedRotary | None:
    """Replace the rotary module of Megatron's model, in place; None if it has none."""
    found: dict[int, PlannedRotary] = {}
    places = [(parent, name, child) for parent in chunk.modules() for name, child in parent.named_children()]
    for parent, name, child in places:
        if isinstance(parent, (PlannedRotary, PlannedAttention)) or isinstance(child, LatentRotary):
            continue
        if isinstance(child, (RotaryEmbedding, MultimodalRotaryEmbedding)):
            if type(child) not in (RotaryEmbedding, YarnRotaryEmbedding):
                raise ConfigError(
                    f"install_model: the model's {name} is a {type(child).__name__}; valid: RotaryEmbedding "
                    "(position_embedding_type 'rope', with rope_scaling if wanted), YarnRotaryEmbedding ('yarn'), or "
                    "no rotary positions"
                )
            if type(child) is YarnRotaryEmbedding and not hasattr(child, "get_emb"):
                raise ConfigError(f"install_model: the model's {name} is YaRN's; valid: megatron-core 0.16 or later")
            child = PlannedRotary(child)
            setattr(parent, name, child)
        if isinstance(child, PlannedRotary):
            found[id(child)] = child
    if len(found) > 1:
        raise ConfigError(f"install_model: the model has {len(found)} rotary modules; valid: one, shared by all layers")
    return next(iter(found.values()), None)
