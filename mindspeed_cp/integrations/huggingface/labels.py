"""Labels of a packed batch: shifted inside documents, and without the tokens that a loss mask leaves out."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents

#: Label of rows that predict nothing, as in cross_entropy.
IGNORED = -100


def shifted_labels(labels: Tensor, documents: Documents) -> Tensor:
    """Return for each token the label of the next one in its document, [tokens].

    The last one predicts nothing, nor does a token that sees the next one, because both are in a block.
    """
    shifted = torch.cat([labels[1:], labels.new_full((1,), IGNORED)]) if len(labels) else labels.clone()
    ends = documents.offsets[1:][documents.lengths > 0] - 1
    shifted[torch.from_numpy(ends).to(labels.device)] = IGNORED
    if documents.blocks is not None:
        shifted[torch.from_numpy(documents.blocks.seen_labels).to(labels.device)] = IGNORED
    return shifted


def check_vocabulary(name: str, tokens: Tensor, vocabulary: int | None) -> None:
    """Raise ConfigError if tokens (IGNORED aside) are none of a vocabulary; None: its size is not known."""
    if vocabulary is None or tokens.is_floating_point():
        return
    wrong = tokens[(tokens != IGNORED) & ((tokens < 0) | (tokens >= vocabulary))]
    if len(wrong):
        raise ConfigError(
            f"{name} has {int(wrong[0])}; valid: 0 to {vocabulary - 1}, the model's vocabulary, or {IGNORED}, which is "
            "ignored"
        )


def masked_labels(labels: Tensor | None, loss_mask: Tensor) -> Tensor:
    """Return labels [rows, tokens] in which tokens that the loss mask leaves out are ignored.

    Args:
        labels: [rows, tokens], not shifted.
        loss_mask: as labels; 1 for tokens that are learned, 0 for others.

    Raises:
        ConfigError: there are no labels, the shapes differ, or the mask has other values.
    """
    if labels is None:
        raise ConfigError(
            "the batch has loss_mask and no labels; valid: labels as well (such as input_ids), in which tokens whose "
            "loss_mask is 0 are then ignored"
        )
    if loss_mask.shape != labels.shape:
        raise ConfigError(f"loss_mask has shape {list(loss_mask.shape)}; valid: {list(labels.shape)}, that of labels")
    learned = loss_mask.to(labels.device) != 0
    if not bool((~learned | (loss_mask.to(labels.device) == 1)).all()):
        raise ConfigError(
            "loss_mask has other values than 0 and 1; valid: 0 and 1; weights of tokens go into the batch under "
            "another name, which shard_batch cuts like input_ids, and into a loss of your own"
        )
    return labels.masked_fill(~learned, IGNORED)
