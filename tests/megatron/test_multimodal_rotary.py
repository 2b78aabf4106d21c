"""mrope: Megatron's own rotation on any rank, positions of batches, refusals (losses: test_gpt.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.algorithms.linear_layout import with_linear_layout
from mindspeed_cp.megatron import (
    PlannedRotary,
    attention_config,
    install,
    install_model,
    megatron_imports,
    planned_batch,
    planned_batch_from,
    planned_params,
)
from mindspeed_cp.megatron.adaptors.rotary import MultimodalRotary
from tests.megatron.gpt import (
    Suite,
    build,
    layer_spec,
    mrope_positions,
    transformer_config,
)
from tests.megatron.packed import ends, plain_params
from tests.megatron.test_gpt import RAGGED

with megatron_imports():
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding

SECTION = [2, 3, 3]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "base": dict(rotary_base=500),
    "percent": dict(rotary_percent=0.5),
    "interpolated": dict(seq_len_interpolation_factor=3.0),
}
ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=16)


def megatron_rotary(**options: Any) -> Any:
    return MultimodalRotaryEmbedding(16, **{"rotary_percent": 1.0, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rotation_is_megatrons_to_the_bit(variant: str, dtype: torch.dtype, alone: None) -> None:
    source = megatron_rotary(**VARIANTS[variant])
    section = [1, 1, 2] if variant == "percent" else SECTION
    documents = Documents(RAGGED)
    positions = mrope_positions(documents)
    x = torch.randn(documents.tokens, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    config = transformer_config(mrope_section=section)
    expected = apply_rotary_pos_emb(x[:, None], source(positions[:, None], section), config)[:, 0]
    assert not torch.equal(expected, x)
    rotary = MultimodalRotary(source, section)
    for ranks in (1, 3):
        balanced = build_plan(documents, Topology(1, ranks), ATTENTION, "direct", layout="balanced")
        for plan in (build_plan(documents, Topology(1, ranks), ATTENTION), with_linear_layout(balanced, "hidden")):
            batches = [planned_batch({"position_ids": positions}, plan, rank) for rank in range(ranks)]
            parts = [rotary.rotate(plan.layout.shard(x, rank), params) for rank, (_, params) in enumerate(batches)]
            assert torch.equal(plan.layout.unshard(parts), expected)
            rows = [batch["position_ids"][:, 0, : params.linear_rows].T for batch, params in batches]
            assert torch.equal(plan.batch_layout.unshard(rows), positions.T)


def whole_batch() -> dict[str, torch.Tensor]:
    """Two rows of two documents each."""
    tokens = torch.arange(64).reshape(2, 32)
    positions = mrope_positions(Documents([8, 24, 20, 12])).view(3, 2, 32)
    return {"tokens": tokens, "labels": tokens, "position_ids": positions}


def test_documents_of_a_whole_batch_come_from_their_ends_alone() -> None:
    config = transformer_config(mrope_section=[1, 1, 2])
    whole = whole_batch()
    batch, params = planned_batch_from({**whole, "cu_seqlens": ends([8, 24, 20, 12])}, config, Suite())
    assert torch.equal(batch["position_ids"], whole["position_ids"].reshape(3, 1, 64))
    assert params.mrope_positions is not None
    assert torch.equal(params.mrope_positions, whole["position_ids"].reshape(3, 64))
    with pytest.raises(ConfigError, match=r"\(mrope, time\) falls from \d+ to 0 at token 8.* cu_seqlens"):
        planned_batch_from(whole, config, Suite())
    single = {name: value[..., :8] for name, value in whole.items()}
    single["position_ids"] = mrope_positions(Documents([8, 8])).view(3, 2, 8)
    _, params = planned_batch_from(single, config, Suite())
    assert params.plan.documents == Documents([8, 8])
    with pytest.raises(ConfigError, match=r"position_ids is of shape \[2, 32\], but mrope_section is \[1, 1, 2\]"):
        planned_batch_from({**whole, "position_ids": whole["tokens"]}, config, Suite())


def test_positions_of_a_batch_that_a_loader_has_cut_are_those_that_the_model_gets(alone: None) -> None:
    rotary = MultimodalRotary(megatron_rotary(), SECTION)
    plan = build_plan(Documents([8, 24]), Topology(1, 2), ATTENTION)
    params = planned_params(plan, 1, rows_multiple=3)
    rows = torch.from_numpy(plan.layout.tokens(1))
    positions = mrope_positions(Documents([8, 24]))
    padded = torch.nn.functional.pad(positions[:, None, rows], (0, params.padding))
    with pytest.raises(ConfigError, match=r"position_ids of the model has shape \[3, 1, 16\]; valid .* \[3, 1, 18\]"):
        rotary.with_positions(params, padded[..., :16])
    own = rotary.with_positions(params, padded)
    assert own.mrope_positions is not None and torch.equal(own.mrope_positions, positions[:, rows])
    assert params.mrope_positions is None and rotary.with_positions(own, None) is own


def test_a_model_gets_the_positions_that_it_rotates_by(alone: None) -> None:
    config = transformer_config(mrope_section=[1, 1, 2])
    model = install_model(build(config, install(layer_spec(config), Suite()), position_embedding_type="mrope"))
    tokens = torch.arange(13)[None]
    with pytest.raises(ConfigError, match="no positions of time, height and width; give position_ids"):
        model(tokens, tokens, None, packed_seq_params=plain_params([5, 8]))
    out = model(tokens, mrope_positions(Documents([5, 8]))[:, None], None, packed_seq_params=plain_params([5, 8]))
    assert out.isfinite().all()
    plan = build_plan(Documents([5, 8]), Topology(1, 1), ATTENTION)
    positions = mrope_positions(Documents([5, 8]))[:, None]
    moved = positions * torch.tensor([1, 3, 4])[:, None, None]
    expected = model(tokens, moved, None, packed_seq_params=plain_params([5, 8]))
    assert not torch.equal(out, expected)
    own = build_plan(Documents([5, 8]), Topology(1, 1), attention_config(config))
    for shared in (plain_params([5, 8]), planned_params(own, 0)):  # the same object in several micro-batches
        first, second = (model(tokens, ids, None, packed_seq_params=shared) for ids in (positions, moved))
        assert torch.equal(first, out) and torch.equal(second, expected)
    _, params = planned_batch({"position_ids": mrope_positions(Documents([5, 8]))}, plan, 0)
    text = PlannedRotary(RotaryEmbedding(16, 1.0, use_cpu_initialization=True))
    with pytest.raises(ConfigError, match="the model rotates by one position; leave position_ids out"):
        text.rotate(torch.zeros(13, 4, 16), params)


@pytest.mark.parametrize(
    ("options", "section", "message"),
    [
        ({}, None, r"mrope_section is None; valid: 3 numbers, .* add up to 8"),
        ({}, [2, 3], r"mrope_section is \[2, 3\]"),
        ({}, [4, 4, 4], r"mrope_section is \[4, 4, 4\]"),
        ({"rotary_interleaved": True}, SECTION, "rotary_interleaved is True; valid .*: False"),
    ],
)
def test_sections_that_megatron_cannot_have_are_refused(
    options: dict[str, Any], section: list[int] | None, message: str, alone: None
) -> None:
    with pytest.raises(ConfigError, match=message):
        MultimodalRotary(megatron_rotary(**options), section)
