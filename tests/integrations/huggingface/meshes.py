"""Three optimizer steps on device meshes, and the same steps on one process, document by document."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_cp.integrations import huggingface as cp
from tests.integrations.huggingface.models import make_config, make_model, whole_batch

#: Documents of each replica, for each batch of a step.
BATCHES = (((23, 1, 0, 40), (9, 30)), ((5, 17, 2), (61, 3)))
STEPS = 3


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches_of(step: int, replica: int) -> list[tuple[tuple[int, ...], dict[str, torch.Tensor]]]:
    """Lengths and whole batches of a replica in a step."""
    return [
        (lengths[replica], whole_batch(lengths[replica], 100 * step + 10 * i + replica))
        for i, lengths in enumerate(BATCHES)
    ]


def reference(name: str, clip: float | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and the weights after the last one."""
    model = make_model(make_config(name), "sdpa")
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for replica in (0, 1):
            for lengths, batch in batches_of(step, replica):
                for tokens, labels in zip(
                    *(batch[key].split(lengths, 1) for key in ("input_ids", "labels")), strict=True
                ):
                    if tokens.numel():
                        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
                        total = total + torch.nn.functional.cross_entropy(
                            logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
                        )
                        count += int((labels[:, 1:] != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return losses, {key: x.detach() for key, x in model.named_parameters()}


def wrap(model: Any, kind: str, mesh: Any) -> Any:
    """The model under DDP or FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if kind in ("ddp", "autocast"):
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "tensor parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for layer in model.model.layers:
            columns = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {
                f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")
            }
            parallelize_module(
                layer,
                mesh["dp"],
                {**columns, "self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()},
            )
        return model
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if kind == "bf16"
        else MixedPrecisionPolicy()
    )
    over = mesh if kind == "hsdp" else mesh["dp", "cp"]._flatten("dp_cp")
    for layer in layers_of(model):
        fully_shard(layer, mesh=over, mp_policy=policy)
    return fully_shard(model, mesh=over, mp_policy=policy)


def layers_of(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def planned_steps(
    rank: int,
    group: Any,
    name: str,
    kind: str,
    algorithm: str,
    checkpoint: bool,
    clip: float | None,
    scaled: bool = False,
    options: dict[str, Any] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The steps of one of four ranks: two replicas of two context-parallel ranks (or, for "tensor parallel", two
    tensor-parallel ranks of two context-parallel ones, which take both replicas' batches in turn)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    cp.register()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp_group, shares = mesh["cp"].get_group(), kind == "tensor parallel"
    model = make_model(make_config(name), cp.IMPLEMENTATION)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped, losses = wrap(model, kind, mesh), []
    optimizer = sgd(wrapped)
    averaged = cp_group if shares else group
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    heads = {"tensor_parallel_size": 2, "tensor_parallel_rank": mesh["dp"].get_local_rank()} if shares else {}
    for step in range(STEPS):
        replicas = (0, 1) if shares else (mesh["dp"].get_local_rank(),)
        cut = []
        for replica in replicas:
            for lengths, batch in batches_of(step, replica):
                described = {**batch, "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0)}
                cut.append(cp.planned_batch(described, model.config, mesh["cp"], algorithm, **heads, **options or {}))
        labels = [targets for _, targets in cut]
        count, total = cp.count_labels(labels, averaged), torch.zeros(())
        optimizer.zero_grad()
        for i, (batch, _) in enumerate(cut):
            last = i == len(cut) - 1
            if kind not in ("ddp", "autocast", "tensor parallel"):
                wrapped.set_requires_gradient_sync(last)
            with wrapped.no_sync() if kind in ("ddp", "autocast") and not last else torch.enable_grad():
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                    share = cp.loss(wrapped(**batch).logits, labels[i], count, averaged)
                scaler.scale(share).backward()
            total += share.detach()
        if shares:  # nothing averages gradients over context-parallel ranks here
            for parameter in model.parameters():
                local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                dist.all_reduce(local, group=cp_group)
                local /= 2
        scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        dist.all_reduce(total, group=averaged)
        losses.append(float(total) / averaged.size())
    weights = {
        key.removeprefix("module."): x.full_tensor() if isinstance(x, DTensor) else x
        for key, x in wrapped.named_parameters()
    }
    return losses, {key: x.detach().clone() for key, x in weights.items()}
