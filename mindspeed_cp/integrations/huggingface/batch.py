"""Batches: the documents of a batch, labels, and the rows of one rank."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.families import VISION
from mindspeed_cp.integrations.huggingface.loss import IGNORED, check_vocabulary, masked_labels, shifted_labels
from mindspeed_cp.integrations.huggingface.plans import RankPlans, rank_plans_on_mesh
from mindspeed_cp.integrations.huggingface.vision import number_features, picture_blocks, split_pictures
from mindspeed_cp.layout import Documents

#: Keys that describe documents or padding; they are read and left out.
CU_SEQLENS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
DESCRIPTIONS = (*CU_SEQLENS, "attention_mask", "max_length_q", "max_length_k", "position_ids")

#: Values of padding rows; 0 for other keys.
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED}


def documents_of_batch(batch: Mapping[str, Any]) -> Documents:
    """Return the documents of a batch of whole rows, not yet cut over ranks.

    Documents are said by cumulative lengths (``cu_seq_lens_q``, as DataCollatorWithFlattening makes them), by
    position_ids [tokens] or [rows, tokens] that restart, or by an attention_mask [rows, tokens] with padding at the end
    or the beginning of rows. Without any of them each row is a document; position_ids of vision-language models,
    [3, rows, tokens], do not say where documents end, but with those of the text before them, [4, rows, tokens], do.

    Args:
        batch: input_ids (or inputs_embeds) [rows, tokens, ...] and what describes them.

    Raises:
        ConfigError: two descriptions differ, or one cannot be read.
    """
    shape, kept, positions = _read(batch)
    positions = _of_text(positions)
    described: dict[str, Documents] = {}
    for name in CU_SEQLENS:
        if batch.get(name) is not None:
            described[name] = Documents.from_cu_seqlens(torch.as_tensor(batch[name]).cpu().numpy().reshape(-1))
    if positions is not None:
        rows = positions.expand(shape).cpu().numpy()
        starts = np.array([row[keep][0] for row, keep in zip(rows, kept, strict=True) if keep.any()])
        if (starts != 0).any():
            raise ConfigError(
                f"position_ids begin with {starts[starts != 0][0]} in a row; valid: 0, the first token of a document: "
                "rows of whole documents, on every rank of the group; planned_batch cuts them"
            )
        lengths = [Documents.from_position_ids(row[keep]).lengths for row, keep in zip(rows, kept, strict=True)]
        described["position_ids"] = Documents(np.concatenate(lengths))
    if not described:
        return Documents(kept.sum(1))
    (first, documents), *rest = described.items()
    for name, other in rest:
        if other != documents:
            raise ConfigError(f"{name} says {other!r}, but {first} says {documents!r}; valid: the same documents")
    if documents.tokens != int(kept.sum()):
        raise ConfigError(f"{first} says {documents!r}, but the batch has {int(kept.sum())} tokens without padding")
    return documents


def planned_batch(
    batch: Mapping[str, Any],
    config: Any,
    mesh: Any,
    algorithm: str = "hierarchical",
    *,
    documents: Documents | None = None,
    **arguments: Any,
) -> tuple[dict[str, Any], Tensor | None]:
    """Read the documents of a batch, build their plans, and return this rank's rows and labels.

    Padding is left out. With a causal mask labels are shifted inside documents, before rows are cut: the last token of
    a document predicts nothing; with a full mask they stay where they are. Tokens whose ``loss_mask`` is 0 are ignored
    in them. The first call of attention compares the tokens and labels of all ranks by their digest.

    Args:
        batch: the whole batch, the same on all ranks of the mesh: input_ids or inputs_embeds, labels, loss_mask (0 or 1
            for each token, not shifted) and other tensors over tokens, each [rows, tokens, ...]; position_ids of
            vision-language models may be [3, rows, tokens], or [4, rows, tokens] with those of the text before them.
            Inputs of their picture encoder (pixel_values, image_grid_thw, ...) go to the model whole.
        config, mesh, algorithm, arguments: as for :func:`rank_plans_on_mesh`; also the configuration of a
            vision-language model of VISION, whose text model is planned.
        documents: those of the batch, where they have blocks; default: what :func:`documents_of_batch` reads.

    Returns:
        Keyword arguments of the model, tensors [1, t, ...]: the batch's, ``position_ids`` that restart in every
        document, ``use_cache=False`` and ``plan``. And the labels for :func:`loss`, [1, t], which a model's own loss
        takes as shift_labels (labels with a full mask); None if the batch has none.

    Raises:
        ConfigError: as for :func:`documents_of_batch` and :func:`rank_plans_on_mesh`; the batch has other documents
            than those given, or these have parents; or a key is no tensor over tokens.
    """
    whole, pictures, kinds = config, dict[str, Any](), None
    if getattr(config, "model_type", None) in VISION:
        batch, pictures, kinds = split_pictures(batch, config)
        config = config.get_text_config()
    if documents is None:
        documents = documents_of_batch(batch)
    elif documents.trees is not None:
        raise ConfigError(
            f"documents are {documents!r}: labels are shifted inside documents, but the first token of a document with "
            "a parent is predicted by its parent's last token; valid: planned_trajectories, which takes "
            "Documents.from_trajectories"
        )
    else:
        said, (_, kept, positions) = documents_of_batch(batch), _read(batch)
        is_said = len(kept) > 1 or _of_text(positions) is not None
        is_said |= any(batch.get(name) is not None for name in ("attention_mask", *CU_SEQLENS))
        lengths, other = (x.lengths[x.lengths > 0] for x in (said, documents))
        if said.tokens != documents.tokens or (is_said and not np.array_equal(lengths, other)):
            raise ConfigError(
                f"the batch has {said!r}, but documents are {documents!r}; valid: those of the batch, or none, which "
                "reads them there"
            )
    if kinds is not None and documents.blocks is None:
        documents = picture_blocks(kinds, _read(batch)[1], documents, getattr(config, "sliding_window", None))
    rank_plans = rank_plans_on_mesh(config, documents, mesh, algorithm, **arguments)
    rows = cut_batch(batch, rank_plans)
    if pictures:
        rank_plans.features = number_features(batch["input_ids"], _read(batch)[1], whole, rank_plans)
        rows |= pictures
    return rows, rows.pop("shift_labels" if rank_plans.plans.mask == "causal" else "labels", None)


def cut_batch(batch: Mapping[str, Any], rank_plans: RankPlans) -> dict[str, Any]:
    """Return this rank's rows of a whole batch, with their labels; its documents are those of the plans, trees too."""
    plans, (shape, kept, positions) = rank_plans.plans, _read(batch)
    if batch.get("loss_mask") is not None:
        batch = {**batch, "labels": masked_labels(batch.get("labels"), batch["loss_mask"]), "loss_mask": None}
    rank_plans.batch_digest = _digest(batch, kept)
    tokens = np.flatnonzero(kept)[plans.layout.tokens(rank_plans.rank)]  # of the whole batch, padding included
    cut: dict[str, Any] = {}
    device = torch.device("cpu")
    for name, value in batch.items():
        if value is None or name in DESCRIPTIONS:
            continue
        if not isinstance(value, Tensor) or tuple(value.shape[:2]) != shape:
            kind = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ConfigError(
                f"the batch's {name} is {kind}; valid: a tensor [{shape[0]}, {shape[1]}, ...] over tokens; inputs "
                "of another part of the model, such as pictures, go to the model beside the rows; what belongs to "
                "documents, such as their classes or rewards, goes to a head on the pooled rows of gather_rows"
            )
        device = value.device
        if name == "labels":
            check_vocabulary(name, value, plans.vocabulary)
        if name == "labels" and plans.mask == "causal":
            packed = value[torch.from_numpy(kept).to(device)]
            rank_plans.shifts_labels = True
            own = torch.from_numpy(plans.layout.tokens(rank_plans.rank)).to(device)
            cut["shift_labels"] = rank_plans.padded(shifted_labels(packed, plans.documents)[own], IGNORED)[None]
            continue
        rows = value.flatten(0, 1)[torch.from_numpy(tokens).to(device)]
        cut[name] = rank_plans.padded(rows, _PADDING.get(name, 0))[None]
    if positions is not None and positions.dim() == 3:
        grid = positions[-3:].expand(-1, *shape).permute(1, 2, 0).flatten(0, 1)
        rows = grid[torch.from_numpy(tokens).to(positions.device)]
        cut["position_ids"] = rank_plans.padded(rows)[None].permute(2, 0, 1)
    else:
        rows = torch.from_numpy(plans.layout.positions(rank_plans.rank)).to(device)
        cut["position_ids"] = rank_plans.padded(rows)[None]
    return {**cut, "use_cache": False, "plan": rank_plans}


