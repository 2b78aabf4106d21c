"""torch.compile: attention breaks the graph by name, and everything else is compiled."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from mindspeed_cp import Documents
from mindspeed_cp.integrations import huggingface as cp
from tests.integrations.huggingface.models import make_config, make_model, whole_batch

LENGTHS = (9, 4)


def parts() -> tuple[torch.nn.Module, dict, torch.Tensor]:
    cp.register()
    model = make_model(make_config("llama"), cp.IMPLEMENTATION)
    return model, *cp.planned_batch(whole_batch(LENGTHS), model.config, None, documents=Documents(LENGTHS))


def test_a_compiled_model_gives_the_same_loss_and_gradients() -> None:
    gradients = []
    for compiled in (False, True):
        model, batch, labels = parts()
        run = torch.compile(model, backend="aot_eager") if compiled else model
        cp.loss(run(**batch).logits, labels, cp.count_labels(labels)).backward()
        gradients.append({name.removeprefix("_orig_mod."): x.grad for name, x in model.named_parameters()})
    plain, other = gradients
    assert max(float((plain[name] - other[name]).abs().max()) for name in plain) < 1e-6


def test_a_graph_without_breaks_is_refused_with_the_reason() -> None:
    torch._dynamo.reset()  # else code compiled before is taken
    model, batch, _ = parts()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a plan's messages are no graph"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**batch)
