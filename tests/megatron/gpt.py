"""A two-layer GPT on Megatron-core, trained for a step or more with planned attention on tp x cp ranks.

Everything here is a module-level function of picklable arguments, so that the pool of workers can run it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mindspeed_cp import Documents, Topology, build_plan
from mindspeed_cp.algorithms.linear_layout import with_linear_layout
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.megatron import (
    PlannedBatchParams,
    install,
    install_model,
    layer_attentions,
    local_mtp_spec,
    local_spec,
    loss_function,
    megatron_compat,
    megatron_imports,
    megatron_on_cpu,
    micro_batch_seed,
    planned_batch,
    rows_multiple,
    shift_labels,
)
from mindspeed_cp.megatron.patches import versions
from tests.gloo import share_event_loop
from tests.limits import HANG
from tests.megatron.packed import cut_batch, plan_whole
from tools.megatron_arguments import entry_of

with megatron_imports():
    from megatron.core import __version__ as VERSION
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

VOCABULARY = 96


def Suite(options: Mapping[str, Any] | None = None, **keys: Any) -> SuiteSettings:
    """Return the section context_parallel_suite with these options of the algorithm and other keys."""
    return SuiteSettings(**{"timeout_seconds": float(HANG), **keys, **(options or {})})


@dataclass(frozen=True)
class Case:
    """One training step, or several.

    Attributes:
        batches: documents' lengths of each micro-batch, assigned to data-parallel ranks in turn.
        masked: fraction of tokens, from the start of the batch, whose loss does not count.
        optimizer: "float32" or "distributed" to take steps; None to stop at the gradients.
        steps: how many times the batches are trained on.
        algorithm, options: of the plans.
        packed: how a data loader without plans cuts the batch (tests.megatron.packed); None: planned_batch does.
        remap: "qkv" or "hidden": linear layers on equal-token layouts; None: on the layout of the plans.
        alibi: linear biases in place of rotary positions.
        model: arguments of GPTModel (rotary_base and the like).
        config: arguments of TransformerConfig.
        forward: what Megatron's schedule calls with the case, config, step, batches and model; None: forward_step.
    """

    batches: tuple[tuple[int, ...], ...]
    packed: str | None = None
    masked: float = 0.0
    optimizer: str | None = None
    steps: int = 1
    algorithm: str = "ring"
    options: dict[str, Any] = field(default_factory=dict)
    remap: str | None = None
    alibi: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    forward: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """What the steps give, the same on every rank: global mean loss of the last step, counted tokens, and gradients
    (float32, whole, divided by the count) or, after an optimizer's steps, gradient norms and the new weights; with
    multi-token prediction the loss of each of its layers, as Megatron logs it."""

    loss: float
    tokens: int
    tensors: dict[str, np.ndarray]
    norms: tuple[float, ...] = ()
    later_losses: tuple[float, ...] = ()


def collect_garbage() -> None:
    """Free the process groups of a test that cycles hold: each has threads of its own.

    What survives belongs to modules. It is frozen, since looking at all of it again takes half a second.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def one_rank() -> Iterator[None]:
    """Megatron in this process: a world of one rank, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    share_event_loop()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with megatron():
            yield
    finally:
        dist.destroy_process_group()
        collect_garbage()
        torch.set_num_threads(threads)


@contextmanager
def megatron(tp: int = 1, cp: int = 1, ep: int = 1, pp: int = 1) -> Iterator[None]:
    """Megatron's groups on the CPU, over the default process group; gone afterwards."""
    with megatron_on_cpu(), megatron_compat():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1,
        )
        try:
            seed_generators()
            yield
        finally:
            destroy_groups()


def forget_losses() -> None:
    """Forget the last model's losses of experts, which Megatron keeps for as many layers as that had, and of later
    tokens."""
    for module in (moe_utils, parallel_state):  # in 0.12 the latter has them
        getattr(module, "get_moe_layer_wise_logging_tracker", dict)().clear()
    getattr(sys.modules.get(f"{moe_utils.__package__}.moe_logging"), "destroy_moe_metrics_tracker", dict)()  # 0.19
    MTPLossLoggingHelper.tracker.clear()


