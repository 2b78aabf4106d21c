"""Whether a run can fit into memory at all, told before ranks are started.

A lower bound of what each rank needs: weights, gradients, optimizer state, and the activations that the backward needs
at the least.  A run that is over it cannot work; one that is under it may still be too large for the machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from mindspeed_cp.config import Settings
from mindspeed_cp.config_errors import bad_value
from mindspeed_cp.config_model import ModelSettings
from mindspeed_cp.data import VOCAB_SIZE
from mindspeed_cp.devices import device_type
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.text import size

PROCESS = 16 * 2**20  # bytes of its own that a rank needs before it has a model; really some ten times as many
SHORTEST = 2  # the least data.seq_length


def least_bytes(settings: Settings, tokens: float, ranks: int | None = None) -> float:
    """Bytes that one rank needs at the least.

    Args:
        settings: of the run.
        tokens: in a row.
        ranks: of the whole run, over which the distributed optimizer is spread; default: those of one replica.
    """
    model, train = settings.model, settings.train
    tp, cp = train.tensor_model_parallel_size, settings.context_parallel_suite.context_parallel_size
    width = 2 if train.bf16 else 4
    attention, kept_by_attention = _attention(model)
    per_token = 3 if model.swiglu else 2  # matrices of an MLP, and what it keeps in units of its width
    mlp, experts, shared = model.ffn_size, model.expert_layers, model.moe_shared_expert_intermediate_size or 0
    vocabulary = VOCAB_SIZE * model.hidden_size * (2 if model.untie_embeddings_and_output_weights else 1)
    dense = model.hidden_size * per_token * ((model.num_layers - experts) * mlp + experts * shared)
    weights = (model.num_layers * attention + dense + vocabulary) / tp
    routed = 0.0
    if model.num_moe_experts is not None:
        held = model.num_moe_experts / train.expert_model_parallel_size
        routed = experts * held * model.hidden_size * per_token * model.expert_ffn_size
    # Adam's two moments, and for bf16 fp32 main weights; the distributed optimizer splits them over all ranks but tp's
    optimizer, everyone = (12.0 if train.bf16 else 8.0), settings.model_parallel_size if ranks is None else ranks
    parts, expert_parts = 1.0, 1.0
    if train.use_distributed_optimizer:
        parts, expert_parts = everyone / tp, max(1.0, everyone / train.expert_model_parallel_size)
    # besides the weight itself and its fp32 gradient
    state = weights * (width + 4 + optimizer / parts) + routed * (width + 4 + optimizer / expert_parts)
    # of a layer: both norms' inputs and outputs, what attention keeps, and what the MLP or a token's experts keep
    rows = 4 * model.hidden_size / (tp if train.sequence_parallel else 1)
    kept_dense = rows + (kept_by_attention + per_token * mlp) / tp
    kept_experts = (
        rows + (kept_by_attention + per_token * shared) / tp + per_token * model.expert_ffn_size * model.moe_router_topk
    )
    if model.recompute_granularity == "full":
        activations = model.num_layers * model.hidden_size / (tp if train.sequence_parallel else 1)
        activations += min(kept_dense, kept_experts) if experts else kept_dense
    else:
        activations = (model.num_layers - experts) * kept_dense + experts * kept_experts
    logits = 2 * 4 * VOCAB_SIZE / tp
    return state + tokens / cp * (activations * width + logits)


def _attention(model: ModelSettings) -> tuple[int, int]:
    """Weights of a layer's attention, and numbers that it keeps for each token: q, k, v and its output."""
    heads = model.num_attention_heads
    q, k, v = heads * model.head_dim, model.kv_heads * model.head_dim, model.kv_heads * model.head_dim_v
    out = heads * model.head_dim_v
    if not model.multi_latent_attention:
        return model.hidden_size * (q + k + v + out), q + k + v + out
    low, positions = model.kv_lora_rank, model.qk_pos_emb_head_dim
    queries = model.hidden_size * q if model.q_lora_rank is None else model.q_lora_rank * (model.hidden_size + q)
    keys = model.hidden_size * (low + positions) + low * heads * (model.qk_head_dim + model.v_head_dim)
    return queries + keys + out * model.hidden_size, q + k + v + out


def check_memory(settings: Settings, local_ranks: int, available: int | None = None, ranks: int | None = None) -> None:
    """Raise ConfigError if the ranks of this machine cannot hold a full row.

    Args:
        settings: of the run.
        local_ranks: ranks on this machine.
        available: bytes of memory; default: this machine's, or what the system allows this process. (The memory of
            NPUs is not known before torch is imported: without this argument nothing is checked for them.)
        ranks: of the whole run; default: local_ranks.
    """
    if available is None and device_type(settings.train.device) != "cpu":
        return
    total = machine_memory() if available is None else available
    ranks = local_ranks if ranks is None else ranks
    share = total / local_ranks
    if share < PROCESS:
        raise _too_many_ranks(settings, local_ranks, total)
    tokens = settings.data.seq_length
    needed = least_bytes(settings, tokens, ranks)
    if needed <= share:
        return
    fixed = least_bytes(settings, 0, ranks)
    fits = int((share - fixed) / (least_bytes(settings, 1, ranks) - fixed))
    if fits < SHORTEST:
        fewer = int(total // least_bytes(settings, SHORTEST, ranks))
        raise bad_value(
            "model.num_layers",
            settings.model.num_layers,
            f"the model does not fit: weights and optimizer need {size(fixed)} on each of {local_ranks} local ranks, "
            f"and there are {size(share)}; use a smaller model, or more train.tensor_model_parallel_size"
            + (f", or at most {fewer} ranks on this machine" if fewer else ""),
        )
    raise bad_value(
        "data.seq_length",
        tokens,
        f"does not fit: a row needs at least {size(needed)} on each of {local_ranks} local ranks, and there are "
        f"{size(share)}; use at most {fits}, more context_parallel_suite.context_parallel_size on more machines"
        + ("" if settings.model.recompute_granularity == "full" else ", or model.recompute_granularity: full"),
    )


def _too_many_ranks(settings: Settings, local_ranks: int, total: int) -> ConfigError:
    """The error that names what makes so many ranks: the largest of the sizes that multiply to them."""
    rule = (
        f"{local_ranks} ranks on this machine would have {size(total / local_ranks)} of its {size(total)} each, and a "
        f"process that imports torch needs more than {size(PROCESS)}; start at most {int(total // PROCESS)}, or use "
        "more machines"
    )
    sizes = {
        "context_parallel_suite.context_parallel_size": settings.context_parallel_suite.context_parallel_size,
        "train.tensor_model_parallel_size": settings.train.tensor_model_parallel_size,
    }
    key = max(sizes, key=lambda name: sizes[name])
    return bad_value(key, sizes[key], rule) if sizes[key] ** 2 > local_ranks else ConfigError(rule)


def machine_memory(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of this machine, or less where a control group (a container, a batch job) limits this process.

    Args:
        groups: the file that lists the control groups of this process.
        root: where control groups are mounted.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):  # a group's limit holds for all groups below it
            text = _text(folder / name).strip()
            limits += [int(text)] if text.isdigit() else []  # "max": no limit
            if folder == base:
                break
    return min(limits)


def _text(path: Path) -> str:
    """Of a file of the system; nothing where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
