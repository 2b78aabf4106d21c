"""Checks that need more than one setting, made when the settings are read and when the number of ranks is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mindspeed_cp import capabilities
from mindspeed_cp.config_errors import bad_value
from mindspeed_cp.config_parallel import check_expert_ranks, check_parallel
from mindspeed_cp.config_suite import divisors
from mindspeed_cp.config_variants import check_also
from mindspeed_cp.cost import LayerCost, load_cluster
from mindspeed_cp.devices import device_type
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.npu_limits import check_limits
from mindspeed_cp.plan import AUTO, AttentionConfig
from mindspeed_cp.plan.hierarchical import cluster_of

if TYPE_CHECKING:
    from mindspeed_cp.config import Settings

#: Keys that decide features of the table of capabilities; the first that a refusal names is told.
KEYS = {
    "bias": "model.position_embedding_type",
    "dropout": "model.attention_dropout",
    "window": "model.window_size",
    "widths": "model.multi_latent_attention",
    "kv_heads": "model.num_query_groups",
    "backend": "context_parallel_suite.backend",
}
VOCAB_MULTIPLE = 16  # rows of the embedding are a multiple of this; tensor-parallel ranks share them


def check(settings: Settings) -> None:
    """Raise the error of the first pair of settings that do not fit together."""
    _check_heads(settings)
    _check_tensor_parallel(settings)
    check_parallel(settings)
    _check_cluster(settings)
    _check_capabilities(settings)
    _check_schedule(settings)
    check_also(settings)


def data_parallel_size(settings: Settings, world_size: int) -> int:
    """How many replicas `world_size` ranks make.

    ConfigError if they do not make whole replicas, or if the batch does not divide among them.
    """
    train, suite = settings.train, settings.context_parallel_suite
    size = settings.model_parallel_size
    product = (
        f"tensor_model_parallel_size {train.tensor_model_parallel_size} "
        f"* pipeline_model_parallel_size {train.pipeline_model_parallel_size} "
        f"* context_parallel_size {suite.context_parallel_size} = {size}"
    )
    if world_size < 1 or world_size % size:
        raise ConfigError(
            f"{world_size} ranks do not fit the settings: one replica needs {product}; "
            f"start {size}, or a multiple of it"
        )
    check_expert_ranks(settings, world_size)
    replicas = world_size // size
    if train.global_batch_size % replicas:
        fitting = -(-train.global_batch_size // replicas) * replicas
        raise bad_value(
            "train.global_batch_size",
            train.global_batch_size,
            f"must be a multiple of the {replicas} replicas that {world_size} ranks make ({product}); "
            f"use {fitting}, or {size} ranks",
        )
    return replicas


def _check_cluster(settings: Settings) -> None:
    """Whether the cluster has such nodes, and the ranks hold a full row."""
    suite, context = settings.context_parallel_suite, settings.data.seq_length
    if suite.cluster is not None or suite.algorithm in ("hierarchical", AUTO):
        try:
            if suite.cluster == "":  # which a topology takes for none
                load_cluster(suite.cluster)
            cluster_of(suite.topology)
        except ConfigError as error:
            raise bad_value("context_parallel_suite.cluster", suite.cluster, f"cannot be used: {error}") from None
    bound, ranks = suite.max_seqlen_per_dp_cp_rank, suite.context_parallel_size
    if bound is not None and ranks * bound < context:
        rule = (
            f"is too little for rows of data.seq_length = {context} over {ranks} ranks; use {-(-context // ranks)} or "
            f"more, more ranks, or data.seq_length of {ranks * bound} or less"
        )
        raise bad_value("context_parallel_suite.max_seqlen_per_dp_cp_rank", bound, rule)


def _check_capabilities(settings: Settings) -> None:
    """Whether the table of capabilities has an exact cell for every layer's attention."""
    suite, attention = settings.context_parallel_suite, attention_of(settings)
    device = device_type(settings.train.device)
    if suite.backend not in ("auto", device):
        where = f"train.device = {settings.train.device} ({device})"
        rule = f"does not run on {where}; use auto, or train.device: {suite.backend}"
        raise bad_value("context_parallel_suite.backend", suite.backend, rule)
    algorithm = "ring" if suite.algorithm == AUTO else suite.algorithm  # one that does all that any does
    row = capabilities.find(algorithm, attention, backend=device if device == "npu" else suite.backend)
    if row is None:
        if device == "npu":
            each = replace(attention, heads=max(1, attention.heads // settings.train.tensor_model_parallel_size))
            check_limits(replace(each, kv_heads=each.heads), suite.npu_lowering)
        return
    key = next((KEYS[feature] for feature in KEYS if feature in row.where), "context_parallel_suite.algorithm")
    section, name = key.split(".")
    value = getattr(getattr(settings, section), name)
    raise bad_value(key, value, f"{row} (algorithm {suite.algorithm}, backend {suite.backend})")


def attention_of(settings: Settings) -> AttentionConfig:
    """What every layer's attention computes, over all tensor-parallel ranks."""
    model = settings.model
    return AttentionConfig(
        heads=model.num_attention_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        head_dim_v=model.head_dim_v,
        window=None if model.window_size is None else (model.window_size[0], model.window_size[1]),
        alibi=model.position_embedding_type == "alibi",
        dropout=model.attention_dropout,
    )


def layer_of(settings: Settings) -> LayerCost:
    """The linear part of one layer of the model, on one tensor-parallel rank, of a run's precision: with experts the
    mean of all layers."""
    model, train = settings.model, settings.train
    return LayerCost.of(
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_width,
        heads=model.num_attention_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        head_dim_v=model.head_dim_v,
        tensor_parallel=train.tensor_model_parallel_size,
        sequence_parallel=train.sequence_parallel,
        bytes_per_element=2 if train.bf16 else 4,
    )


def _check_heads(settings: Settings) -> None:
    model = settings.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.kv_channels is None and not model.multi_latent_attention and model.hidden_size % heads:
        near = max(1, round(model.hidden_size / heads)) * heads
        rule = f"must be a multiple of model.num_attention_heads = {heads}, or give model.kv_channels; nearest: {near}"
        raise bad_value("model.hidden_size", model.hidden_size, rule)
    if groups is not None and heads % groups:
        valid = ", ".join(map(str, divisors(heads)))
        rule = f"must divide model.num_attention_heads = {heads}; valid: {valid}"
        raise bad_value("model.num_query_groups", groups, rule)
    if model.rotary_dim % 2 and not model.multi_latent_attention:  # which checks its own
        key, value = (
            ("model.kv_channels", model.kv_channels) if model.kv_channels else ("model.hidden_size", model.hidden_size)
        )
        rule = (
            f"gives heads of {model.head_dim} channels, and rotary positions need an even number; "
            "or set model.position_embedding_type to none"
        )
        raise bad_value(key, value, rule)


def _check_tensor_parallel(settings: Settings) -> None:
    train, model = settings.train, settings.model
    if train.pipeline_model_parallel_size != 1:
        rule = "is not in this version; valid: 1 (train.tensor_model_parallel_size splits the model too)"
        raise bad_value("train.pipeline_model_parallel_size", train.pipeline_model_parallel_size, rule)
    size = train.tensor_model_parallel_size
    for key, value in (
        ("model.num_attention_heads", model.num_attention_heads),
        ("model.num_query_groups", model.kv_heads),
        ("model.ffn_hidden_size", model.ffn_size),
    ):
        if value % size:
            raise bad_value("train.tensor_model_parallel_size", size, f"must divide {key} = {value}")
    if VOCAB_MULTIPLE % size:
        rule = f"must divide {VOCAB_MULTIPLE}: so the padded vocabulary, and with it the loss, is the same for any size"
        raise bad_value("train.tensor_model_parallel_size", size, rule)


def _check_schedule(settings: Settings) -> None:
    train = settings.train
    if train.min_lr > train.lr:
        raise bad_value("train.min_lr", train.min_lr, f"must be at most train.lr = {train.lr:g}")
    name = "train.lr_decay_iters" if train.lr_decay_iters else "train.train_iters"
    decay = train.lr_decay_iters or train.train_iters
    if train.lr_warmup_iters >= decay:
        rule = f"must be less than {name} = {decay}; use 0 for no warm-up"
        raise bad_value("train.lr_warmup_iters", train.lr_warmup_iters, rule)