def destroy_groups() -> None:
    """End Megatron's groups; 0.12 forgets to forget who was in the groups of the embeddings."""
    parallel_state.destroy_model_parallel()
    forget_losses()
    for name in ("_EMBEDDING_GLOBAL_RANKS", "_POSITION_EMBEDDING_GLOBAL_RANKS"):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, None)


class LackingSetting(Exception):
    """A test's settings are not those of the installed Megatron-core; tests/megatron/conftest.py skips it."""


def lacks(config: Mapping[str, Any], case: Case | None = None) -> str | None:
    """Return why the installed Megatron-core cannot have a model of a case, or None.

    Raises:
        KeyError: no version of Megatron-core has a setting of this name: it is misspelt.
    """
    for name in config:
        known = name in MLATransformerConfig.__dataclass_fields__ or name == "original_max_position_embeddings"
        if not known and not name.startswith("yarn_"):
            if entry_of(name) is None:
                raise KeyError(f"{name} is a setting of no version of Megatron-core that was looked at")
            return f"megatron-core {VERSION} has no {name}"
    if case and case.model.get("position_embedding_type") == "yarn" and versions.IS_0_12:
        return f"a GPTModel of megatron-core {VERSION} has no position_embedding_type 'yarn'"
    if case and versions.IS_0_12 and config.get("mtp_num_layers"):
        return f"multi-token prediction of megatron-core {VERSION} refuses packed_seq_params"
    norms_alone = config.get("qk_layernorm") and config.get("q_lora_rank", 0) is None
    if norms_alone and find_spec("megatron.core.transformer.mla_qk_norm_config"):
        return (
            f"megatron-core {VERSION} norms latents beside queries that are not compressed by Transformer Engine alone"
        )
    return None


def available(cases: Mapping[str, Case]) -> dict[str, Case]:
    """Return the cases that the installed Megatron-core has."""
    return {name: case for name, case in cases.items() if lacks(case.config, case) is None}


def named(cases: Mapping[str, Case]) -> list[Any]:
    """Return a pytest parameter for each case, skipped by name where the installed Megatron-core lacks a setting."""
    reasons = {name: lacks(case.config, case) for name, case in cases.items()}
    return [
        pytest.param(name, id=name, marks=[pytest.mark.skip(reason=reason)] if reason else [])
        for name, reason in reasons.items()
    ]


def seed_generators(seed: int = 1234) -> None:
    """Megatron's random tracker anew; 0.12 always has a new one."""
    seed_all = tensor_parallel.model_parallel_cuda_manual_seed
    seed_all(seed, **({"force_reset_rng": True} if "force_reset_rng" in signature(seed_all).parameters else {}))


def transformer_config(tp: int = 1, cp: int = 1, ep: int = 1, **changes: Any) -> TransformerConfig:
    """Two layers, grouped queries, RoPE's widths; no dropout."""
    settings: dict[str, Any] = dict(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
        tensor_model_parallel_size=tp, context_parallel_size=cp, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, normalization="RMSNorm", add_bias_linear=False, pipeline_dtype=torch.float32,
        calculate_per_token_loss=True, init_method_std=0.2,
    )  # fmt: skip
    if "cuda_graph_scope" in TransformerConfig.__dataclass_fields__:  # not in 0.12
        settings["cuda_graph_scope"] = []
    if "transformer_impl" in TransformerConfig.__dataclass_fields__:  # not in 0.12; 0.19 takes projections by it
        settings["transformer_impl"] = "local"
    kind = MLATransformerConfig if changes.get("multi_latent_attention") else TransformerConfig
    lacking = lacks(changes)
    if lacking is not None:
        raise LackingSetting(lacking)
    yarn = {name: changes.pop(name) for name in list(changes) if name.startswith("yarn_")}
    name = "original_max_position_embeddings"
    if name in changes and name not in MLATransformerConfig.__dataclass_fields__:  # in 0.12
        changes["max_position_embeddings"] = changes.pop(name)
    config = kind(**{**settings, **changes})
    for name, value in yarn.items():  # Megatron reads them from its config, which has no such fields
        setattr(config, name, value)
    return config


