"""ms-swift by plans: the double of its sequence-parallel object, and the example with ms-swift where it is installed."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.integrations.ms_swift import use_plans
from tests.integrations.huggingface.models import make_config, make_model, reference_step
from tests.integrations.peers.steps import example_steps, swift_step
from tests.integrations.peers.swift_double import SequenceParallel

LENGTHS = (23, 1, 0, 40, 9)

CASES = [
    ("qwen3", 2, "hierarchical", LENGTHS, False),
    ("mistral", 3, "direct", LENGTHS, True),
    ("llama", 4, "ring", (2, 1), True),
    pytest.param("deepseek_v3", 3, "ulysses", LENGTHS, False, marks=pytest.mark.thorough),
    pytest.param("gemma3", 2, "ring", LENGTHS, True, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "ranks", "algorithm", "lengths", "weighted"), CASES)
def test_a_planned_step_equals_the_documents_one_by_one(pool, name, ranks, algorithm, lengths, weighted) -> None:
    wanted = reference_step(name, lengths)
    for step in pool.run(ranks, swift_step, name, lengths, algorithm, weighted):
        assert step.gradients.keys() == wanted.gradients.keys()
        assert step.largest_error(wanted) < 1e-5


def test_all_ranks_of_a_group_are_in_the_ring_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    monkeypatch.setattr(
        "torch.distributed.device_mesh.init_device_mesh", lambda device, shape, **others: shapes.append(shape)
    )
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    sp = SequenceParallel()
    use_plans(sp)
    model = make_model(make_config("llama"), "sdpa")  # 2 kv heads
    sp.prepare(4, model, None, padding_free=True)
    assert shapes == [(2, 4, 1)] and sp.rp_world_size == 4
    assert model.config._attn_implementation == "mindspeed_cp"


def test_padded_rows_and_late_calls_are_refused() -> None:
    sp = SequenceParallel()
    use_plans(sp)
    model = make_model(make_config("llama"), "sdpa")
    with pytest.raises(ConfigError, match="padding_free is False; valid with plans: True, packed rows"):
        sp.prepare(2, model, None, padding_free=False)
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping is 50\.0"):
        sp.prepare(2, make_model(make_config("gemma2", attn_logit_softcapping=50.0), "eager"), None, padding_free=True)
    sp.world_size = 2
    with pytest.raises(ConfigError, match="sequence parallelism was prepared before use_plans"):
        use_plans(sp)
    with pytest.raises(ConfigError, match=r"position_ids are None; valid: \[1, tokens\], one packed row"):
        sp.row_plans()
    sp.model_config, sp.device_mesh = model.config, {"ring": None}
    with pytest.raises(ConfigError, match=r"position_ids have shape \[2, 5\]; valid: \[1, tokens\]"):
        sp.row_plans(torch.arange(5).expand(2, 5))


def test_one_rank_leaves_tensors_as_they_are() -> None:
    sp = SequenceParallel()
    use_plans(sp)
    sp.world_size = 1
    x = torch.arange(6).reshape(1, 6)
    assert sp.split(x, 1) is x and sp.gather(x, 1) is x and sp.pad(x, 0) is x


def test_ms_swift_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swift", None)
    with pytest.raises(ConfigError, match=r"ms-swift cannot be imported \(.*\); valid: ms-swift 4.6"):
        use_plans()


def test_ms_swifts_trainer_trains_alike_on_one_rank_and_on_three() -> None:
    pytest.importorskip(
        "swift", reason="ms-swift is not installed (pip install ms-swift==4.6.0, in its own environment)"
    )

    alone = example_steps("swift_sft.py", 1, 1)
    for ranks, cp in ((3, 3), (4, 2)):
        steps = example_steps("swift_sft.py", ranks, cp)
        assert len(steps) == len(alone) == 4
        for step, wanted in zip(steps, alone, strict=True):
            assert step["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
            assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-5)
