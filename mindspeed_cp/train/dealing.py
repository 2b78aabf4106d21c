"""Settings -> how global batches are dealt to the replicas, and what a document is taken to cost."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_cp.config import Settings
from mindspeed_cp.cost import LayerCost, load_cluster
from mindspeed_cp.data import Dealer, DocumentCost
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.train.world import World

CLUSTER = "a2"  # whose efficiencies weigh attention against linear layers, where the settings name no cluster
WHOLE = ("ulysses", "hierarchical")  # algorithms under which attention works on whole documents


def make_dealer(settings: Settings, attentions: Sequence[AttentionConfig], world: World) -> Dealer:
    """The dealer of `data.balance`.

    Args:
        settings: of the run.
        attentions: what each layer computes on this tensor-parallel rank.
        world: this rank's place.
    """
    cost = document_cost(settings, attentions)
    return Dealer(
        balance=settings.data.balance,
        replicas=world.replicas,
        context=settings.data.seq_length,
        cost=cost,
        per_micro_batch=cost.per_micro_batch,
        equal_counts=experts_span_replicas(settings),
        keeps_numbers=settings.model.attention_dropout > 0,
    )


def experts_span_replicas(settings: Settings) -> bool:
    """True where replicas wait for each other in every layer with experts, and so need equally many micro-batches.

    Megatron lays expert-parallel groups over consecutive ranks, and a replica is consecutive ranks.
    """
    return settings.model.num_moe_experts is not None and bool(
        settings.model_parallel_size % settings.train.expert_model_parallel_size
    )


def document_cost(settings: Settings, attentions: Sequence[AttentionConfig]) -> DocumentCost:
    """Modelled seconds of documents on one rank of a replica; latent attention counts as one of full projections."""
    model, suite = settings.model, settings.context_parallel_suite
    again = model.recompute_granularity
    layers = []
    for number, attention in enumerate(attentions):
        width = model.ffn_size
        if number < model.expert_layers:  # which layers they are does not matter to a sum
            width = model.moe_router_topk * model.expert_ffn_size + (model.moe_shared_expert_intermediate_size or 0)
        layer = LayerCost.of(
            hidden_size=model.hidden_size,
            ffn_hidden_size=width,
            heads=model.num_attention_heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            head_dim_v=model.head_dim_v,
            gated=model.swiglu,
            tensor_parallel=settings.train.tensor_model_parallel_size,
            sequence_parallel=settings.train.sequence_parallel,
            bytes_per_element=2 if settings.train.bf16 else 4,
        )
        layers.append((attention, layer))
    return DocumentCost(
        cluster=load_cluster(suite.cluster or CLUSTER),
        layers=tuple(layers),
        ranks=suite.context_parallel_size,
        whole=suite.layout == "balanced" or suite.algorithm in WHOLE,
        recomputed=(int(again is not None), int(again == "full")),
    )