def layer_spec(config: TransformerConfig) -> Any:
    """Megatron's local spec of the model's layers."""
    return local_spec(config)


def experts_of(layer: Any) -> Any:
    """The parts of a layer's mixture of experts, whose spec is a partial since Megatron 0.17."""
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def build(config: TransformerConfig, spec: Any, **arguments: Any) -> GPTModel:
    """A GPT whose weights depend on the seed alone, whatever the parallel layout."""
    torch.manual_seed(7)
    settings = {"position_embedding_type": "rope", "max_sequence_length": 256, **arguments}
    model = GPTModel(config, spec, vocab_size=VOCABULARY, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("softmax_offset"):  # sinks as large as the lse of some tens of keys, other in every layer
                parameter.add_(2.0).mul_(1.0 + 0.5 * int(name.split("layers.")[1].split(".")[0]))
    return model


def data(case: Case, index: int) -> tuple[Documents, dict[str, torch.Tensor]]:
    """Tokens, shifted labels and loss mask of one micro-batch, the same on every rank."""
    documents = Documents(case.batches[index])
    tokens = torch.randint(0, VOCABULARY, (documents.tokens,), generator=torch.Generator().manual_seed(index))
    labels, mask = shift_labels(tokens, documents)
    mask[: int(case.masked * documents.tokens)] = 0.0
    whole = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    if "mrope_section" in case.config:
        whole["position_ids"] = mrope_positions(documents)
    return documents, whole


def mrope_positions(documents: Documents) -> torch.Tensor:
    """Positions of time, height and width, [3, tokens]: every document has five tokens of text, then images of 3 x 4
    patches and one token of text in turn."""
    columns: list[tuple[int, int, int]] = []
    for length in documents.lengths.tolist():
        start, own = 0, []
        while len(own) < length:
            own += [(start + i,) * 3 for i in range(5 if start == 0 else 1)]
            start = max(own[-1]) + 1
            own += [(start, start + i // 4, start + i % 4) for i in range(12)]
            start += 4
        columns += own[:length]
    return torch.tensor(columns, dtype=torch.int64).reshape(-1, 3).T.contiguous()


def planned(case: Case, tp: int = 1, cp: int = 1, ep: int = 1) -> Outcome:
    """Steps with planned attention through Megatron's DDP, schedule and gradient finalisation."""
    config = transformer_config(tp, cp, ep, **case.config)
    suite = Suite(context_parallel_size=cp, algorithm=case.algorithm, options=case.options)
    arguments = {"position_embedding_type": "none", **case.model} if case.alibi else case.model
    spec = install(layer_spec(config), suite, alibi=case.alibi)
    later = {"mtp_block_spec": local_mtp_spec(config, spec)} if config.mtp_num_layers else {}
    model: torch.nn.Module = build(config, spec, **arguments, **later)
    if config.bf16:
        model = Float16Module(config, model)
    install_model(model)
    distributed = case.optimizer == "distributed"
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    ddp = DistributedDataParallel(config, ddp_config, model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = None
    if case.optimizer is not None:
        # A large eps: the step then depends smoothly on gradients that are all but zero.
        settings = OptimizerConfig(lr=0.1, adam_eps=0.1, clip_grad=1.0, use_distributed_optimizer=distributed)
        optimizer = get_megatron_optimizer(settings, [ddp])
    own_batches = range(
        parallel_state.get_data_parallel_rank(), len(case.batches), parallel_state.get_data_parallel_world_size()
    )
    forget_losses()
    # A backward pass of an earlier test, without Megatron's schedule, leaves a scale of another shape.
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    norms = []
    for step in range(case.steps):
        ddp.zero_grad_buffer()
        if optimizer is not None:
            optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=partial(case.forward or forward_step, case, config, step),
            data_iterator=iter(own_batches),
            model=[ddp],
            num_microbatches=len(own_batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        norms += [] if optimizer is None else [float(optimizer.step()[1])]
    loss, tokens = global_loss(reports)
    tensors: dict[str, np.ndarray] = {}
    for name, p in model.named_parameters():
        local = p.detach() if optimizer is not None else p.main_grad
        tensors |= _whole(name.removeprefix("module."), p, local, config.num_moe_experts or 0)
    return Outcome(loss, tokens, tensors, tuple(norms), later_losses() if config.mtp_num_layers else ())


def global_loss(reports: list[dict[str, torch.Tensor]]) -> tuple[float, int]:
    """The mean loss over the tokens of all micro-batches and ranks, and their number; (0, 0) without."""
    total = torch.stack([torch.zeros(2), *(report["lm loss"] for report in reports)]).double().sum(0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(total[0]) / max(1, int(total[1])), int(total[1])


def later_losses() -> tuple[float, ...]:
    """The losses of multi-token prediction since the last call, the sum over the micro-batches of all replicas: the mean
    over context-parallel ranks, as Megatron logs them."""
    tracker = MTPLossLoggingHelper.tracker
    values = tracker["loss_values" if "loss_values" in tracker else "values"]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    losses = values.clone() / parallel_state.get_context_parallel_world_size()
    dist.all_reduce(losses, group=group)
    values.zero_()
    return tuple(losses.tolist())


def forward_step(
    case: Case, config: TransformerConfig, step: int, batches: Iterator[int], model: torch.nn.Module
) -> Any:
    """What Megatron's schedule calls for every micro-batch."""
    index = next(batches)
    documents, whole = data(case, index)
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    seed = micro_batch_seed(1, step * len(case.batches) + index)
    if case.packed == "whole":
        suite = Suite(context_parallel_size=cp, algorithm=case.algorithm)
        batch, params = plan_whole(whole, documents.lengths.tolist(), config, suite, seed)
    elif case.packed is not None:
        batch, params = cut_batch(whole, documents.lengths.tolist(), case.packed, cp, rank)
    else:
        plans = [
            build_plan(documents, Topology(1, cp), attention, case.algorithm, **case.options)
            for attention in dict.fromkeys(layer_attentions(config, alibi=case.alibi))
        ]
        if case.remap is not None:
            plans = [with_linear_layout(plan, case.remap) for plan in plans]
        batch, params = planned_batch(whole, plans, rank, rows_multiple=rows_multiple(config), dropout_seed=seed)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=params,
        **(params.padding_arguments(model) if isinstance(params, PlannedBatchParams) else {}),
        **({"loss_mask": batch["loss_mask"]} if config.mtp_num_layers else {}),
    )
    return losses, partial(loss_function, batch["loss_mask"])


def _whole(name: str, parameter: torch.nn.Parameter, local: torch.Tensor, experts: int) -> dict[str, np.ndarray]:
    """A parameter's tensor gathered over tensor-parallel ranks; an expert's under its number in the whole model, with
    those of the other expert-parallel ranks."""
    group, ep = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_model_parallel_group()
    before, _, after = name.partition("local_experts.")
    if group.size() > 1 and getattr(parameter, "tensor_model_parallel", False) and not after:
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        local = torch.cat(parts, dim=parameter.partition_dim)  # type: ignore[attr-defined]
    if not after:
        return {name: local.float().numpy().copy()}
    held = [torch.empty_like(local) for _ in range(ep.size())]
    dist.all_gather(held, local.contiguous(), group=ep)
    own, _, rest = after.partition(".")
    count = experts // ep.size()
    return {
        f"{before}local_experts.{rank * count + int(own)}.{rest}": tensor.float().numpy().copy()
        for rank, tensor in enumerate(held)
    }


def on_ranks(
    rank: int, group: dist.ProcessGroup | None, tp: int, cp: int, cases: list[Case], ep: int = 1
) -> list[Outcome]:
    """What the pool of workers runs: several cases, one set of Megatron's groups."""
    with megatron(tp, cp, ep):
        return [planned(case, tp, cp, ep) for case in cases]
