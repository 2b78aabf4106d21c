"""install_model: set up a built model for planned batches, whose hidden states may move around attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn
from torch.nn.functional import pad

from mindspeed_cp.comm.group_transport import GroupTransport
from mindspeed_cp.engine.hidden_states import hidden_redistribution, redistribute_hidden
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.core_attention import PlannedAttention
from mindspeed_cp.megatron.adaptors.latent import PlannedMLASelfAttention
from mindspeed_cp.megatron.adaptors.loss import compare_token_counts
from mindspeed_cp.megatron.adaptors.multi_token import install_multi_token
from mindspeed_cp.megatron.adaptors.packed import PackedPlanner
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.adaptors.rotary import LatentRotary, MultimodalRotary, PlannedRotary
from mindspeed_cp.megatron.adaptors.router import give_padding_to_recomputed
from mindspeed_cp.megatron.mindspeed_compat import check_mindspeed, rotation_operator

ModelT = TypeVar("ModelT", nn.Module, Sequence[nn.Module])

Arguments = tuple[Any, ...]  # of a call of the model
Call = tuple[Arguments, dict[str, Any]]


def install_model(model: ModelT) -> ModelT:
    """Take rotary positions from the plan of each batch, and move hidden states to the rows of attention where linear
    layers have their own layout; call it once for every model built from an installed spec.

    Replaces the model's ``rotary_pos_emb`` by :class:`PlannedRotary` in place, tells every PlannedAttention about it,
    and puts hooks around every self attention (:class:`HiddenMove`) and before the model, where plain PackedSeqParams
    get their plans, and the plans of a micro-batch begin to be compared over the ranks. The token counts of the loss
    function are compared before Megatron divides by them. Multi-token prediction takes tokens, labels and loss masks of
    later positions by the plan; Megatron's functions are patched for that during the forward alone. Models with learned
    positions or none need the call too. A second call changes nothing.

    Args:
        model: a GPTModel, bare or wrapped (DDP, Float16Module), or a list of them (virtual pipeline stages).

    Returns:
        The model itself.

    Raises:
        ConfigError: the model has layers but no planned attention, some other attention, or rotary positions that a
        plan cannot give.
    """
    check_mindspeed()
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    if not sum([_install_chunk(chunk) for chunk in chunks]) and not all(_has_no_layers(chunk) for chunk in chunks):
        raise ConfigError(
            "install_model: the model has no planned attention; build it from install(spec, suite), the spec with "
            "planned attention"
        )
    return model


def _has_no_layers(chunk: nn.Module) -> bool:
    """Return True for a pipeline stage that has the embedding or the loss alone: nothing attends there."""
    blocks = [module for module in chunk.modules() if isinstance(module, TransformerBlock)]
    return bool(blocks) and not any(len(block.layers) for block in blocks)


def _install_chunk(chunk: nn.Module) -> int:
    """Install one model; return the number of its planned attentions."""
    attentions: list[PlannedAttention] = []
    latent: list[PlannedMLASelfAttention] = []
    for name, module in chunk.named_modules():
        if isinstance(module, PlannedAttention):
            attentions.append(module)
        elif isinstance(module, Attention):
            if not isinstance(module.core_attention, PlannedAttention):
                raise ConfigError(
                    f"install_model: {name}.core_attention is {type(module.core_attention).__name__}; valid: "
                    "PlannedAttention in every layer, from install(spec, suite); in Megatron 0.19 --attention-backend "
                    "local puts another there"
                )
            HiddenMove.install(module)
            if isinstance(module, PlannedMLASelfAttention):
                latent.append(module)
    rotary = _replace_latent_rotaries(latent) or _replace_rotary(chunk)
    if attentions and not attentions[0].installed:
        planner = PackedPlanner(attentions[0].packed.suite, (attention.attention for attention in attentions))
        for attention in attentions:
            attention.packed = planner
        chunk.register_forward_pre_hook(_look_at_batch(attentions[0]), with_kwargs=True)
        give_padding_to_recomputed(chunk)
    for attention in attentions:
        attention.use_rotary(rotary)
        operator = rotation_operator(attention.config)
        if attention.rotary is not None and operator is not None:
            attention.rotary.rotary_mul = operator  # type: ignore[assignment]
    install_multi_token(chunk, attentions[0] if attentions else None)
    cp_group = attentions[0].cp_group if attentions else parallel_state.get_context_parallel_group(False)
    if cp_group is not None:
        compare_token_counts(chunk, cp_group)
    return len(attentions)


def _look_at_batch(attention: PlannedAttention) -> Callable[[nn.Module, Arguments, dict[str, Any]], Call | None]:
    """Return a hook that starts to compare a micro-batch's plans over the ranks while the first layers compute; before,
    it makes those of plain PackedSeqParams. With mrope the model gets parameters with its positions."""

    def hook(model: nn.Module, arguments: Arguments, keywords: dict[str, Any]) -> Call | None:
        given = next((x for x in (*arguments, *keywords.values()) if isinstance(x, PackedSeqParams)), None)
        if given is None:
            return None  # the layers refuse it
        second = arguments[1] if len(arguments) > 1 else None  # of GPTModel.forward
        position_ids = keywords.get("position_ids", second)
        params = given
        if not isinstance(params, PlannedBatchParams):
            params = attention.packed.planned(params, attention.cp_group)
            attention.packed.check_positions(params, position_ids)
        rotary = attention.rotary
        if isinstance(rotary, MultimodalRotary):
            params = rotary.with_positions(params, position_ids)
        attention.announce(params, next(model.parameters()))
        if not isinstance(rotary, MultimodalRotary) or params is given:
            return None
        named = {name: params if value is given else value for name, value in keywords.items()}
        return tuple(params if value is given else value for value in arguments), named

    return hook


def _replace_latent_rotaries(layers: Sequence[PlannedMLASelfAttention]) -> PlannedRotary | None:
    """Replace the rotary modules of multi-latent attention, which are made of the same settings, in place by one, with
    one cos and sin for all layers; return it, None for other models."""
    rotary: Any = layers[0].rotary_pos_emb if layers else None
    if layers and not isinstance(rotary, LatentRotary):
        rotary = LatentRotary(rotary, layers[0].config.qk_pos_emb_head_dim)
    for layer in layers:
        layer.rotary_pos_emb = rotary
    return rotary


def _replace_rotary(chunk: nn.Module) -> PlannedRotary | None:
    """Replace the rotary module of Megatron's model in place and return it; None if the model has none."""
    rotaries: dict[int, PlannedRotary] = {}
    children = [(parent, name, child) for parent in chunk.modules() for name, child in parent.named_children()]
    for parent, name, child in children:
        if isinstance(parent, (PlannedRotary, PlannedAttention)) or isinstance(child, LatentRotary):
            continue
        if isinstance(child, (RotaryEmbedding, MultimodalRotaryEmbedding)):
            if type(child) is MultimodalRotaryEmbedding:
                child = MultimodalRotary(child, getattr(parent, "mrope_section", None))
            elif type(child) in (RotaryEmbedding, YarnRotaryEmbedding):
                child = PlannedRotary(child)
            else:
                raise ConfigError(
                    f"install_model: the model's {name} is a {type(child).__name__}; valid: RotaryEmbedding "
                    "(position_embedding_type 'rope', with rope_scaling if wanted), YarnRotaryEmbedding ('yarn'), "
                    "MultimodalRotaryEmbedding ('mrope'), or no rotary positions"
                )
            setattr(parent, name, child)
        if isinstance(child, PlannedRotary):
            rotaries[id(child)] = child
    if len(rotaries) > 1:
        raise ConfigError(
            f"install_model: the model has {len(rotaries)} rotary modules; valid: one, shared by all layers"
        )
    return next(iter(rotaries.values()), None)


