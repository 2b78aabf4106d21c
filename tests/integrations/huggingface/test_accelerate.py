"""accelerate without the Trainer: an own loop with `prepare`, `backward` and gradient accumulation on four ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import torch
import torch.distributed as dist

from mindspeed_cp.integrations import huggingface as cp
from tests.integrations.huggingface.meshes import STEPS, batches_of, reference, sgd
from tests.integrations.huggingface.models import make_config, make_model


def accelerated_steps(rank: int, group: Any, precision: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one of four ranks: two replicas of two context-parallel ranks."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.distributed.device_mesh import init_device_mesh

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = make_model(make_config("llama"), cp.register())
    config = model.config
    model, optimizer = accelerator.prepare(model, sgd(model))
    losses = []
    for step in range(STEPS):
        cut = []
        for lengths, batch in batches_of(step, mesh["dp"].get_local_rank()):
            described = {**batch, "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0)}
            cut.append(cp.planned_batch(described, config, mesh["cp"], "ring"))
        count, total = cp.count_labels([labels for _, labels in cut]), torch.zeros(())
        for rows, labels in cut:
            with accelerator.accumulate(model):
                share = cp.loss(model(**rows).logits, labels, count)
                accelerator.backward(share * accelerator.gradient_accumulation_steps)  # it divides by them
                optimizer.step()
                optimizer.zero_grad()
            total += share.detach()
        dist.all_reduce(total)
        losses.append(float(total) / 4)
    return losses, {name.removeprefix("module."): x.detach().clone() for name, x in model.named_parameters()}


def test_an_accelerated_loop_equals_the_documents_one_by_one(pool) -> None:
    wanted, weights = reference("llama")
    for losses, parameters in pool.run(4, accelerated_steps, "no"):
        assert losses == pytest.approx(wanted, abs=2e-6)
        assert max(float((parameters[key] - weights[key]).abs().max()) for key in weights) < 2e-6
