"""Sizes that follow from the settings: attention of a layer, cost of its linear part and of documents, first rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import ceil
from typing import Any

from mindspeed_cp.algorithms import algorithm_options
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.cluster.cluster import DEFAULT_CLUSTER
from mindspeed_cp.config.sections import POOL, Sections
from mindspeed_cp.config.suite import TOKEN_CAP_OPTION, SuiteSettings
from mindspeed_cp.data.balance import DocumentCost
from mindspeed_cp.data.corpus import open_corpus
from mindspeed_cp.data.stream import PackedStream
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig

#: Most tokens of a rank over the mean of a full row, where max_seqlen_per_dp_cp_rank is not given: activations, which
#: are in proportion to a rank's tokens, then take at most this many times the memory of equal shares.
TOKENS_OVER_MEAN = 1.5

#: Algorithms whose attention works on whole documents.
WHOLE_DOCUMENT_ALGORITHMS = ("ulysses", "hierarchical")


def whole_attention(settings: Sections) -> AttentionConfig:
    """Return the attention of a layer with all heads, those of all tensor-parallel ranks."""
    model = settings.model
    return AttentionConfig(
        heads=model.num_attention_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        head_dim_v=model.head_dim_v,
        window=None if model.window_size is None else (model.window_size[0], model.window_size[1]),
        alibi=model.position_embedding_type == "alibi",
        dropout=model.attention_dropout,
        latent=(model.kv_lora_rank, model.qk_pos_emb_head_dim) if model.multi_latent_attention else None,
    )


def rank_attention(settings: Sections) -> AttentionConfig:
    """Return the attention of most layers on one tensor-parallel rank."""
    whole, model, tensor = whole_attention(settings), settings.model, settings.train.tensor_model_parallel_size
    attention = replace(whole, heads=max(1, whole.heads // tensor), kv_heads=max(1, whole.kv_heads // tensor))
    if 0 < 2 * model.window_layers < model.num_layers:
        attention = replace(attention, window=None)
    return attention


def first_rows(settings: Sections, count: int) -> list[Documents]:
    """Return the documents of the first rows of a training."""
    stream = PackedStream(open_corpus(settings.data.corpus), settings.data.seq_length, settings.train.seed)
    return [row.documents for row in islice(stream, count)]


def training_plan_options(settings: Sections) -> dict[str, Any]:
    """Return the options of build_plan in a training: those of the settings and, where the algorithm has it and no
    other is given, a bound of tokens of a rank: `TOKENS_OVER_MEAN` times its share of a full row, rounded up."""
    suite = settings.context_parallel_suite
    is_shared = suite.context_parallel_size > 1 or settings.data.balance == POOL
    return {**(default_token_bound(suite, settings.data.seq_length) if is_shared else {}), **settings.plan_options}


def default_token_bound(suite: SuiteSettings, tokens: int) -> dict[str, int]:
    """Return the option of the bound of tokens of a rank, for full rows of so many tokens; {} where the algorithm has
    none."""
    if TOKEN_CAP_OPTION not in algorithm_options(suite.algorithm):
        return {}
    return {TOKEN_CAP_OPTION: ceil(TOKENS_OVER_MEAN * tokens / suite.context_parallel_size)}


def mean_layer_cost(settings: Sections) -> LayerCost:
    """Return the cost of the linear part of a layer on one tensor-parallel rank: the mean over layers with and without
    experts."""
    return _layer_cost(settings, settings.model.mean_ffn_hidden_size)


def document_cost(settings: Sections, attentions: Sequence[AttentionConfig]) -> DocumentCost:
    """Return the modelled seconds of documents on one rank of a replica; latent attention counts as one of full
    projections.

    Args:
        settings: settings of the run.
        attentions: attention of each layer on one tensor-parallel rank.
    """
    model, suite, recomputed = settings.model, settings.context_parallel_suite, settings.model.recompute_granularity
    widths = [model.visited_ffn_hidden_size] * model.expert_layers  # which layers they are does not matter to a sum
    widths += [model.resolved_ffn_hidden_size] * (len(attentions) - len(widths))
    return DocumentCost(
        cluster=load_cluster(suite.cluster or DEFAULT_CLUSTER),
        layers=tuple(
            (attention, _layer_cost(settings, width, model.swiglu))
            for attention, width in zip(attentions, widths, strict=True)
        ),
        ranks=suite.context_parallel_size,
        whole_documents=suite.options.get("layout") == "balanced" or suite.algorithm in WHOLE_DOCUMENT_ALGORITHMS,
        recomputed=(int(recomputed is not None), int(recomputed == "full")),
    )


def _layer_cost(settings: Sections, ffn_hidden_size: int, gated: bool = True) -> LayerCost:
    model, train = settings.model, settings.train
    return LayerCost.from_sizes(
        hidden_size=model.hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        heads=model.num_attention_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        head_dim_v=model.head_dim_v,
        gated=gated,
        tensor_parallel=train.tensor_model_parallel_size,
        sequence_parallel=train.sequence_parallel,
        bytes_per_element=2 if train.bf16 else 4,
    )
