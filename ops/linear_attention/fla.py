"""Linear attention by the Triton kernels of fla-core, on NVIDIA GPUs. Never run on a device by this project: tests run
it over functions with the signatures of fla-core 0.6."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.linear_attention.contract import SegmentTable, StateInputs
from mindspeed_cp.plan.states import StateConfig

#: Module and function of each kind.
FUNCTIONS = {
    "gated_delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
    "lightning": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "mamba2": ("fla.ops.simple_gla", "chunk_simple_gla"),
}

MOST_CHANNELS = 256  # of k, in the kernels

REMEDY = 'backend="torch" computes everywhere, slowly'


@dataclass(frozen=True, eq=False)
class _Prepared:
    x: StateInputs
    config: StateConfig
    table: SegmentTable


class FlaOperator:
    """The kernels of fla-core; its states are [heads, head_dim, head_dim_v].

    M of a segment is what the same kernel makes of the unit matrix where v is 0.
    """

    name = "fla"

    def check(self, config: StateConfig, dtype: torch.dtype, device: torch.device) -> None:
        """See :class:`mindspeed_cp.ops.linear_attention.StateOperator`."""
        if device.type != "cuda":
            raise ConfigError(f"backend is 'fla' with tensors on {device}; valid: tensors on a GPU; {REMEDY}")
        if dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(f"backend is 'fla' with {dtype}; valid: torch.bfloat16, torch.float16; {REMEDY}")
        if max(config.head_dim, config.head_dim_v) > MOST_CHANNELS:
            raise ConfigError(
                f"backend is 'fla' with head_dim {config.head_dim} and head_dim_v {config.head_dim_v}; valid: at most "
                f"{MOST_CHANNELS}; {REMEDY}"
            )
        _function(config.kind)

    def prepare(self, x: StateInputs, config: StateConfig, table: SegmentTable) -> _Prepared:
        """See :class:`mindspeed_cp.ops.linear_attention.StateOperator`."""
        if x.beta is not None and not config.has_delta:
            x = x._replace(v=(x.v * x.beta.unsqueeze(-1)).to(x.v.dtype), beta=None)
        return _Prepared(x, config, table)

    @torch.no_grad()
    def maps(self, prepared: _Prepared) -> tuple[Tensor, Tensor]:
        """See :class:`mindspeed_cp.ops.linear_attention.StateOperator`."""
        x, config, table = prepared.x, prepared.config, prepared.table
        heads, size = x.k.shape[1:]
        mapped, states = (x.v.new_empty((0, heads, *shape), dtype=torch.float32)
                          for shape in ((1, 1), (config.head_dim_v, size)))  # fmt: skip
        if len(table.carried):
            states = self._call(prepared, "carried", x, None)[1]
        if not len(table.mapped):
            return mapped, states
        if config.has_delta:
            eye = torch.eye(size, dtype=torch.float32, device=x.k.device).expand(len(table.mapped), heads, -1, -1)
            return self._call(prepared, "mapped", x._replace(v=torch.zeros_like(x.k)), eye.contiguous())[1], states
        numbers = np.repeat(np.arange(len(table.lengths)), table.lengths)
        segment = table.keep("segment of row", lambda: table.index(numbers))
        log = x.gate.new_zeros((len(table.lengths), heads), dtype=torch.float64).index_add(0, segment, x.gate.double())
        return log[table.keep("mapped", lambda: table.index(table.mapped))].exp().float()[:, :, None, None], states

    def run(self, prepared: _Prepared, entering: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`mindspeed_cp.ops.linear_attention.StateOperator`."""
        x, table = prepared.x, prepared.table
        if not len(table.lengths):
            return x.v * 1, entering[:0]
        state = None
        if len(table.entered):
            state = entering.new_zeros((len(table.lengths), *entering.shape[1:]))
            state = state.index_copy(0, table.keep("entered", lambda: table.index(table.entered)), entering)
        out, last = self._call(prepared, None, x, state)
        return out, last.index_select(0, table.keep("carried", lambda: table.index(table.carried)))

    def _call(
        self, prepared: _Prepared, name: str | None, x: StateInputs, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and last states, [heads, head_dim_v, head_dim], of all segments or of those of a name."""
        rows, offsets, offsets_cpu = _rows(prepared.table, name)
        arguments = {"q": x.q, "k": x.k, "v": x.v, "g": x.gate.float()}
        if x.beta is not None:
            arguments["beta"] = x.beta
        arguments = {name: (value if rows is None else value[rows])[None] for name, value in arguments.items()}
        out, last = _function(prepared.config.kind)(
            **arguments,
            scale=prepared.config.factor,
            initial_state=None if state is None else state.mT.contiguous(),
            output_final_state=True,
            cu_seqlens=offsets,
            cu_seqlens_cpu=offsets_cpu,  # without it the kernels read the other one back from the device
        )
        return out.squeeze(0), last.mT


def _rows(table: SegmentTable, name: str | None) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the rows of the segments of a name, None: all; their offsets on the device and on the host."""

    def build() -> tuple[Tensor | None, Tensor, Tensor]:
        segments = np.arange(len(table.lengths)) if name is None else getattr(table, name)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(table.lengths[segments])]))
        rows = None
        if len(segments) < len(table.lengths):
            runs = [np.arange(*table.offsets[s : s + 2]) for s in segments.tolist()]
            rows = table.index(np.concatenate(runs))
        return rows, offsets.to(table.device), offsets

    return table.keep(("rows", name), build)


def _function(kind: str) -> Any:
    """Return the function of a kind.

    Raises:
        ConfigError: fla-core is not installed, or of a release without it.
    """
    module, name = FUNCTIONS[kind]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "fla":
            raise
        raise ConfigError(f"fla-core is not installed: pip install 'mindspeed-cp[fla]'; or {REMEDY}") from None
    except AttributeError:
        raise ConfigError(f"fla-core has no {module}.{name}; valid: fla-core>=0.6; or {REMEDY}") from None
