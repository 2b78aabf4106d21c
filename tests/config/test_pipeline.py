"""Which layers a pipeline stage holds, and how many micro-batches the interleaved schedule takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.config.derived import layers_of_stage
from mindspeed_cp.config.rules import data_parallel_size
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_stages_share_the_layers_in_the_order_of_the_forward(count: int, stages: int, virtual_stages: int) -> None:
    layers = count * stages * virtual_stages
    in_order = [
        layer
        for virtual_stage in range(virtual_stages)
        for stage in range(stages)
        for layer in layers_of_stage(layers, stages, virtual_stages, stage, virtual_stage)
    ]
    assert in_order == list(range(layers))


def test_the_interleaved_schedule_takes_multiples_of_the_stages() -> None:
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    settings = Settings(train={**sizes, "global_batch_size": 6})  # type: ignore[arg-type]
    assert data_parallel_size(settings, 2) == 1
    with pytest.raises(ConfigError) as caught:
        data_parallel_size(settings, 4)
    assert "train.global_batch_size = 6" in str(caught.value) and "use 8" in str(caught.value)


def test_experts_divide_among_the_ranks_of_a_stage() -> None:
    train = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    settings = Settings(model={"num_moe_experts": 4}, train=train)  # type: ignore[arg-type]
    assert data_parallel_size(settings, 4) == 2
    with pytest.raises(ConfigError, match=r"must divide the 1 ranks of a pipeline stage.*start a multiple of 4"):
        data_parallel_size(settings, 2)


@pytest.mark.parametrize(
    ("pattern", "virtual", "without"),
    [
        ([0, 0, 1, 1], 1, 0),
        ([1, 1, 0, 0], 1, 1),
        (2, 2, 1),
        ([0, 1, 1, 0], 1, None),
        (4, 2, 1),
        ([0, 0, 0, 0], 1, None),
    ],
)
def test_all_stages_have_experts_or_none_has(pattern: int | list[int], virtual: int, without: int | None) -> None:
    train = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": virtual}
    model = {"num_layers": 4, "num_moe_experts": 4, "moe_layer_freq": pattern}
    if without is None:
        Settings(model=model, train=train)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=rf"model\.moe_layer_freq.* gives stage {without} of .* no layer of experts"):
        Settings(model=model, train=train)  # type: ignore[arg-type]
