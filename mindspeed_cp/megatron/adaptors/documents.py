"""The documents and rows of a batch: from cu_seqlens, positions, or end-of-document tokens.

With padding, ``cu_seqlens_q`` has the ends of sequences without it, ``cu_seqlens_q_padded`` with it. Padding stands
behind its sequence, so that under a causal mask no token sees it: a padded sequence is one document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams

#: Fields of PackedSeqParams with cumulative lengths.
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def to_host(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copy integer tensors to the host, which waits for the work before it where they are on a device.

    Args:
        tensors: by name; None is left out.

    Raises:
        ConfigError: one of them has no integers.
    """
    given = {name: torch.as_tensor(value) for name, value in tensors.items() if value is not None}
    for name, tensor in given.items():
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
            raise ConfigError(f"{name} is {tensor.dtype}; valid: integers")
    return {name: tensor.detach().cpu().long().numpy() for name, tensor in given.items()}


def documents_of_sequences(ends: Mapping[str, np.ndarray], mask: str = "causal") -> Documents:
    """Return the documents of packed sequences, padding included, without those of no token.

    Args:
        ends: cumulative lengths [sequences + 1] by their names in PackedSeqParams, on the host.
        mask: mask of the attention, "causal" or "full".

    Raises:
        ConfigError: cu_seqlens_q is missing, keys are of other sequences than queries, padding does not fit, or a full
            mask would show it.
    """
    if "cu_seqlens_q" not in ends:
        raise ConfigError(
            "packed_seq_params has no cu_seqlens_q; valid: 0, then the end of each sequence; or what "
            "mindspeed_cp.megatron.planned_params(plan, rank) returns"
        )
    lengths = {name: _lengths(name, array) for name, array in ends.items()}
    for suffix in ("", "_padded"):
        query, key = f"cu_seqlens_q{suffix}", f"cu_seqlens_kv{suffix}"
        if key in lengths and not np.array_equal(lengths.get(query, lengths["cu_seqlens_q"]), lengths[key]):
            raise ConfigError(
                f"{key} differs from {query}; valid: equal, as planned attention under Megatron is self-attention"
            )
    real = lengths["cu_seqlens_q"]
    padded = lengths.get("cu_seqlens_q_padded", real)
    if len(padded) != len(real) or (padded < real).any():
        raise ConfigError(
            f"cu_seqlens_q has sequences of {_short(real)} tokens, but cu_seqlens_q_padded of {_short(padded)}; valid: "
            "as many sequences, none shorter with padding than without"
        )
    if mask == "full" and not np.array_equal(padded, real):
        raise ConfigError(
            "cu_seqlens_q_padded differs from cu_seqlens_q, and with attn_mask_type no_mask tokens would see the "
            "padding behind their sequence; valid: a causal mask, or sequences without padding (planned_batch_from "
            "cuts sequences of any length)"
        )
    return Documents(padded[padded > 0])


def _lengths(name: str, ends: np.ndarray) -> np.ndarray:
    """Return the lengths of sequences, int64 [sequences], from their ends [sequences + 1] or [1, sequences + 1]."""
    if ends.ndim == 2 and len(ends) == 1:
        ends = ends[0]
    try:
        return Documents.from_cu_seqlens(ends).lengths
    except ConfigError as error:
        raise ConfigError(f"packed_seq_params.{name}: {error}") from None


def _short(lengths: np.ndarray) -> str:
    return f"{lengths[:6].tolist()}{' and more' if len(lengths) > 6 else ''}"


#: Rows of positions: time, height, width.
POSITION_ROWS = 3


def mrope_rows(position_ids: Any, tokens: int) -> Tensor:
    """Return positions of time, height and width of all tokens, int64 [tokens, 3].

    Args:
        position_ids: [3, tokens] or [3, rows, tokens of a row].
        tokens: of the micro-batch.

    Raises:
        ConfigError: another shape or type.
    """
    positions = torch.as_tensor(position_ids)
    if positions.dim() not in (2, 3) or len(positions) != POSITION_ROWS or positions.numel() != POSITION_ROWS * tokens:
        raise ConfigError(
            f"position_ids has shape {list(positions.shape)}, but the plan has {tokens} tokens; valid: "
            f"[{POSITION_ROWS}, {tokens}] or [{POSITION_ROWS}, rows, tokens of a row], positions of time, height and "
            "width (mrope); leave positions in one dimension out: the documents of the plan determine them"
        )
    if positions.is_floating_point() or positions.is_complex() or positions.dtype is torch.bool:
        raise ConfigError(f"position_ids is {positions.dtype}; valid: integers")
    return positions.reshape(POSITION_ROWS, tokens).T.long()


