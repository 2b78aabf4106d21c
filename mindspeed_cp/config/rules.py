"""The rules: which settings fit together. "May I?" is answered here, when settings are read, and nowhere else.

A section checks its own values; what is not supported of attention is a row of :mod:`mindspeed_cp.schema.unsupported`.
Every rule raises an error of one line: setting, value, valid values, alternative.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.config.candidates import SUITE_SECTION, compared_settings
from mindspeed_cp.config.derived import whole_attention
from mindspeed_cp.config.sections import POOL, Sections
from mindspeed_cp.config.suite import TOKEN_CAP_OPTION, SuiteSettings, check_cluster, check_divides
from mindspeed_cp.data.dispatch import POOL_ALGORITHM
from mindspeed_cp.device.npu_profile import check_npu_limits
from mindspeed_cp.device.select import resolve_device_type
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import RANK_LIMIT, Topology
from mindspeed_cp.schema.messages import SettingError, bad_value
from mindspeed_cp.schema.unsupported import unsupported_attention

VOCAB_SIZE_DIVISIBLE_BY = 16  # rows of the embedding are a multiple of this; tensor-parallel ranks share them
BACKEND_KEY, POOL_KEY = f"{SUITE_SECTION}.backend", "data.balance"

_S = TypeVar("_S", bound=Sections)


def check(settings: _S) -> _S:
    """Return the settings; raise SettingError for the first ones that do not fit together."""
    _check_heads(settings)
    _check_model_parallel(settings)
    _check_balance(settings)
    _check_placement(settings)
    _check_attention(settings)
    train = settings.train
    if train.min_lr > train.lr:
        raise bad_value("train.min_lr", train.min_lr, f"must be at most train.lr = {train.lr:g}")
    decay = train.lr_decay_iters or train.train_iters
    if train.lr_warmup_iters >= decay:
        name = "train.lr_decay_iters" if train.lr_decay_iters else "train.train_iters"
        rule = f"must be less than {name} = {decay}; use 0 for no warm-up"
        raise bad_value("train.lr_warmup_iters", train.lr_warmup_iters, rule)
    for word in train.compare:
        try:
            compared_settings(settings, word)
        except ConfigError as error:
            raise bad_value("train.compare", word, f"cannot be used: {error}") from None
    return settings


def data_parallel_size(settings: Sections, world_size: int) -> int:
    """Return the number of replicas that `world_size` ranks make.

    Raises:
        ConfigError: they do not make whole replicas, cannot share the experts, or the batch does not divide among the
            replicas.
    """
    train, suite = settings.train, settings.context_parallel_suite
    size = settings.model_parallel_size
    product = (
        f"tensor_model_parallel_size {train.tensor_model_parallel_size} "
        f"* context_parallel_size {suite.context_parallel_size} = {size}"
    )
    if world_size < 1 or world_size % size:
        raise ConfigError(
            f"{world_size} ranks do not fit the settings: one replica needs {product}; "
            f"start {size}, or a multiple of it"
        )
    experts = train.expert_model_parallel_size
    if world_size % experts:
        raise ConfigError(
            f"{world_size} ranks do not fit train.expert_model_parallel_size = {experts}, which must divide their "
            f"number: every expert is on equally many ranks; start a multiple of {experts}"
        )
    replicas = world_size // size
    if train.data_parallel_size not in (None, replicas):
        rule = (
            f"needs {train.data_parallel_size * size} ranks ({product} each), and there are {world_size}; "
            f"use {replicas}, or null"
        )
        raise bad_value("train.data_parallel_size", train.data_parallel_size, rule)
    if train.global_batch_size % replicas:
        fitting = -(-train.global_batch_size // replicas) * replicas
        raise bad_value(
            "train.global_batch_size",
            train.global_batch_size,
            f"must be a multiple of the {replicas} replicas that {world_size} ranks make ({product}); "
            f"use {fitting}, or {size} ranks",
        )
    return replicas


def _check_heads(settings: Sections) -> None:
    model = settings.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.kv_channels is None and not model.multi_latent_attention and model.hidden_size % heads:
        near = max(1, round(model.hidden_size / heads)) * heads
        rule = f"must be a multiple of model.num_attention_heads = {heads}, or give model.kv_channels; nearest: {near}"
        raise bad_value("model.hidden_size", model.hidden_size, rule)
    if groups is not None:
        check_divides("model.num_query_groups", groups, "model.num_attention_heads", heads)
    if model.rotary_dim % 2 and not model.multi_latent_attention:  # checked in ModelSettings
        key, value = (
            ("model.kv_channels", model.kv_channels) if model.kv_channels else ("model.hidden_size", model.hidden_size)
        )
        rule = (
            f"gives heads of {model.head_dim} channels, and rotary positions need an even number; "
            "or set model.position_embedding_type to none"
        )
        raise bad_value(key, value, rule)


def _check_model_parallel(settings: Sections) -> None:
    """Check that tensor-parallel ranks can share heads, widths and vocabulary, and have whole gradients once, and that
    ranks can share the experts."""
    train, model = settings.train, settings.model
    size, has_latents = train.tensor_model_parallel_size, model.multi_latent_attention
    latents = (model.q_lora_rank or 0, model.kv_lora_rank + model.qk_pos_emb_head_dim) if has_latents else (0, 0)
    for key, value in (
        ("model.num_attention_heads", model.num_attention_heads),
        ("model.num_query_groups", model.kv_heads),
        ("model.ffn_hidden_size", model.resolved_ffn_hidden_size),
        ("model.q_lora_rank", latents[0]),
        ("model.kv_lora_rank + model.qk_pos_emb_head_dim", latents[1]),
        ("model.moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size or 0),
    ):
        if value % size:
            raise bad_value("train.tensor_model_parallel_size", size, f"must divide {key} = {value}")
    if VOCAB_SIZE_DIVISIBLE_BY % size:
        rule = (
            f"must divide {VOCAB_SIZE_DIVISIBLE_BY}, so that the padded vocabulary, and with it the loss, does not "
            "depend on it"
        )
        raise bad_value("train.tensor_model_parallel_size", size, rule)
    is_split = size > 1 and not train.sequence_parallel
    if has_latents and model.qk_layernorm and model.q_lora_rank is not None and is_split:
        rule = (
            "must be false with model.q_lora_rank and tensor parallelism: Megatron would add the gradient of that "
            "norm once per rank; or set train.sequence_parallel: true"
        )
        raise bad_value("model.qk_layernorm", True, rule)
    if model.num_moe_experts is not None and is_split:
        rule = f"must be true with experts and train.tensor_model_parallel_size = {size}, as Megatron requires"
        raise bad_value("train.sequence_parallel", False, rule)
    ranks, key = train.expert_model_parallel_size, "train.expert_model_parallel_size"
    if model.num_moe_experts is not None:
        check_divides(key, ranks, "model.num_moe_experts", model.num_moe_experts)
    elif ranks > 1:
        raise bad_value(key, ranks, "needs experts to share; give model.num_moe_experts, or use 1")


def _check_balance(settings: Sections) -> None:
    """Check that losses stay the same where rows are repacked, and that a pool has an algorithm and groups for it."""
    model, suite, balance = settings.model, settings.context_parallel_suite, settings.data.balance
    kind, weight = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if balance != "none" and model.num_moe_experts is not None and kind != "none" and weight:
        rule = (
            f"repacks rows for every number of replicas, and model.moe_router_load_balancing_type = {kind} with "
            f"model.moe_aux_loss_coeff = {weight:g} is a loss of whole rows, which would change; use none, or "
            "model.moe_aux_loss_coeff: 0"
        )
        raise bad_value("data.balance", balance, rule)
    if balance == POOL and suite.algorithm != POOL_ALGORITHM:
        rule = (
            f"plans the documents of a step in groups of any size, which context_parallel_suite.algorithm = "
            f"{suite.algorithm} has not; use context_parallel_suite.algorithm: {POOL_ALGORITHM}, or {POOL_KEY}: time"
        )
        raise bad_value(POOL_KEY, POOL, rule)
    if balance == POOL and suite.p2p_groups == "directional":
        rule = (
            "sends between any two ranks, and context_parallel_suite.p2p_groups = directional opens groups for "
            f"neighbours alone; use auto there, or {POOL_KEY}: time"
        )
        raise bad_value(POOL_KEY, POOL, rule)


def _check_placement(settings: Sections) -> None:
    """Check that all layers attend alike where documents are placed by the work of a layer, that the cluster has such
    nodes, and that the ranks may hold a full row."""
    model, suite, context = settings.model, settings.context_parallel_suite, settings.data.seq_length
    placing = {"layout": suite.options.get("layout") == "balanced", "algorithm": suite.algorithm == "hierarchical"}
    for key, places in placing.items():
        if places and model.window_layers not in (0, model.num_layers):
            rule = (
                "places documents by the work of a layer, and model.window_attn_skip_freq makes layers differ, which "
                f"must hold the same rows; use {'zigzag' if key == 'layout' else 'direct'}, or windows in all layers"
            )
            raise bad_value(f"context_parallel_suite.{key}", "balanced" if key == "layout" else suite.algorithm, rule)
    check_cluster(suite.cluster, suite.topology, "context_parallel_suite.cluster")
    bound, ranks = suite.options.get(TOKEN_CAP_OPTION), suite.context_parallel_size
    if bound is not None and ranks * bound < context:
        rule = (
            f"is too little for rows of data.seq_length = {context} over {ranks} ranks; use {-(-context // ranks)} or "
            f"more, more ranks, or data.seq_length of {ranks * bound} or less"
        )
        raise bad_value(f"{SUITE_SECTION}.{TOKEN_CAP_OPTION}", bound, rule)


def _check_attention(settings: Sections) -> None:
    """Check that the device computes the attention of every layer."""
    suite, train, attention = settings.context_parallel_suite, settings.train, whole_attention(settings)
    device = resolve_device_type(train.device)
    if suite.backend not in ("auto", device):
        rule = f"does not run on train.device = {train.device} ({device}); use auto, or train.device: {suite.backend}"
        raise bad_value(BACKEND_KEY, suite.backend, rule)
    bias, dropout = "alibi" if attention.alibi else "none", "some" if attention.dropout else "none"
    row = unsupported_attention({"backend": device, "mask": attention.mask, "bias": bias, "dropout": dropout})
    if row is not None:
        rule = f"{row} (algorithm {suite.algorithm}, backend {suite.backend})"
        raise bad_value("model.position_embedding_type", settings.model.position_embedding_type, rule)
    if device == "cuda" and attention.dropout and not train.bf16:
        rule = (
            "gives fp32, in which the cuda backend has no dropout; use true, model.attention_dropout: 0, or "
            "train.device: cpu"
        )
        raise bad_value("train.bf16", False, rule)
    if device == "npu":
        try:
            dtype = "bf16" if train.bf16 else "fp32"
            lowering = suite.npu_options(attention, dtype, train.deterministic_mode)["lowering"]
        except SettingError as error:
            raise error.with_prefix(f"{SUITE_SECTION}.") from None
        heads = max(1, attention.heads // train.tensor_model_parallel_size)
        check_npu_limits(replace(attention, heads=heads, kv_heads=heads), lowering)


def pool_topology(suite: SuiteSettings, replicas: int, local_ranks: int, tensor: int, key: str = POOL_KEY) -> Topology:
    """Return the context-parallel ranks of all replicas of a pipeline stage, numbered replica by replica.

    Several replicas may share a machine, or each has several machines (context_parallel_suite.nodes).

    Args:
        suite: the section context_parallel_suite.
        replicas: number of data-parallel replicas.
        local_ranks: number of ranks on each machine.
        tensor: tensor-parallel ranks.
        key: the setting that asks for a pool, for errors.

    Raises:
        ConfigError: machines would hold different numbers of whole replicas, or the cluster has no such nodes.
    """
    ranks = suite.context_parallel_size * replicas
    per_node = suite.topology.ranks_per_node
    if suite.nodes == 1:
        per_node = min(ranks, max(per_node, local_ranks // tensor))
        if per_node % suite.context_parallel_size or ranks % per_node:
            rule = (
                f"needs equally many whole replicas on every machine, and {local_ranks} ranks of a machine with "
                f"tensor_model_parallel_size {tensor} hold {per_node} of the {ranks} ranks of {replicas} replicas of "
                f"context_parallel_size {suite.context_parallel_size}; start other numbers of ranks, or leave the pool "
                "out"
            )
            raise bad_value(key, POOL, rule)
    if ranks > RANK_LIMIT:
        rule = f"makes a pool of {ranks} ranks, and a plan has at most {RANK_LIMIT}; leave the pool out"
        raise bad_value(key, POOL, rule)
    topology = Topology(ranks // per_node, per_node, suite.cluster)
    try:
        cluster_of(topology)
    except ConfigError as error:
        rule = (
            f"makes nodes of {per_node} ranks, which context_parallel_suite.cluster cannot be: {error}; or leave the "
            "pool out"
        )
        raise bad_value(key, POOL, rule) from None
    return topology
