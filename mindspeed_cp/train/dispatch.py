"""The dispatcher that assigns documents of global batches to the replicas of a training."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_cp.config.derived import document_cost, mean_layer_cost, training_plan_options
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import Corpus, Dispatcher, PoolModel, TrajectoryCorpus
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.train.world import World


def make_dispatcher(
    settings: Settings, attentions: Sequence[AttentionConfig], world: World, corpus: Corpus
) -> Dispatcher:
    """Return the dispatcher of `data.balance`.

    Args:
        settings: settings of the run.
        attentions: attention of each layer on this tensor-parallel rank.
        world: this rank among all.
        corpus: the corpus of the run.
    """
    cost = document_cost(settings, attentions)
    suite, pool = settings.context_parallel_suite, None
    if world.pool is not None:
        pool = PoolModel(
            replica=suite.topology,
            pool=world.pool,
            attention=attentions[0],  # layers of different attention cannot share a placement, and are refused
            layer=mean_layer_cost(settings),
            layers=len(attentions),
            options=training_plan_options(settings),
            stages=world.stages,
            subpool=None if world.subpools is None else world.subpools.topology,
        )
    # Megatron lays expert-parallel groups over consecutive ranks of a pipeline stage, and a replica's part of it is
    # consecutive ranks. Where experts span replicas, or pools, these wait for each other in every layer and need
    # equally many micro-batches.
    has_experts, expert_ranks = settings.model.num_moe_experts is not None, settings.train.expert_model_parallel_size
    replica_ranks = world.cp_size * world.tp_size
    pool_ranks = replica_ranks * world.replicas_of_plan(1 if world.subpools is None else world.subpools.count)
    return Dispatcher(
        balance=settings.data.balance,
        replicas=world.replicas,
        context=settings.data.seq_length,
        cost=cost,
        per_micro_batch=cost.per_micro_batch,
        equal_counts=has_experts and replica_ranks % expert_ranks != 0,
        equal_pool_counts=has_experts and pool_ranks % expert_ranks != 0,
        keeps_document_numbers=settings.model.attention_dropout > 0,
        pool=pool,
        stages=world.stages,
        trees=corpus if isinstance(corpus, TrajectoryCorpus) else None,
    )