def _digest(batch: Mapping[str, Any], kept: np.ndarray) -> int:
    """Return a digest of the integers over tokens of a batch, without padding."""
    digest, tokens = 0, torch.from_numpy(np.flatnonzero(kept))
    for name, value in sorted(batch.items()):
        is_integer = isinstance(value, Tensor) and not value.is_floating_point()
        if is_integer and tuple(value.shape[:2]) == kept.shape and name not in DESCRIPTIONS:
            integers = value.flatten(0, 1)[tokens.to(value.device)].to(torch.int64)
            digest = zlib.crc32(integers.cpu().numpy().tobytes(), digest)
    return digest


def _read(batch: Mapping[str, Any]) -> tuple[tuple[int, int], np.ndarray, Tensor | None]:
    """Return what a batch says of its tokens: (rows, tokens); which are no padding, bool [rows, tokens]; position_ids
    as [rows, tokens], [3, rows, tokens] or [4, rows, tokens], or None. Raises ConfigError if it cannot be read."""
    for name in ("input_ids", "inputs_embeds", "labels", "loss_mask", "attention_mask", "position_ids", *CU_SEQLENS):
        value = batch.get(name)
        is_array = isinstance(value, np.ndarray) and name in CU_SEQLENS
        if value is not None and not isinstance(value, Tensor) and not is_array:
            raise ConfigError(
                f"the batch's {name} is a {type(value).__name__}; valid: a tensor (tokenizers and collators make them "
                'with return_tensors="pt")'
            )
    given = [name for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None]
    if not given:
        raise ConfigError("the batch has neither input_ids nor inputs_embeds; valid: one of them")
    if batch[given[0]].dim() < 2:
        raise ConfigError(f"{given[0]} has shape {list(batch[given[0]].shape)}; valid: [rows, tokens, ...]")
    rows, tokens = batch[given[0]].shape[:2]
    positions = batch.get("position_ids")
    if positions is not None and tuple(positions.shape) == (tokens,) and rows == 1:
        positions = positions[None]
    if positions is not None and (
        tuple(positions.shape[-2:]) not in ((1, tokens), (rows, tokens)) or positions.shape[:-2] not in ((), (3,), (4,))
    ):
        raise ConfigError(
            f"position_ids has shape {list(positions.shape)}; valid: [{rows}, {tokens}], or for vision-language models "
            f"[3, {rows}, {tokens}], or [4, {rows}, {tokens}] with those of the text before them"
        )
    return (rows, tokens), _kept(batch.get("attention_mask"), (rows, tokens)), positions


