"""Multi-token prediction: rolls, patches, specs, and the losses of Megatron on one rank (on ranks: test_gpt.py)."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError, Documents, Topology, build_plan
from mindspeed_cp.megatron import (
    attention_config,
    install,
    install_model,
    layer_attentions,
    local_mtp_spec,
    megatron_imports,
    planned_batch,
)
from mindspeed_cp.megatron.adaptors import model as model_module
from mindspeed_cp.megatron.adaptors.multi_token import PlannedRolls
from tests.layout.test_roll import dense_roll
from tests.megatron.gpt import (
    Case,
    Suite,
    available,
    build,
    data,
    layer_spec,
    one_rank,
    planned,
    transformer_config,
)
from tests.megatron.models import NEEDS_PACKED
from tests.megatron.oracle import plain
from tests.megatron.packed import plain_params
from tests.megatron.ranks import MegatronRanks
from tests.megatron.runs import Runs, assert_equal
from tests.megatron.test_gpt import LATER_CASES, MORE, RAGGED, TWO

with megatron_imports():
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer import multi_token_prediction

HAS_LOSS_FUNCTION = hasattr(multi_token_prediction, "process_mtp_loss")
TAKES_TOKENS = HAS_LOSS_FUNCTION and "input_ids" in signature(multi_token_prediction.process_mtp_loss).parameters


@pytest.fixture(scope="module")
def runs(ranks: MegatronRanks) -> Runs:
    return Runs(ranks, available(LATER_CASES))


@NEEDS_PACKED
def test_one_rank_rolls_as_megatron_does(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any patch, Megatron rolls the documents of cu_seqlens on one rank."""
    words = ("one layer", "two layers, balanced", "uneven mask", "learned positions", "latent")
    names = [f"later tokens: {word}" for word in words]
    outcomes = {name: runs.alone(name) for name in names}
    monkeypatch.setattr(model_module, "install_multi_token", lambda *_: None)
    with one_rank():
        for name in names:
            assert_equal(planned(LATER_CASES[name]), outcomes[name])


@NEEDS_PACKED
@pytest.mark.skipif(HAS_LOSS_FUNCTION, reason="from 0.17 on losses are weighed by what shares a micro-batch")
def test_each_document_alone_gives_the_same() -> None:
    case = Case((RAGGED, MORE), config=TWO)
    with one_rank():
        alone = plain(case)
        assert_equal(replace(planned(case), later_losses=()), alone)