#: Keys of a batch with cumulative lengths, and the field of PackedSeqParams that each is.
CU_SEQLENS_KEYS = {
    **{name: name for name in CU_SEQLENS},
    "cu_seqlens": "cu_seqlens_q",
    "cu_seqlens_padded": "cu_seqlens_q_padded",
}

#: Keys with the token numbers; the first that is there counts.
TOKEN_KEYS = ("tokens", "input_ids")


def documents_of_batch(batch: Mapping[str, Any], shape: tuple[int, int] | None, eod: int | None) -> Documents:
    """Return the documents of a whole batch, rows back to back, without those of no token.

    The first of these that the batch has says where documents end, and all that it has must agree: cu_seqlens,
    packed_seq_params, position_ids that restart inside a row, end-of-document tokens. Without any, each row is one
    document. Positions that only rise say nothing, nor do those of mrope, which are refused if time falls inside a row.

    Args:
        batch: the batch.
        shape: rows and tokens of each; None: the batch has no tensor over tokens, as in a middle pipeline stage.
        eod: number of the end-of-document token, or None.

    Raises:
        ConfigError: sources differ, do not have the batch's tokens, or are invalid.
    """
    arrays = to_host(_tensors(batch, eod))
    sources: dict[str, Documents] = {}
    own = {key: arrays[key] for key in CU_SEQLENS_KEYS if key in arrays}
    if own:
        sources[", ".join(own)] = _from_ends(own, shape)
    params = {key: arrays[f"packed_seq_params.{key}"] for key in CU_SEQLENS if f"packed_seq_params.{key}" in arrays}
    if params:
        sources["packed_seq_params"] = _from_ends(params, shape)
    if "position_ids" in arrays:
        if shape is not None and arrays["position_ids"].size != shape[0] * shape[1]:
            raise ConfigError(
                f"position_ids of the batch has shape {list(arrays['position_ids'].shape)}, but the batch has "
                f"{shape[0]} rows of {shape[1]} tokens; valid: a position for each token, or None"
            )
        documents = Documents.from_position_ids(arrays["position_ids"])
        if shape is None or len(documents) > shape[0]:
            sources["position_ids"] = documents
    if eod is not None:
        sources[f"eod {eod}"] = Documents.from_eod(next(arrays[key] for key in TOKEN_KEYS if key in arrays), eod)
    if not sources:
        if shape is None:
            raise ConfigError(
                "the batch has neither tokens nor cu_seqlens; valid: one of them on every pipeline stage, as every "
                "stage needs the plan"
            )
        _refuse_unknown_ends(batch.get("position_ids"))
        return Documents([shape[1]] * shape[0])
    name, documents = next(iter(sources.items()))
    for other_name, other in sources.items():
        if other != documents:
            raise ConfigError(
                f"{name} of the batch gives {documents!r}, but {other_name} {other!r}; valid: the same; leave out the "
                "one that does not say where attention ends"
            )
    if shape is not None and documents.tokens != shape[0] * shape[1]:
        raise ConfigError(
            f"{name} of the batch ends at {documents.tokens} tokens, but the batch has {shape[0]} rows of {shape[1]}; "
            "valid: all tokens; let padding belong to the last document, or be one of its own"
        )
    return documents


