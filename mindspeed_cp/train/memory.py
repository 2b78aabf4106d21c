"""Whether a run can fit into memory at all, told before ranks are started.

A lower bound of what each rank needs: weights, gradients, optimizer state, and the activations that the backward needs
at the least.  A run that is over it cannot work; one that is under it may still be too large for the machine.
"""

from __future__ import annotations

import os

from mindspeed_cp.config import Settings
from mindspeed_cp.config_errors import bad_value
from mindspeed_cp.data import VOCAB_SIZE


def least_bytes(settings: Settings, tokens: float) -> float:
    """Bytes that one rank needs at the least for a row of `tokens` tokens."""
    model, train = settings.model, settings.train
    tp, cp = train.tensor_model_parallel_size, settings.context_parallel_suite.context_parallel_size
    width = 2 if train.bf16 else 4
    heads = model.head_dim * (model.num_attention_heads + 2 * model.kv_heads)
    out = model.head_dim * model.num_attention_heads
    mlp = model.ffn_size * (3 if model.swiglu else 2)
    layer = model.hidden_size * (heads + out + mlp) / tp
    vocabulary = VOCAB_SIZE * model.hidden_size * (2 if model.untie_embeddings_and_output_weights else 1) / tp
    weights = model.num_layers * layer + vocabulary
    # weight, fp32 gradient, Adam's two moments; bf16 has fp32 main weights besides
    state = weights * (4 + (4 + 8 if not train.bf16 else 2 + 4 + 8))
    # of a layer: both norms' inputs and outputs, q, k, v and the output of attention, and what the MLP keeps
    kept = 4 * model.hidden_size + (heads + out + mlp) / tp
    if model.recompute_granularity == "full":
        activations = model.num_layers * model.hidden_size + kept
    else:
        activations = model.num_layers * kept
    logits = 2 * 4 * VOCAB_SIZE / tp
    return state + tokens / cp * (activations * width + logits)


def check_memory(settings: Settings, local_ranks: int, available: int | None = None) -> None:
    """Raise ConfigError if the ranks of this machine cannot hold a full row.

    Args:
        settings: of the run.
        local_ranks: ranks on this machine.
        available: bytes of memory; default: this machine's.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if available is None else available
    share = total / local_ranks
    tokens = settings.data.seq_length
    needed = least_bytes(settings, tokens)
    if needed <= share:
        return
    fixed = least_bytes(settings, 0)
    if fixed >= share:
        raise bad_value(
            "model.num_layers",
            settings.model.num_layers,
            f"the model does not fit: weights and optimizer need {_gib(fixed)} on each of {local_ranks} local ranks, "
            f"and there are {_gib(share)}; use a smaller model, or more train.tensor_model_parallel_size",
        )
    fits = int((share - fixed) / (least_bytes(settings, 1) - fixed))
    raise bad_value(
        "data.seq_length",
        tokens,
        f"does not fit: a row needs at least {_gib(needed)} on each of {local_ranks} local ranks, and there are "
        f"{_gib(share)}; use at most {fits}, more context_parallel_suite.context_parallel_size on more machines"
        + ("" if settings.model.recompute_granularity == "full" else ", or model.recompute_granularity: full"),
    )


def _gib(amount: float) -> str:
    return f"{amount / 2**30:,.1f} GiB"
