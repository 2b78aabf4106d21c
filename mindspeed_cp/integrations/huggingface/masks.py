"""The mask that a model builds: carried to its layers, where the plan is at hand, and compared with the plan.

transformers describes the mask of a call by a function of (batch, head, query, key), from which an attention
implementation makes a tensor. Planned attention makes none; it evaluates the function on positions of documents::

    position   0 1 2 3 4 5       a causal plan, and a model whose mask lets image tokens 2 to 4 see each other:
    query 2    x x x ? ? .       differs at query 2, key 3

A function of positions alone is compared for documents of any length, wherever their rows are. One that reads tensors
over rows (token_type_ids, a padding mask) knows only the rows of its rank: it is compared where these are one document,
or where the tensors have one value, so that all rows are alike; else it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.plans import RankPlans
from mindspeed_cp.plan import Plan

#: Longest document whose pairs are all compared; of longer ones this many queries, each with several keys.
_ALL_PAIRS, _QUERIES, _ENDS = 64, 4096, 32

_BLOCKS = (
    "for tokens that see each other both ways, such as those of an image, plans of Documents(lengths, blocks=...), and "
    "rows without token_type_ids"
)


class ModelMask:
    """What a model passes to its layers as attention_mask: the function that says which keys a query sees.

    Attributes:
        function: of (batch, head, query, key), as transformers builds it.
        accepted: plans of this rank, and ids of the plans of layers, with which it was compared.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.accepted: set[tuple[RankPlans, int]] = set()

    @property
    def ndim(self) -> int:
        """No dimensions. Raises ConfigError: a wrapper gave its mask to a model that builds one from it."""
        raise ConfigError(
            "attention_mask is a mask that was built for planned attention, and the model would build another from it; "
            "valid: no attention_mask"
        )

    def __getitem__(self, index: tuple[slice, ...]) -> ModelMask:
        """Return the mask itself, for models that keep all rows by slices. Raises ConfigError for a part of it."""
        if any(part not in (slice(None), slice(0, None)) for part in index):
            raise ConfigError(f"the model wants a part of its mask, {index}; valid: all rows, logits_to_keep=0")
        return self


def planned_mask(*, mask_function: Any, attention_mask: Any = None, **others: Any) -> ModelMask:
    """Return what a model passes to its layers as attention_mask: the function that says what is visible.

    Raises:
        ConfigError: the batch has an attention_mask, which says that it has padding.
    """
    if attention_mask is not None:
        raise ConfigError(
            "attention_mask was given to a model with planned attention; valid: none; planned_batch leaves padding "
            "out, and the plan's documents say what is visible; for generation and other steps without plans "
            'model.set_attn_implementation("sdpa") ("eager" for gpt_oss)'
        )
    return ModelMask(mask_function)


def check_mask(label: str, mask: ModelMask, plan: RankPlans, layer_plan: Plan) -> None:
    """Compare the mask of a model with the plan of a layer; done once for each of both.

    Raises:
        ConfigError: they differ, or cannot be compared; names the layer, and a query and key.
    """
    if (plan, id(layer_plan)) in mask.accepted:
        return
    documents, attention = plan.plans.documents, layer_plan.attention
    length = int((documents.first_positions + documents.lengths).max(initial=0))
    queries, keys = compared_pairs(length, attention.window)
    visible, error, reads_rows = _evaluate(_without_packing(mask.function), queries, keys)
    lone = np.flatnonzero(documents.lengths) if documents.trees is None else np.zeros(0, np.int64)
    if reads_rows and not (len(lone) == plan.plans.layout.ranks == 1):
        raise ConfigError(
            f"{label}: the model's mask reads a tensor over the rows of rank {plan.rank} (such as token_type_ids, or a "
            f"padding or document mask), of {documents!r} on {plan.plans.layout.ranks} ranks, so that it cannot be "
            f"compared with the plan; valid: a mask of positions alone, as the plan's documents say what is visible; "
            f"{_BLOCKS}"
        )
    if visible is None:
        raise ConfigError(
            f"{label}: the model's mask cannot be evaluated ({error}), so that it cannot be compared with the plan; "
            f"valid: functions that transformers can evaluate for pairs of query and key; {_BLOCKS}"
        )
    (left, right), ahead = attention.visible_range, keys - queries
    planned = (ahead >= -left) & (ahead <= right)
    if len(lone) == 1 and documents.blocks is not None and (visible != planned).any():  # the model has blocks, too
        block, other = (documents.blocks.of(documents.offsets[lone[0]] + x) for x in (queries, keys))
        planned |= (block == other) & (block >= 0)
    differing = np.flatnonzero(visible != planned)
    if len(differing):
        query, key, is_seen = (x[differing[0]] for x in (queries, keys, visible))
        says = f"{'lets' if is_seen else 'hides from'} the query at position {query} {'see ' if is_seen else ''}the key"
        valid = f"a model whose mask has no more than the plan; {_BLOCKS}" if key > query else (
            "a model whose mask is that of its configuration, and plans built from this, build_plans(model.config, ...)"
        )  # fmt: skip
        raise ConfigError(
            f"{label}: the model's mask {says} at position {key} of a document, unlike the plan, whose mask is "
            f"{attention.mask!r} with window {attention.window}; valid: {valid}"
        )
    mask.accepted.add((plan, id(layer_plan)))


