"""Memory that a model needs on a rank, and that the machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.memory import check_memory, machine_memory, minimum_bytes
from tests.train.test_identity import changed


@pytest.mark.parametrize("bf16", [False, True])
def test_the_distributed_optimizer_is_spread_over_all_ranks(bf16: bool) -> None:
    plain = Settings(train={"bf16": bf16})  # type: ignore[arg-type]
    spread = Settings(train={"bf16": bf16, "use_distributed_optimizer": True})  # type: ignore[arg-type]
    weights = minimum_bytes(plain, 0) / (18 if bf16 else 16)
    assert minimum_bytes(spread, 0, ranks=1) == minimum_bytes(plain, 0, ranks=8)
    assert minimum_bytes(spread, 0, ranks=8) == pytest.approx(weights * (6 + 12 / 8 if bf16 else 8 + 8 / 8))
    available = int(minimum_bytes(plain, 512) * 4 * 0.9)
    small = {"data": plain.data.model_copy(update={"seq_length": 512})}
    with pytest.raises(ConfigError, match="does not fit"):
        check_memory(plain.model_copy(update=small), 4, available)
    check_memory(spread.model_copy(update=small), 4, available, ranks=8)


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("0::/job/step", {"job/memory.max": "4096", "job/step/memory.max": "max"}, 4096),
        ("0::/", {"memory.max": "8192"}, 8192),
        ("4:cpu,memory:/job", {"memory/job/memory.limit_in_bytes": "4096"}, 4096),
        ("4:cpu:/job", {"memory/job/memory.limit_in_bytes": "4096"}, None),
        ("0::/job", {"job/memory.max": "9" * 25}, None),
    ],
)
def test_a_control_group_limits_memory(
    tmp_path: Path, group: str, limits: dict[str, str], expected: int | None
) -> None:
    (tmp_path / "groups").write_text(group + "\n")
    for name, text in limits.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text + "\n")
    machine = machine_memory(tmp_path / "none", tmp_path / "root")
    assert machine > 2**20
    assert machine_memory(tmp_path / "groups", tmp_path / "root") == (expected or machine)


def test_a_model_that_fits_is_let_through() -> None:
    check_memory(Settings(), 4, available=8 * 2**30)


def test_a_context_that_does_not_fit_is_told_with_one_that_does() -> None:
    available = 2**30
    settings = changed(data={"seq_length": 10**7})
    with pytest.raises(ConfigError, match=r"data\.seq_length = 10000000: does not fit.*use at most (\d+)") as caught:
        check_memory(settings, 2, available)
    fits = int(str(caught.value).split("use at most ")[1].split(",")[0])
    check_memory(changed(data={"seq_length": fits}), 2, available)
    with pytest.raises(ConfigError):
        check_memory(changed(data={"seq_length": fits + 2}), 2, available)


def test_a_model_that_does_not_fit_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_layers = 400: the model does not fit"):
        check_memory(changed(model={"num_layers": 400}), 1, available=2**30)


def test_too_many_ranks_for_the_machine_are_reported() -> None:
    """The error names the ranks, not the model, because no model fits in a third of a MiB; no size is printed as 0.0."""
    many = changed(context_parallel_suite={"context_parallel_size": 100_000})
    with pytest.raises(ConfigError) as caught:
        check_memory(many, 100_000, available=32 * 2**30)
    assert str(caught.value) == (
        "context_parallel_suite.context_parallel_size = 100000: 100000 ranks on this machine would have 335.5 KiB of "
        "its 32.0 GiB each, and a process that imports torch needs more than 16.0 MiB; start at most 2048, or use more "
        "machines"
    )
    with pytest.raises(ConfigError, match=r"^100000 ranks on this machine would have 335"):
        check_memory(changed(context_parallel_suite={"context_parallel_size": 2}), 100_000, available=32 * 2**30)
    with pytest.raises(ConfigError, match=r"^train.tensor_model_parallel_size = 8: 8 ranks on this machine"):
        check_memory(changed(train={"tensor_model_parallel_size": 8}), 8, available=2**20)
    with pytest.raises(
        ConfigError, match=r"need \d+\.\d MiB on each of 1000 local ranks, .* 32\.8 MiB; .* at most \d+ ranks on"
    ):
        check_memory(many, 1000, available=32 * 2**30)


def test_a_row_is_never_told_to_have_no_tokens() -> None:
    settings = changed(data={"seq_length": 10**6})
    room = int(minimum_bytes(settings, 1))  # for weights, and one token
    with pytest.raises(ConfigError, match=r"model\.num_layers = \d+: the model does not fit"):
        check_memory(settings, 1, available=room)


@pytest.mark.parametrize(
    "less",
    [
        {"context_parallel_suite": {"context_parallel_size": 2}},
        {"train": {"tensor_model_parallel_size": 2}},
        {"train": {"bf16": True}},
        {"model": {"recompute_granularity": "full"}},
        {"model": {"num_query_groups": 1}},
        {"model": {"multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 16,
                   "qk_pos_emb_head_dim": 8, "v_head_dim": 16}},
    ],
    ids=lambda less: next(iter(next(iter(less.values())))),
)  # fmt: skip
def test_what_saves_memory_lowers_the_bound(less: dict[str, Any]) -> None:
    assert minimum_bytes(changed(**less), 1e6) < minimum_bytes(Settings(), 1e6)


def test_experts_need_memory_where_they_are() -> None:
    experts = {"num_moe_experts": 16, "moe_layer_freq": [0, 1, 0, 1]}
    shared = {"expert_model_parallel_size": 4}
    assert minimum_bytes(changed(model=experts), 0) > 2 * minimum_bytes(Settings(), 0)
    assert minimum_bytes(changed(model=experts, train=shared), 0) < minimum_bytes(changed(model=experts), 0) / 2
    everywhere = {**experts, "moe_layer_freq": 1}
    assert minimum_bytes(changed(model=everywhere), 0) > minimum_bytes(changed(model=experts), 0) * 1.5
    split = {"use_distributed_optimizer": True}
    assert minimum_bytes(changed(model=experts, train=split), 0, ranks=8) < minimum_bytes(
        changed(model=experts), 0, ranks=8
    )
    sequences = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    two = {"tensor_model_parallel_size": 2}
    assert minimum_bytes(changed(train=sequences), 1e6) < minimum_bytes(changed(train=two), 1e6)
