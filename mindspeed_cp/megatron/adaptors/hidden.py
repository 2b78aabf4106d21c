"""Redistribution of hidden states around a self attention module, where linear layers have their own layout.

Batch, embeddings, norms outside attention, MLP, experts and loss run on `plan.linear_layout`: equally many tokens on
every rank. The module's input moves to `plan.layout`, its output back, as one all-to-all-v each::

    residual [linear] ── norm ──► move ──► q, k, v ── attention ── projection ──► move back ──► + residual [linear]
                                  └──────── rows of plan.layout ────────┘

Under sequence parallelism a tensor-parallel rank has a share of its context-parallel rank's rows, and shares move
between all tensor- and context-parallel ranks, none twice. Without it every tensor-parallel rank has all rows, and
moves them among its context-parallel ranks.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.attention import Attention
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_cp.comm import GroupTransport
from mindspeed_cp.engine.hidden_states import hidden_redistribution, redistribute_hidden
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.core_attention import PlannedAttention
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams


class HiddenMove:
    """Hooks around one self attention module; they do nothing for batches whose plan has no linear layout.

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
        assert params.plan is not None
        remap = hidden_redistribution(params.plan, rank, x.device, shares, params.rows_multiple)
        remap = remap if to_attention else remap.reversed
        transport = GroupTransport(group, self._core.suite.timeout_seconds, x.device)
        label = "hidden states to attention" if to_attention else "hidden states to linear layers"
        out = redistribute_hidden(x[: remap.to_linear.out_shape[0]], remap, transport, label)
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
    return isinstance(params, PlannedBatchParams) and params.plan is not None and params.plan.linear_layout is not None