def compared_pairs(length: int, window: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return positions of queries and keys, int64 [pairs] each: all pairs of a short document; of a long one its ends,
    each query beside its neighbours and the borders of the window, and random pairs."""
    if length <= _ALL_PAIRS:
        return np.divmod(np.arange(length**2), max(1, length))
    generator = np.random.default_rng(length)
    chosen = np.arange(length) if length <= _QUERIES else generator.integers(length, size=_QUERIES)
    left, right = window or (0, 0)
    keys = [chosen + shift for shift in {0, -1, 1, -left, -left - 1, right, right + 1}]
    keys.append(generator.integers(length, size=len(chosen)))
    ends = np.r_[:_ENDS, length - _ENDS : length]
    queries, keys_of_queries = np.tile(chosen, len(keys)), np.concatenate(keys)
    queries, keys_of_queries = (
        np.concatenate([np.repeat(ends, len(ends)), queries]),
        np.concatenate([np.tile(ends, len(ends)), keys_of_queries]),
    )
    inside = (keys_of_queries >= 0) & (keys_of_queries < length)
    return queries[inside], keys_of_queries[inside]


def _without_packing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mask function without what transformers adds where position_ids jump: it takes a rank's rows for
    sequences of their own there, but they may be of one document. What remains is a function of positions."""
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__module__", None) != "transformers.masking_utils" or not name.startswith(("and_m", "or_m")):
        return function
    from transformers import masking_utils

    parts: tuple[Any, ...] = _closure(function)["mask_functions"]
    makers = [getattr(part, "__qualname__", "").split(".")[0] for part in parts]
    if makers == ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return _without_packing(_closure(parts[1])["mask_function"])
    combine = masking_utils.and_masks if name.startswith("and_m") else masking_utils.or_masks
    return combine(*map(_without_packing, parts))


def _closure(function: Any) -> dict[str, Any]:
    """Return the variables that a function has from the one that made it."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def _evaluate(
    function: Callable[..., Any], queries: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray | None, str, bool]:
    """Return which pairs a mask function lets see, bool [pairs] (None: it cannot be evaluated), the error, and whether
    it read tensors whose rows differ."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    query, key = torch.from_numpy(queries), torch.from_numpy(keys)
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    tensors = _TensorsOfModel(query, key, zero)
    try:
        with torch.no_grad(), TransformGetItemToIndex(), tensors:
            visible = torch.vmap(lambda q, k: function(zero, zero, q, k))(query, key)
        return (visible != 0).numpy(), "", tensors.differ
    except Exception as error:  # of the model's own function
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}", tensors.differ


class _TensorsOfModel(TorchDispatchMode):
    """Runs operators on the host and finds out which tensors of the model they read.

    A tensor of one value answers for any row. On the host an index beyond the rows is an exception, not the end of the
    process.

    Attributes:
        differ: True if a tensor with several values was read.
    """

    def __init__(self, *own: Tensor) -> None:
        super().__init__()
        self.differ = False
        self._kept = list(own)  # alive, so that no other tensor has their storage
        self._own = {_storage(x) for x in own}
        self._constant: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._on_host, (args, kwargs or {}))
        is_constant = func is torch.ops.aten.index.Tensor and _storage(args[0]) in self._constant
        if is_constant:
            args = (args[0], [None if index is None else torch.zeros_like(index) for index in args[1]])
        return tree_map(lambda x: self._keep(x, is_constant) if isinstance(x, Tensor) else x, func(*args, **kwargs))

    def _on_host(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or _storage(x) in self._own:
            return x
        host = x.detach().cpu()
        is_constant = bool((host == host.flatten()[:1]).all())
        self.differ |= not is_constant
        return self._keep(host.clone(), is_constant)

    def _keep(self, x: Tensor, is_constant: bool) -> Tensor:
        self._kept.append(x)
        self._own.add(_storage(x))
        if is_constant:
            self._constant.add(_storage(x))
        return x


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
