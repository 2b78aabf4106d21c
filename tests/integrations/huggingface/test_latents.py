"""Latents that travel between ranks of DeepSeek-V3 models, against the documents one by one: loss and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch import nn

from mindspeed_cp import ConfigError, Documents, Topology
from mindspeed_cp.integrations import huggingface as cp
from mindspeed_cp.integrations.huggingface.families import latent_layer
from tests.integrations.huggingface import meshes
from tests.integrations.huggingface.models import make_config, make_model, planned_step, reference_step, whole_batch

LENGTHS = (23, 1, 0, 40, 9)
SHORT = (2, 1)  # some ranks have no row
NAME, ON = "deepseek_v3", {"latents": "on"}

reference = cache(reference_step)

pytestmark = pytest.mark.skipif(
    latent_layer(NAME) is None, reason="this transformers expands latents inside its attention's forward"
)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "checkpoint", "lengths"),
    [
        ("ring", 1, False, LENGTHS),
        ("ring", 3, True, LENGTHS),
        ("direct", 2, False, LENGTHS),
        ("direct", 3, False, SHORT),
        ("hierarchical", 2, True, LENGTHS),
        ("all_gather", 3, False, LENGTHS),
    ],
)
def test_a_model_equals_its_documents_one_by_one(
    pool, algorithm: str, ranks: int, checkpoint: bool, lengths: tuple[int, ...]
) -> None:
    wanted = reference(NAME, lengths)
    for step in pool.run(ranks, planned_step, NAME, lengths, algorithm, checkpoint, {}, ON):
        assert step.gradients.keys() == wanted.gradients.keys()
        assert step.largest_error(wanted) < 1e-5


@pytest.mark.parametrize("kind", ["fsdp2", "bf16", "autocast"])
def test_fsdp_shards_the_up_projection_with_its_layer(pool, kind: str) -> None:
    """In bf16 as where keys and values travel, but for the order in which products are rounded."""
    results = [pool.run(4, meshes.planned_steps, NAME, kind, "direct", True, None, False, ON)]
    results.append(pool.run(4, meshes.planned_steps, NAME, kind, "direct", True, None, False, {"latents": "off"}))
    limit = 1e-5 if kind == "fsdp2" else 2e-2
    for (losses, weights), (other_losses, other_weights) in zip(*results, strict=True):
        assert losses == pytest.approx(other_losses, rel=limit)
        for name, weight in other_weights.items():
            assert float((weights[name] - weight).abs().max()) <= limit * max(1.0, float(weight.abs().max())), name


def run_with(change: Callable[[Any], None], **options: Any) -> None:
    """Run a model whose layers were changed."""
    cp.register()
    model = make_model(make_config(NAME), cp.IMPLEMENTATION)
    batch, _ = cp.planned_batch(whole_batch(LENGTHS), model.config, None, documents=Documents(LENGTHS), **options)
    change(model.model.layers[1].self_attn)
    model(**batch)


def with_adapter(layer: Any) -> None:
    layer.kv_b_proj = type("AdapterLinear", (nn.Linear,), {})(16, 4 * 28, bias=False)


def with_hook(layer: Any) -> None:
    layer.kv_b_proj.register_forward_hook(lambda module, inputs, out: out)


@pytest.mark.parametrize(
    ("change", "says"),
    [(with_adapter, r"layer 1 \(DeepseekV3Attention\): latents travel in this plan, but kv_b_proj is a AdapterLinear"),
     (with_hook, "kv_b_proj is a Linear with hooks; valid: a torch.nn.Linear without bias, adapter or hooks")],
)  # fmt: skip
def test_up_projections_that_readers_cannot_apply_are_refused(change: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_with(change, **ON)
    run_with(change, latents="off")


def test_latents_of_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"latents is 'on', but attention.latent is None; valid: 'auto' or 'off'"):
        cp.build_plans(make_config("llama"), Documents(LENGTHS), Topology(1, 2), **ON)
    with pytest.raises(ConfigError, match=r"latents is 'on', but attention.latent is None"):
        cp.build_plans(make_config(NAME), Documents(LENGTHS), Topology(1, 2), tensor_parallel_size=2, **ON)


def test_other_implementations_compute_as_before() -> None:
    config = make_config(NAME)
    before = make_model(config, "sdpa")(**(rows := {"input_ids": whole_batch(LENGTHS)["input_ids"]})).logits
    cp.register()
    assert torch.equal(make_model(config, "sdpa")(**rows).logits, before)
