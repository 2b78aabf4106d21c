"""Rotary positions from the layout: Megatron's own numbers, on any rank, and no way to forget them."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.megatron import (
    LatentRotary,
    PlannedRotary,
    attention_config,
    install,
    install_model,
    megatron_imports,
    planned_batch,
    planned_params,
)
from tests.megatron.gpt import Case, Suite, build, data, layer_spec, megatron, transformer_config
from tests.megatron.models import LATENT, LATENT_YARN
from tests.megatron.ranks import MegatronRanks

with megatron_imports():
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

LENGTHS = [37, 0, 5, 1, 64, 2]
ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=16)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "base": dict(rotary_base=500),
    "percent": dict(rotary_percent=0.5),
    "interleaved": dict(rotary_interleaved=True),
    "interpolated": dict(seq_len_interpolation_factor=3.0),
    "llama3 scaling": dict(rope_scaling=True, rope_scaling_factor=4.0, rotary_base=500000),
    "all": dict(
        rotary_base=77,
        rotary_percent=0.25,
        rotary_interleaved=True,
        seq_len_interpolation_factor=2.0,
        rope_scaling=True,
    ),
}


def megatron_rotary(**options: Any) -> Any:
    return RotaryEmbedding(16, **{"rotary_percent": 1.0, "use_cpu_initialization": True, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rotation_is_megatrons_to_the_bit(variant: str, dtype: torch.dtype, alone: None) -> None:
    source = megatron_rotary(**VARIANTS[variant])
    config = transformer_config(rotary_interleaved=source.rotary_interleaved)
    documents = Documents(LENGTHS)
    x = torch.randn(documents.tokens, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    borders = torch.tensor(sorted({*documents.offsets.tolist()}), dtype=torch.int32)  # Megatron wants no empty document
    expected = apply_rotary_pos_emb(x, source(64, packed_seq=True), config, cu_seqlens=borders)
    assert not torch.equal(expected, x)
    for ranks in (1, 3):
        plan = build_plan(documents, Topology(1, ranks), ATTENTION)
        rotary = PlannedRotary(source)
        parts = [rotary.rotate(plan.layout.shard(x, rank), planned_params(plan, rank)) for rank in range(ranks)]
        assert torch.equal(plan.layout.unshard(parts), expected)
        assert parts[0].dtype == dtype


def test_tables_are_made_once_for_a_micro_batch_and_die_with_the_model() -> None:
    rotary = PlannedRotary(megatron_rotary())
    params = planned_params(build_plan(Documents(LENGTHS), Topology(1, 1), ATTENTION), 0)
    x = torch.randn(params.rows, 2, 16)
    with torch.inference_mode():
        rotary.rotate(x, params)
    first = params.tables[rotary][(x.device, x.dtype)]
    y = x.clone().requires_grad_()
    rotary.rotate(y, params).sum().backward()  # tables made in inference mode would not be allowed here
    assert params.tables[rotary][(x.device, x.dtype)] is first
    del rotary
    gc.collect()
    assert not len(params.tables)


def test_old_checkpoints_with_frequencies_load() -> None:
    rotary = PlannedRotary(megatron_rotary())
    assert not rotary.state_dict()
    rotary.load_state_dict({"inv_freq": torch.ones(8)}, strict=True)


@pytest.mark.parametrize("position_embedding", ["rope", "learned_absolute", "none"])
def test_a_model_without_install_model_fails_at_its_first_batch(position_embedding: str, alone: None) -> None:
    config = transformer_config()
    model = build(config, install(layer_spec(config), Suite()), position_embedding_type=position_embedding)
    case = Case(((9, 9),))
    documents, whole = data(case, 0)
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=8)
    batch, params = planned_batch(whole, build_plan(documents, Topology(1, 1), attention), 0)
    call = (batch["tokens"], batch["position_ids"], None)
    with pytest.raises(ConfigError, match=r"call mindspeed_cp.megatron.install_model"):
        model(*call, packed_seq_params=params)
    assert install_model(model) is model
    assert install_model([model])[0] is model
    model(*call, packed_seq_params=params)


def forgotten(rank: int, group: None) -> None:
    """A batch of a model without install_model on two ranks, whose rows do not fit Megatron's zig-zag."""
    with megatron(cp=2):
        config = transformer_config(cp=2)
        model = build(config, install(layer_spec(config), Suite(context_parallel_size=2)))
        documents, whole = data(Case(((9, 9),)), 0)
        batch, params = planned_batch(whole, build_plan(documents, Topology(1, 2), attention_config(config)), rank)
        with pytest.raises(ConfigError, match="still has Megatron's rotary module"):
            model(batch["tokens"], batch["position_ids"], None, packed_seq_params=params)