def _of_text(positions: Tensor | None) -> Tensor | None:
    """Return the position_ids that restart in every document, [rows, tokens]; None if there are none."""
    if positions is None or positions.dim() == 2:
        return positions
    return positions[0] if len(positions) == 4 else None


def _kept(mask: Tensor | None, shape: tuple[int, int]) -> np.ndarray:
    """Return which tokens are no padding, bool [rows, tokens]. Raises ConfigError for another mask."""
    if mask is None:
        return np.ones(shape, bool)
    if tuple(mask.shape) != shape:
        raise ConfigError(
            f"attention_mask has shape {list(mask.shape)}; valid: {list(shape)}, which says what is padding; documents "
            "are said by position_ids that restart or by cu_seq_lens_q"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ConfigError(
            "attention_mask has other values than 0 and 1; valid: 0 for padding and 1 for tokens; documents are said "
            "by position_ids that restart or by cu_seq_lens_q"
        )
    kept: np.ndarray = mask.cpu().numpy().astype(bool)
    runs = np.diff(kept.astype(np.int8), axis=1, prepend=0, append=0)
    holes = np.flatnonzero((runs == 1).sum(1) > 1)
    if len(holes):
        raise ConfigError(f"attention_mask has padding between tokens in row {holes[0]}; valid: at one of its ends")
    return kept
