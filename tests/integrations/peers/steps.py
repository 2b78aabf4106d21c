"""One step of a rank through the doubles of verl and ms-swift, planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_cp.integrations.huggingface.rows import gather_rows, packed_row_plans, slice_rows
from mindspeed_cp.integrations.ms_swift import use_plans
from mindspeed_cp.integrations.verl import planned_engine
from tests.integrations.huggingface.models import Step, make_config, make_model, whole_batch
from tests.integrations.peers.swift_double import GatherLoss, SequenceParallel
from tests.integrations.peers.verl_double import Engine

ROOT = Path(__file__).parents[3]


def example_steps(program: str, ranks: int, cp: int) -> list[dict[str, float]]:
    """What an example prints of its steps."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"examples/{program}", "--ranks", str(ranks), "--cp", str(cp)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{") and '"loss"' in line]


def documents_and_labels(lengths: tuple[int, ...]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tokens of each document, and labels [tokens] of which each says what its own token is worth learning."""
    batch = whole_batch(lengths)
    labels = batch["labels"][0].clone()
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1][torch.tensor(lengths) > 0]
    labels[starts] = -100  # no token predicts the first one of a document
    return list(batch["input_ids"][0].split(lengths)), labels


def averaged(loss: torch.Tensor, model: torch.nn.Module, group: Any) -> Step:
    """The step of all ranks, whose gradients are averaged, as DDP and FSDP do."""
    gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
        gradient /= group.size()
    return Step(float(loss.detach()), gradients)


def mesh_of(group: Any, name: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


def verl_step(rank: int, group: Any, name: str, lengths: tuple[int, ...], algorithm: str, bucket: int) -> Step:
    """A step of the planned engine over the double of verl's."""
    engine = planned_engine(Engine, algorithm)(make_config(name), mesh_of(group, "sp"), bucket)
    documents, labels = documents_and_labels(lengths)
    log_probs = engine.forward_step({"input_ids": [x for x in documents if len(x)], "temperature": 1.0})
    learned = torch.roll(labels, -1) != -100
    loss = -(log_probs * learned).sum() / learned.sum()
    loss.backward()
    return averaged(loss, engine.module, group)


def swift_step(rank: int, group: Any, name: str, lengths: tuple[int, ...], algorithm: str, weighted: bool) -> Step:
    """A step in the order of ms-swift's trainer, over the double of its sequence-parallel object."""
    sp = SequenceParallel()
    use_plans(sp, algorithm)
    sp._init_device_mesh = lambda: setattr(sp, "device_mesh", {"ring": mesh_of(group, "ring")})  # the pool's group
    sp.rp_world_size = group.size()
    model = make_model(make_config(name), "sdpa")
    sp.prepare(group.size(), model, None, padding_free=True)
    documents, labels = documents_and_labels(lengths)
    positions = torch.cat([torch.arange(len(tokens)) for tokens in documents])[None]
    inputs = {"input_ids": torch.cat(documents)[None], "position_ids": positions, "labels": labels[None]}
    if weighted:
        inputs["loss_scale"] = torch.full(labels[None].shape, 0.5)
    sp.prepare_inputs(inputs)
    targets, weights = inputs.pop("labels"), inputs.pop("loss_scale", None)
    logits = model(**inputs).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")[None]
    whole = GatherLoss.apply(losses, sp, positions)
    if weights is not None:
        whole = whole * 2 * sp.gather(weights, 1, positions)
    count = (targets != -100).sum()
    dist.all_reduce(count, group=group)
    loss = whole.sum() / count
    loss.backward()
    return averaged(loss, model, group)


def round_trip(rank: int, group: Any, lengths: tuple[int, ...], algorithm: str) -> list[torch.Tensor]:
    """Whole tensors that are sliced and gathered again, and the gradient of a row's sum through the gather."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    plans = packed_row_plans(make_config("llama"), mesh_of(group, "sp"), positions, 0, algorithm=algorithm)
    tokens, size = sum(lengths), group.size()
    wide = torch.arange(3 * tokens * 2.0).reshape(3, tokens, 2)
    part = slice_rows(wide, plans, 1).requires_grad_()
    whole = gather_rows(part, plans, 1, size)
    (whole * torch.arange(float(tokens))[:, None]).sum().backward()
    assert part.grad is not None
    gradients = gather_rows(part.grad, plans, 1)
    assert torch.equal(gradients, (torch.arange(float(tokens)) * size)[None, :, None].expand(3, -1, 2))
    learned = positions % 2 == 0
    return [gather_rows(slice_rows(x, plans, 1), plans) for x in (positions, learned)] + [whole.detach()]
