"""Vision-language models: batches with pictures, as a processor makes them.

Every rank encodes all pictures of the batch and puts the features of the image tokens among its own rows into the text
model, whose attention is planned::

    tokens     t t i i | i i t t      two ranks, one picture of four tokens
    features       0 1 | 2 3          each of its rank's rows; gradients of the encoder add up over ranks

Tokens of a picture that see each other both ways, as in Gemma 3, are blocks of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.families import IMPLEMENTATION, VISION
from mindspeed_cp.integrations.huggingface.plans import RankPlans
from mindspeed_cp.layout import Documents

#: Inputs of the encoder, by the kind of what they show; every rank gets them whole.
PICTURES = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
}

_ENCODERS = tuple(f"get_{kind}_features" for kind in PICTURES)


def split_pictures(batch: Mapping[str, Any], config: Any) -> tuple[dict[str, Any], dict[str, Any], Tensor | None]:
    """Return what a batch has over tokens, the inputs of the encoder, and which tokens are blocks (None: none).

    Raises:
        ConfigError: the encoder would have planned attention, or the batch has pictures without the tokens or positions
            that belong to them.
    """
    vision = VISION[config.model_type]
    keys = [key for names in PICTURES.values() for key in names if batch.get(key) is not None]
    tokens = {key: value for key, value in batch.items() if key not in (*keys, vision.blocks)}
    pictures = {key: batch[key] for key in keys}
    if getattr(config.vision_config, "_attn_implementation", None) == IMPLEMENTATION:
        raise ConfigError(
            f"vision_config has the attention implementation {IMPLEMENTATION!r}, but pictures have no plan; valid: "
            "from_pretrained(..., attn_implementation={'text_config': register(), 'vision_config': 'sdpa'})"
        )
    if pictures and batch.get("input_ids") is None:
        raise ConfigError(f"the batch has {keys[0]} and no input_ids, which say where pictures are; valid: both")
    positions = batch.get("position_ids")
    if pictures and vision.has_grid and getattr(positions, "ndim", 0) != 3:
        raise ConfigError(
            f"the batch has {keys[0]} and no position_ids [3, rows, tokens]; valid: position_ids = model.model."
            "get_rope_index(input_ids, mm_token_type_ids, image_grid_thw, attention_mask=attention_mask)[0], of rows "
            "that are documents, before these are packed"
        )
    return tokens, pictures, None if vision.blocks is None else batch.get(vision.blocks)


def picture_blocks(kinds: Tensor, kept: np.ndarray, documents: Documents, window: int | None = None) -> Documents:
    """Return documents in which the tokens of each picture see each other both ways.

    Args:
        kinds: 1 for tokens of pictures, [rows, tokens].
        kept: tokens that are no padding, bool [rows, tokens].
        documents: those of the batch, without blocks.
        window: tokens that a query sees in the layers with a window, itself included.

    Raises:
        ConfigError: a block is longer than the window; releases of transformers differ in what such a block sees.
    """
    is_picture = kinds.cpu().numpy()[kept] == 1
    begins = np.zeros(len(is_picture) + 1, bool)
    begins[documents.offsets] = True
    before, after = np.r_[False, is_picture[:-1]], np.r_[is_picture[1:], False]
    first = np.flatnonzero(is_picture & (~before | begins[:-1]))
    last = np.flatnonzero(is_picture & (~after | begins[1:]))
    longest = int((last + 1 - first).max(initial=0))
    if window is not None and longest > window:
        raise ConfigError(
            f"a picture has {longest} tokens behind each other, but sliding_window is {window}; valid: no more, as "
            "some releases of transformers hide what is beyond the window; text between pictures ends one"
        )
    return Documents(documents.lengths, blocks=np.stack([first, last + 1], 1))


def number_features(ids: Tensor, kept: np.ndarray, config: Any, plans: RankPlans) -> dict[str, tuple[np.ndarray, int]]:
    """Return which features of pictures belong to this rank's rows, by their kind: their numbers in the order of the
    rows, and how many all rows have."""
    tokens, out = ids.cpu().numpy()[kept], {}
    for kind in PICTURES:
        token = getattr(config, f"{kind}_token_id", None)
        if token is not None:
            is_kind = tokens == token
            own = plans.plans.layout.tokens(plans.rank)
            out[kind] = ((np.cumsum(is_kind) - 1)[own[is_kind[own]]], int(is_kind.sum()))
    return out


@contextmanager
def own_features(model: Any, plans: RankPlans) -> Iterator[None]:
    """Let a model's encoder return the features of this rank's rows alone."""
    kinds = [kind for kind in plans.features if hasattr(model, f"get_{kind}_features")]
    if "language_model" not in model._modules:
        kinds = []  # a wrapper, whose model does it
    wrapped = {f"get_{kind}_features": partial(_encode, model, kind, *plans.features[kind]) for kind in kinds}
    vars(model).update(wrapped)
    try:
        yield
    finally:
        for name in wrapped:
            vars(model).pop(name, None)


def _encode(
    model: Any, kind: str, numbers: np.ndarray, count: int, *arguments: Any, plan: Any = None, **others: Any
) -> Any:
    """Encode all pictures of a kind; return the features of chosen numbers."""
    wrapped = {name: vars(model).pop(name) for name in [*vars(model)] if name in _ENCODERS}  # one may call another
    try:
        output = getattr(model, f"get_{kind}_features")(*arguments, **others)
    finally:
        vars(model).update(wrapped)

    def chosen(x: Any) -> Any:
        rows = x.flatten(0, -2) if isinstance(x, Tensor) else torch.cat(list(x))
        if len(rows) != count:
            raise ConfigError(
                f"the {kind}s of the batch have {len(rows)} features, but input_ids have {count} tokens for them; "
                "valid: the pictures and tokens of the same documents, none cut"
            )
        own = rows[torch.from_numpy(numbers).to(rows.device)]
        return own[None] if isinstance(x, Tensor) else [own]

    output.pooler_output = chosen(output.pooler_output)
    if getattr(output, "deepstack_features", None) is not None:
        output.deepstack_features = [chosen(level) for level in output.deepstack_features]
    return output