class HiddenMove:
    """Hooks around one self attention module; they do nothing for batches whose plan has no linear layout.

    Where it has one, batch, embeddings, norms outside attention, MLP, experts and loss run on `plan.linear_layout`:
    equally many tokens on every rank. The module's input moves to `plan.layout`, its output back, as one all-to-all-v
    each::

        residual [linear] ── norm ──► move ──► q, k, v ── attention ── projection ──► move back ──► + residual [linear]
                                      └──────── rows of plan.layout ────────┘

    Under sequence parallelism a tensor-parallel rank has a share of its context-parallel rank's rows, and shares move
    between all tensor- and context-parallel ranks, none twice. Without it every tensor-parallel rank has all rows, and
    moves them among its context-parallel ranks.

    Args:
        core: the module's core attention.
        tp_cp: tensor- and context-parallel ranks, numbered tensor-parallel first; default: Megatron's.
    """

    def __init__(self, core: PlannedAttention, tp_cp: dist.ProcessGroup | None = None) -> None:
        self._core, self._tp_cp = core, tp_cp

    @staticmethod
    def install(module: Attention) -> None:
        """Add the hooks to a module whose core attention is planned; a second call changes nothing."""
        if getattr(module, "moves_hidden", None) is None:
            move = HiddenMove(module.core_attention, getattr(getattr(module, "pg_collection", None), "tp_cp", None))
            module.moves_hidden = move
            module.register_forward_pre_hook(move.before, with_kwargs=True)
            module.register_forward_hook(move.after, with_kwargs=True)

    def before(
        self, module: Attention, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the module's arguments with hidden states in the rows of attention."""
        params = named.get("packed_seq_params")
        if not _has_linear_layout(params):
            return None
        self._core.check_before_move(params, arguments[0] if arguments else named["hidden_states"])
        if arguments:
            return (self._moved(arguments[0], params, to_attention=True), *arguments[1:]), named
        return arguments, {**named, "hidden_states": self._moved(named["hidden_states"], params, to_attention=True)}

    def after(self, module: Attention, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> Any:
        """Return the module's result, an output or (output, bias), in the rows of linear layers."""
        params = named.get("packed_seq_params")
        if not _has_linear_layout(params):
            return None
        if isinstance(result, tuple):
            return self._moved(result[0], params, to_attention=False), *result[1:]
        return self._moved(result, params, to_attention=False)

    def _moved(self, x: Tensor, params: PlannedBatchParams, to_attention: bool) -> Tensor:
        """Return hidden states [s, 1, hidden], padding included, in the other layout."""
        group, rank, shares = self._ranks(params)
        lengths = [
            (params.linear_rows + params.linear_padding) // shares,
            (params.rows + params.padding) // shares,
        ]
        before, after = lengths if to_attention else lengths[::-1]
        if list(x.shape[:2]) != [before, 1]:
            raise ConfigError(
                f"hidden states have shape {list(x.shape)}, but rank {params.rank} of the plan has [{before}, 1, "
                "hidden] here, rows of padding included; slice the batch with the same plan, rank and options as its "
                "parameters: planned_batch does both"
            )
        remap = hidden_redistribution(params.plan, rank, x.device, shares, params.rows_multiple)
        remap = remap if to_attention else remap[::-1]
        transport = GroupTransport(group, self._core.suite.timeout_seconds, x.device)
        label = "hidden states to attention" if to_attention else "hidden states to linear layers"
        out = redistribute_hidden(x[: remap[1].out_shape[0]], remap, transport, label)
        return out if len(out) == after else pad(out, (0, 0, 0, 0, 0, after - len(out)))

    def _ranks(self, params: PlannedBatchParams) -> tuple[dist.ProcessGroup, int, int]:
        """Return the group in which rows move, this rank's number in it, and the ranks that share the rows of a
        context-parallel rank."""
        config = self._core.config
        shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
        plan_group = self._core.group_of(params)
        if shares == 1:
            return plan_group, params.rank, 1
        if params.rows_multiple % shares:
            raise ConfigError(
                f"rows_multiple is {params.rows_multiple}; valid under sequence parallelism: a multiple of "
                f"tensor_model_parallel_size, {shares}; pass planned_batch(..., rows_multiple=rows_multiple(config))"
            )
        group = self._tp_cp or parallel_state.get_tensor_and_context_parallel_group()
        if params.pooled:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        rank = params.rank * shares + self._core.tp_group.rank()
        if (dist.get_world_size(group), dist.get_rank(group)) != (plan_group.size() * shares, rank):
            raise ConfigError(
                f"this rank is number {dist.get_rank(group)} of the tensor- and context-parallel ranks; valid with "
                f"sequence parallelism and a linear layout of its own: {rank}, in Megatron's order 'tp-cp-...'; or "
                "move q, k and v (mode 'qkv')"
            )
        return group, rank, shares


def _has_linear_layout(params: Any) -> TypeGuard[PlannedBatchParams]:
    return isinstance(params, PlannedBatchParams) and params.plan.linear_layout is not None
