"""Check before ranks are started that a run can fit into memory.

The check is a lower bound of what each rank needs: weights, gradients, optimizer state, and the activations that the
backward needs at least. A run above it cannot work; a run below it may still be too large for the machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from mindspeed_cp.config.model import ModelSettings
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import VOCAB_SIZE
from mindspeed_cp.device.select import resolve_device_type
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.text import format_bytes
from mindspeed_cp.schema.messages import bad_value

PROCESS_BYTES = 16 * 2**20  # lower bound of what a rank needs without a model; measured is about ten times as much
MIN_SEQ_LENGTH = 2  # the least data.seq_length


def minimum_bytes(settings: Settings, tokens: float, ranks: int | None = None) -> float:
    """Return a lower bound of the bytes that one rank needs.

    Args:
        settings: settings of the run.
        tokens: number of tokens in a row.
        ranks: ranks of the run, over which the distributed optimizer is split; default: those of one replica.
    """
    model, train = settings.model, settings.train
    tp, cp = train.tensor_model_parallel_size, settings.context_parallel_suite.context_parallel_size
    width = 2 if train.bf16 else 4
    attention, kept_by_attention = _attention(model)
    per_token = 3 if model.swiglu else 2  # matrices of an MLP, and what it keeps in units of its width
    mlp, experts = model.resolved_ffn_hidden_size, model.expert_layers
    shared = model.moe_shared_expert_intermediate_size or 0
    vocabulary = VOCAB_SIZE * model.hidden_size
    if model.untie_embeddings_and_output_weights and train.pipeline_model_parallel_size == 1:
        vocabulary *= 2
    dense = model.hidden_size * per_token * ((model.num_layers - experts) * mlp + experts * shared)
    # Of the first pipeline stage, which has the embedding.
    stages = train.pipeline_model_parallel_size
    weights = ((model.num_layers * attention + dense) / stages + vocabulary) / tp
    routed = 0.0
    if model.num_moe_experts is not None:
        experts_per_rank = model.num_moe_experts / train.expert_model_parallel_size
        routed = (
            experts / stages * experts_per_rank * model.hidden_size * per_token * model.resolved_moe_ffn_hidden_size
        )
    # Adam's two moments, and for bf16 fp32 main weights; the distributed optimizer splits them over all ranks but tp's
    optimizer = 12.0 if train.bf16 else 8.0
    all_ranks = (settings.model_parallel_size if ranks is None else ranks) / stages  # of a pipeline stage
    parts, expert_parts = 1.0, 1.0
    if train.use_distributed_optimizer:
        parts, expert_parts = all_ranks / tp, max(1.0, all_ranks / train.expert_model_parallel_size)
    # besides the weight itself and its fp32 gradient
    state = weights * (width + 4 + optimizer / parts) + routed * (width + 4 + optimizer / expert_parts)
    # of a layer: both norms' inputs and outputs, what attention keeps, and what the MLP or a token's experts keep
    rows = 4 * model.hidden_size / (tp if train.sequence_parallel else 1)
    kept_dense = rows + (kept_by_attention + per_token * mlp) / tp
    kept_experts = rows + (kept_by_attention + per_token * shared) / tp
    kept_experts += per_token * model.resolved_moe_ffn_hidden_size * model.moe_router_topk
    if model.recompute_granularity == "full":
        activations = model.num_layers * model.hidden_size / (tp if train.sequence_parallel else 1)
        activations += min(kept_dense, kept_experts) if experts else kept_dense
    else:
        activations = (model.num_layers - experts) * kept_dense + experts * kept_experts
    activations /= stages  # of the one micro-batch that every step has
    logits = 2 * 4 * VOCAB_SIZE / tp if stages == 1 else 0.0
    return state + tokens / cp * (activations * width + logits)


def _attention(model: ModelSettings) -> tuple[int, int]:
    """Return the weights of a layer's attention, and the numbers that it keeps for each token: q, k, v and output."""
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
        settings: settings of the run.
        local_ranks: ranks on this machine.
        available: bytes of memory; default: those of this machine, or the limit of this process. Without it nothing is
            checked for NPUs, whose memory is not known before torch is imported.
        ranks: ranks of the run; default: local_ranks.
    """
    if available is None and resolve_device_type(settings.train.device) != "cpu":
        return
    total = machine_memory() if available is None else available
    ranks = local_ranks if ranks is None else ranks
    share = total / local_ranks
    if share < PROCESS_BYTES:
        raise _too_many_ranks(settings, local_ranks, total)
    tokens = settings.data.seq_length
    needed = minimum_bytes(settings, tokens, ranks)
    if needed <= share:
        return
    fixed = minimum_bytes(settings, 0, ranks)
    fits = int((share - fixed) / (minimum_bytes(settings, 1, ranks) - fixed))
    if fits < MIN_SEQ_LENGTH:
        fewer = int(total // minimum_bytes(settings, MIN_SEQ_LENGTH, ranks))
        raise bad_value(
            "model.num_layers",
            settings.model.num_layers,
            f"the model does not fit: weights and optimizer need {format_bytes(fixed)} on each of {local_ranks} "
            f"local ranks, and there are {format_bytes(share)}; use a smaller model, or more "
            "train.tensor_model_parallel_size" + (f", or at most {fewer} ranks on this machine" if fewer else ""),
        )
    raise bad_value(
        "data.seq_length",
        tokens,
        f"does not fit: a row needs at least {format_bytes(needed)} on each of {local_ranks} local ranks, and there "
        f"are {format_bytes(share)}; use at most {fits}, more context_parallel_suite.context_parallel_size on more "
        "machines"
        + ("" if settings.model.recompute_granularity == "full" else ", or model.recompute_granularity: full"),
    )


def _too_many_ranks(settings: Settings, local_ranks: int, total: int) -> ConfigError:
    """Return the error that names the largest of the sizes whose product is the number of ranks."""
    rule = (
        f"{local_ranks} ranks on this machine would have {format_bytes(total / local_ranks)} of its "
        f"{format_bytes(total)} each, and a process that "
        f"imports torch needs more than {format_bytes(PROCESS_BYTES)}; start at most "
        f"{int(total // PROCESS_BYTES)}, or use more machines"
    )
    sizes = {
        "context_parallel_suite.context_parallel_size": settings.context_parallel_suite.context_parallel_size,
        "train.tensor_model_parallel_size": settings.train.tensor_model_parallel_size,
    }
    key = max(sizes, key=lambda name: sizes[name])
    return bad_value(key, sizes[key], rule) if sizes[key] ** 2 > local_ranks else ConfigError(rule)


def machine_memory(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of this machine, or the limit of the control group (a container, a batch job) of this process.

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
        for folder in (own, *own.parents):  # the limit of a group holds for all groups below it
            text = _text(folder / name).strip()
            limits += [int(text)] if text.isdigit() else []  # "max": no limit
            if folder == base:
                break
    return min(limits)


def _text(path: Path) -> str:
    """Return the text of a file, or an empty text if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