def test_forgetting_install_model_is_said_before_megatron_trips_over_it(ranks: MegatronRanks) -> None:
    ranks.run(2, forgotten)


def test_installing_a_model_twice_changes_nothing(alone: None) -> None:
    config = transformer_config()
    model = install_model(build(config, install(layer_spec(config), Suite())))
    rotary = model.rotary_pos_emb
    assert install_model(model).rotary_pos_emb is rotary
    assert all(layer.self_attention.core_attention.rotary is rotary for layer in model.decoder.layers)


def test_rotary_positions_that_no_plan_gives_are_refused(alone: None) -> None:
    class OtherRotary(RotaryEmbedding):
        pass

    config = transformer_config()
    model = build(config, install(layer_spec(config), Suite()))
    model.rotary_pos_emb = OtherRotary(8, 1.0, use_cpu_initialization=True)
    with pytest.raises(ConfigError, match="rotary_pos_emb is a OtherRotary; valid: RotaryEmbedding"):
        install_model(model)


def test_rotary_positions_and_alibi_are_refused_together(alone: None) -> None:
    config = transformer_config()
    model = build(config, install(layer_spec(config), Suite(), alibi=True))
    with pytest.raises(ConfigError, match=r"has rotary positions and ALiBi.*position_embedding_type='none'"):
        install_model(model)


@pytest.mark.parametrize("changes", [{}, LATENT_YARN, dict(rotary_percent=0.5)], ids=["rope", "yarn", "half"])
def test_latent_layers_rotate_as_megatrons_and_share_one_table(changes: dict[str, Any], alone: None) -> None:
    config = transformer_config(**{**LATENT, "qk_pos_emb_head_dim": 8, **changes})
    model = build(config, install(layer_spec(config), Suite()))
    source = model.decoder.layers[0].self_attention.rotary_pos_emb
    install_model(model)
    first, second = (layer.self_attention for layer in model.decoder.layers)
    assert isinstance(first.rotary_pos_emb, LatentRotary) and first.rotary_pos_emb is second.rotary_pos_emb
    assert first.core_attention.rotary is second.core_attention.rotary is first.rotary_pos_emb
    install_model(model)
    assert second.rotary_pos_emb is first.rotary_pos_emb and second.rotary_pos_emb.source is source
    documents = Documents(LENGTHS)
    x = torch.randn(documents.tokens, 4, 17, generator=torch.Generator().manual_seed(0))
    borders = torch.tensor(sorted({*documents.offsets.tolist()}), dtype=torch.int32)
    takes_flag = "packed_seq" in inspect.signature(source.forward).parameters  # not in 0.12
    table = source(64, **({"packed_seq": True} if takes_flag else {}))
    angles, factor = table if isinstance(table, tuple) else (table, 1.0)
    has_flag = "mla_rotary_interleaved" in inspect.signature(apply_rotary_pos_emb).parameters  # since 0.18
    flag = {"mla_rotary_interleaved": True} if has_flag else {}
    turned = apply_rotary_pos_emb(x[..., 9:], angles, config, cu_seqlens=borders, mscale=factor, **flag)
    assert (factor != 1.0) == ("mscale" in changes)
    plan = build_plan(documents, Topology(1, 2), AttentionConfig(heads=4, kv_heads=4, head_dim=17))
    parts = [first.rotary_pos_emb.rotate(plan.layout.shard(x, rank), planned_params(plan, rank)) for rank in range(2)]
    assert torch.equal(plan.layout.unshard(parts), torch.cat((x[..., :9], turned), dim=-1))


def test_generation_is_refused(alone: None) -> None:
    with pytest.raises(ConfigError, match="generate with a model built from the original spec"):
        PlannedRotary(megatron_rotary()).get_rotary_seq_len(object(), None, None, None, None)
