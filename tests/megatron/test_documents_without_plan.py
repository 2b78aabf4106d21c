"""A micro-batch that has documents and no plan is refused: attention would cross them."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.megatron import install, install_model
from mindspeed_cp.megatron.adaptors.without_plan import refuse_documents_without_plan
from tests.megatron.gpt import VOCABULARY, Suite, build, layer_spec, transformer_config
from tests.megatron.ranks import SilentGroup


def zigzag(positions: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """The two chunks of [batch_size, S] that Megatron gives a rank."""
    chunks = positions.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim=1) if ranks > 1 else positions


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_positions_of_whole_rows_pass_on_every_rank(ranks: int) -> None:
    whole = torch.arange(24).expand(2, 24)
    for rank in range(ranks):
        refuse_documents_without_plan(zigzag(whole, ranks, rank), SilentGroup(ranks, rank))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(24 - n, n) for n in range(1, 24)], ids=str)
def test_some_rank_refuses_positions_that_restart_wherever_that_is(ranks: int, lengths: tuple[int, int]) -> None:
    positions = torch.cat([torch.arange(24)[None], torch.cat([torch.arange(n) for n in lengths])[None]])
    assert positions[1, Documents(lengths).offsets[1]] == 0
    refused = 0
    for rank in range(ranks):
        try:
            refuse_documents_without_plan(zigzag(positions, ranks, rank), SilentGroup(ranks, rank))
        except ConfigError as error:
            assert "position_ids[1, " in str(error) and "planned_batch" in str(error)
            refused += 1
    assert refused


def test_later_pipeline_stages_have_no_positions_to_look_at() -> None:
    refuse_documents_without_plan(None, SilentGroup(2, 0))


@pytest.mark.parametrize("flag", ["reset_attention_mask", "reset_position_ids", "dataloader_inter_document_masking"])
def test_arguments_of_the_training_script_that_say_so_are_enough(monkeypatch: Any, flag: str) -> None:
    module: Any = ModuleType("megatron.training.global_vars")
    module._GLOBAL_ARGS = Namespace(reset_attention_mask=False, reset_position_ids=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    refuse_documents_without_plan(None, SilentGroup(2, 0))
    setattr(module._GLOBAL_ARGS, flag, True)
    with pytest.raises(ConfigError, match=f"{flag} is True, but the micro-batch has no plan"):
        refuse_documents_without_plan(None, SilentGroup(2, 0))


def test_a_model_refuses_positions_that_restart_before_it_computes(alone: None) -> None:
    config = transformer_config()
    model = install_model(build(config, install(layer_spec(config), Suite())))
    tokens = torch.arange(16).reshape(2, 8) % VOCABULARY
    positions = torch.arange(8).repeat(2, 1)
    assert model(tokens, positions, None).isfinite().all()
    positions[1, 5:] -= 5
    for call in (
        lambda: model(tokens, positions, None),
        lambda: model(tokens, position_ids=positions, attention_mask=None),
    ):
        with pytest.raises(ConfigError, match=r"position_ids\[1, 5\] is 0 and would be 5"):
            call()