def _tensors(batch: Mapping[str, Any], eod: int | None) -> dict[str, Any]:
    """Return what says where documents end, by name."""
    tensors = {key: batch.get(key) for key in (*CU_SEQLENS_KEYS, "position_ids")}
    given = batch.get("packed_seq_params")
    if isinstance(given, PlannedBatchParams) or not (given is None or isinstance(given, PackedSeqParams)):
        raise ConfigError(
            f"packed_seq_params of the batch is a {type(given).__name__}; valid: Megatron's PackedSeqParams of the "
            "whole batch, or None; a batch that is planned already goes to the model as it is"
        )
    if given is not None:
        tensors |= {f"packed_seq_params.{name}": getattr(given, name, None) for name in CU_SEQLENS}
    if eod is not None:
        key = next((key for key in TOKEN_KEYS if batch.get(key) is not None), None)
        if key is None:
            raise ConfigError(f"eod is {eod!r}, but the batch has no {' and no '.join(TOKEN_KEYS)}; leave eod out")
        tensors[key] = batch[key]
    ids = tensors["position_ids"]
    if isinstance(ids, (Tensor, np.ndarray)) and ids.ndim > 2:
        if ids.ndim > 3 or len(ids) != POSITION_ROWS:
            raise ConfigError(
                f"position_ids has shape {list(ids.shape)}; valid: [tokens], [rows, tokens], or for mrope "
                f"[{POSITION_ROWS}, rows, tokens]"
            )
        tensors["position_ids"] = None  # of mrope: they do not say where documents end
    return tensors


def _refuse_unknown_ends(position_ids: Any) -> None:
    """Raise ConfigError if positions of time (mrope) fall inside a row, so that it has documents of unknown ends.

    They never fall inside a document, but need not fall where the next one begins.
    """
    if not isinstance(position_ids, (Tensor, np.ndarray)) or position_ids.ndim != 3:
        return
    times = to_host({"position_ids": position_ids})["position_ids"][0]
    falls = np.argwhere(np.diff(times, axis=1) < 0)
    if len(falls):
        row, token = falls[0].tolist()
        raise ConfigError(
            f"position_ids[0, {row}] (mrope, time) falls from {times[row, token]} to {times[row, token + 1]} at token "
            f"{token + 1}, so that the row has several documents, but positions of mrope do not say where all of them "
            "end; valid: cu_seqlens in the batch, or eod="
        )


def _from_ends(ends: Mapping[str, np.ndarray], shape: tuple[int, int] | None) -> Documents:
    """Return the documents of cumulative lengths, of the whole batch or with a row for each row of it."""
    fields = _by_field(ends)
    rows = {len(array) if array.ndim == 2 else 1 for array in ends.values()}
    if rows == {1}:
        return documents_of_sequences(fields)
    if len(rows) > 1 or shape is None or rows != {shape[0]}:
        described = ", ".join(f"{key} {list(array.shape)}" for key, array in ends.items())
        raise ConfigError(
            f"the batch has {described}; valid: [documents + 1] for the whole batch, or one row of ends for each of "
            f"its {'' if shape is None else f'{shape[0]} '}rows"
        )
    lengths = []
    for row in range(shape[0]):
        documents = documents_of_sequences({name: array[row] for name, array in fields.items()})
        if documents.tokens != shape[1]:
            raise ConfigError(
                f"{', '.join(ends)}: row {row} ends at {documents.tokens} tokens; valid: {shape[1]}, the length of a "
                "row; let padding belong to its last document, or be one of its own"
            )
        lengths.append(documents.lengths)
    return Documents(np.concatenate(lengths))


def _by_field(ends: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return cumulative lengths by their field of PackedSeqParams, or raise ConfigError where two keys of it differ."""
    keys: dict[str, str] = {}
    for key, array in ends.items():
        first = keys.setdefault(CU_SEQLENS_KEYS[key], key)
        if not np.array_equal(ends[first].reshape(-1), array.reshape(-1)):
            raise ConfigError(
                f"{key} of the batch differs from {first}, another name of the same; valid: equal, or one of them alone"
            )
    return {name: ends[key] for name, key in keys.items()}


def token_shape(batch: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and tokens of each, from the first tensor over tokens that the batch has, or None."""
    for key in (*TOKEN_KEYS, "labels", "loss_mask", "position_ids"):
        value = batch.get(key)
        if value is None:
            continue
        shape = tuple(torch.as_tensor(value).shape)
        if key == "position_ids" and len(shape) == 3:  # of mrope
            shape = shape[1:]
        if len(shape) not in (1, 2):
            raise ConfigError(f"{key} has shape {list(shape)}; valid: [tokens] or [rows, tokens]")
        return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])
    return None