@pytest.mark.skipif(not TAKES_TOKENS, reason="before 0.19 Megatron-core needs labels there")
def test_labels_that_are_not_given_are_the_next_tokens(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron does it on one rank: it trains layers of later tokens on tokens alone, for other losses."""
    gradients = []
    for is_patched in (True, False):
        if not is_patched:
            monkeypatch.setattr(model_module, "install_multi_token", lambda *_: None)
        model, config = built()
        batch, params = batch_of(config)
        model(batch["tokens"], batch["position_ids"], None, packed_seq_params=params).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0, atol=1e-5 * float(gradient.abs().max()))
    assert any(gradient.any() for name, gradient in gradients[0].items() if name.startswith("mtp."))


@NEEDS_PACKED
def test_the_cases_tell_rolls_apart(runs: Runs) -> None:
    """The comparisons above would be worth nothing if later tokens hardly mattered."""
    expected = runs.alone("later tokens: one layer")
    with one_rank():
        without = planned(Case((RAGGED, MORE), config=dict(mtp_num_layers=1, mtp_loss_scaling_factor=0.0)))
        merged = planned(Case(((sum(RAGGED),),), config=TWO))
    assert expected.loss == pytest.approx(without.loss, rel=1e-6)  # the losses of later tokens are not in it
    name = "embedding.word_embeddings.weight"
    assert np.abs(expected.tensors[name] - without.tensors[name]).max() > 1e-2 * np.abs(without.tensors[name]).max()
    assert abs(merged.later_losses[0] - runs.alone("later tokens: full recompute").later_losses[0]) > 1e-3
    assert runs.alone("later tokens: nothing counts").later_losses == (0.0, 0.0)


def built(**changes: Any) -> tuple[Any, Any]:
    """An installed model of one rank with multi-token prediction, and its settings."""
    config = transformer_config(**{"mtp_num_layers": 1, **changes})
    spec = install(layer_spec(config), Suite())
    return install_model(build(config, spec, mtp_block_spec=local_mtp_spec(config, spec))), config


def batch_of(config: Any) -> tuple[dict[str, torch.Tensor], Any]:
    documents, whole = data(Case((RAGGED,)), 0)
    return planned_batch(whole, build_plan(documents, Topology(1, 1), attention_config(config)), 0)


@NEEDS_PACKED
def test_megatron_is_patched_during_the_forward_alone(alone: None) -> None:
    def now() -> tuple[Any, ...]:
        return (multi_token_prediction.roll_tensor, vars(gpt_model).get("roll_tensor"),
                multi_token_prediction.MultiTokenPredictionLayer._checkpointed_forward,
                multi_token_prediction.MTPLossLoggingHelper, vars(gpt_model).get("process_mtp_loss"))  # fmt: skip

    before = now()
    model, config = built()
    batch, params = batch_of(config)
    assert install_model(model) is model
    seen = []
    model.mtp.register_forward_pre_hook(lambda *_: seen.append(multi_token_prediction.roll_tensor is before[0]))
    arguments = dict(labels=batch["labels"], packed_seq_params=params, loss_mask=batch["loss_mask"])
    model(batch["tokens"], batch["position_ids"], None, **arguments)
    assert seen == [False] and now() == before
    model(batch["tokens"], None, None, **arguments)  # rotary positions come from the plan
    assert now() == before
    with pytest.raises(ConfigError, match=r"loss_mask of the model is None; valid with labels and mtp_num_layers"):
        model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
    for labels in (batch["labels"], None):
        with pytest.raises(ConfigError, match=r"loss_mask of the model is torch.int64"):
            whole = {**arguments, "labels": labels, "loss_mask": batch["tokens"]}
            model(batch["tokens"], batch["position_ids"], None, **whole)
    with pytest.raises(ConfigError, match=r"rolls a tensor of shape \[1, 65\], but rank 0 of the plan has \[1, 66\]"):
        model(batch["tokens"], batch["position_ids"], None, **{**arguments, "labels": batch["labels"][:, 1:]})
    assert now() == before


@NEEDS_PACKED
def test_rows_are_rolled_inside_documents(alone: None) -> None:
    model, config = built()
    core = model.decoder.layers[0].self_attention.core_attention
    rolls = PlannedRolls(core)
    _, params = batch_of(config)
    documents = Documents(RAGGED)
    rows = torch.arange(1, documents.tokens + 1)
    expected = torch.from_numpy(dense_roll(rows.numpy(), documents, 2, 0))
    for given in (params, plain_params([n for n in RAGGED if n])):
        assert torch.equal(rolls.roll(rows[None], 2, given)[0], expected)
        assert torch.equal(rolls.roll(rows.expand(3, 1, -1), 2, given), expected.expand(3, 1, -1))
        assert not rolls.params_of(given).padding_mask().any()
    assert float(rolls.total(torch.ones(3))) == 3.0
    assert float(rolls.total(torch.ones(301, dtype=torch.bfloat16))) == 301.0
    padding = torch.tensor([[False, True]])
    assert rolls.roll(padding, 1, params) is padding


@NEEDS_PACKED
def test_specs_of_megatron_are_installed(alone: None) -> None:
    """A spec that Megatron makes from layers without plans can be installed by itself."""
    config = transformer_config(mtp_num_layers=2)
    spec = layer_spec(config)
    suite = Suite()
    later = install(local_mtp_spec(config, spec), suite)
    model = install_model(build(config, install(spec, suite), mtp_block_spec=later))
    numbers = [module.number_in_model for module in model.modules() if hasattr(module, "number_in_model")]
    assert numbers == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"mtp\.layers\.0\.\w+\.self_attention\.core_attention is DotProduct"):
        install_model(build(config, install(spec, suite), mtp_block_spec=local_mtp_spec(config, spec)))


def test_settings_that_later_layers_cannot_have_are_refused() -> None:
    windows = dict(window_size=(7, 0), window_attn_skip_freq=[1, 0])
    with pytest.raises(ConfigError, match=r"window_attn_skip_freq is \[1, 0\], without entries for the 1 layers"):
        layer_attentions(transformer_config(mtp_num_layers=1, **windows))
    assert len(layer_attentions(transformer_config(mtp_num_layers=2))) == 4
