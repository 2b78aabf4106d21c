"""Hidden states on their way into a self attention module and out of it, where linear layers have their own layout.

Batch, embeddings, norms outside attention, MLP, experts and loss run on `plan.linear`: equally many tokens on every
rank. The module's input moves to `plan.layout`, its output back, as one all-to-all-v each::

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

from mindspeed_cp.comm import Transport
from mindspeed_cp.engine.remap import remap_of, remapped
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.core_attention import PlannedAttention
from mindspeed_cp.megatron.params import PlannedBatchParams


class HiddenMove:
    """The hooks around one self attention module; they do nothing for batches whose plan has no linear layout.

    Args:
        core: the module's core attention.
        tp_cp: tensor- and context-parallel ranks, numbered tensor-parallel first; default: Megatron's.
    """

    def __init__(self, core: PlannedAttention, tp_cp: dist.ProcessGroup | None = None) -> None:
        self._core, self._tp_cp = core, tp_cp

    @staticmethod
    def install(module: Attention) -> None:
        """Put the hooks around a module whose core attention is planned; once, however often it is called."""
        if getattr(module, "moves_hidden", None) is None:
            move = HiddenMove(module.core_attention, getattr(getattr(module, "pg_collection", None), "tp_cp", None))
            module.moves_hidden = move
            module.register_forward_pre_hook(move.before, with_kwargs=True)
            module.register_forward_hook(move.after, with_kwargs=True)

    def before(
        self, module: Attention, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The module's arguments with hidden states of attention's rows."""
        params = named.get("packed_seq_params")
        if not _moves(params):
            return None
        self._core.check_before_move(params, given[0] if given else named["hidden_states"])
        if given:
            return (self._moved(given[0], params, there=True), *given[1:]), named
        return given, {**named, "hidden_states": self._moved(named["hidden_states"], params, there=True)}

    def after(self, module: Attention, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> Any:
        """The module's result with rows of linear layers: its output, or (output, bias)."""
        params = named.get("packed_seq_params")
        if not _moves(params):
            return None
        if isinstance(result, tuple):
            return self._moved(result[0], params, there=False), *result[1:]
        return self._moved(result, params, there=False)

    def _moved(self, x: Tensor, params: PlannedBatchParams, there: bool) -> Tensor:
        """Hidden states [s, 1, hidden], padding included, in the other layout."""
        group, rank, shares = self._ranks(params)
        lengths = [
            (params.linear_length + params.linear_padding) // shares,
            (params.length + params.padding) // shares,
        ]
        before, after = lengths if there else lengths[::-1]
        if list(x.shape[:2]) != [before, 1]:
            raise ConfigError(
                f"hidden states have shape {list(x.shape)}, but rank {params.rank} of the plan has [{before}, 1, "
                "hidden] here, rows of padding included; slice the batch with the same plan, rank and options as its "
                "parameters: planned_batch does both"
            )
        assert params.plan is not None
        remap = remap_of(params.plan, rank, x.device, shares, params.rows_multiple)
        remap = remap if there else remap.turned
        transport = Transport(group, self._core.suite.timeout_seconds, x.device)
        what = "hidden states to attention" if there else "hidden states to linear layers"
        out = remapped(x[: remap.back.shape[0]], remap, transport, what)
        return out if len(out) == after else pad(out, (0, 0, 0, 0, 0, after - len(out)))

    def _ranks(self, params: PlannedBatchParams) -> tuple[dist.ProcessGroup, int, int]:
        """The ranks among which rows move, this one's number, and how many share a context-parallel rank's rows."""
        config = self._core.config
        shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
        if shares == 1:
            return self._core.cp_group, params.rank, 1
        if params.rows_multiple % shares:
            raise ConfigError(
                f"rows_multiple is {params.rows_multiple}; valid under sequence parallelism: a multiple of "
                f"tensor_model_parallel_size, {shares}; pass planned_batch(..., rows_multiple=rows_multiple(config))"
            )
        group = self._tp_cp or parallel_state.get_tensor_and_context_parallel_group()
        rank = params.rank * shares + self._core.tp_group.rank()
        if (dist.get_world_size(group), dist.get_rank(group)) != (self._core.cp_group.size() * shares, rank):
            raise ConfigError(
                f"this rank is number {dist.get_rank(group)} of the tensor- and context-parallel ranks; valid with "
                f"sequence parallelism and a linear layout of its own: {rank}, in Megatron's order 'tp-cp-...'; or "
                "move q, k and v (mode 'qkv')"
            )
        return group, rank, shares


def _moves(params: Any) -> TypeGuard[PlannedBatchParams]:
    return isinstance(params, PlannedBatchParams) and params.plan is not None and params.plan.linear is not None
