"""Settings that do not fit together, the NPU or the cluster are refused when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_cp.config import Settings, SuiteSettings, load_settings
from mindspeed_cp.config.model import ModelSettings
from mindspeed_cp.config.rules import data_parallel_size
from mindspeed_cp.errors import ConfigError
from tests.config.test_config import CONFIGS, write


def test_sections_are_frozen_and_refuse_in_python_too() -> None:
    with pytest.raises(ConfigError, match="num_layers = 0: must be an integer >= 1"):
        ModelSettings(num_layers=0)
    with pytest.raises(ConfigError, match="unknown key"):
        SuiteSettings(**{"context_parallel": 2})
    with pytest.raises(Exception, match="frozen"):
        Settings().train.lr = 1.0  # type: ignore[misc]


def test_the_suite_alone_and_inside_megatrons_yaml(tmp_path: Path) -> None:
    expected = SuiteSettings(context_parallel_size=4)
    assert SuiteSettings.from_yaml(write(tmp_path, "context_parallel_size: 4\ncp_comm_type: p2p\n")) == expected
    megatron = "language_model: {num_layers: 24}\nmodel_parallel: {context_parallel_size: 4}\nseed: 1\n"
    assert SuiteSettings.from_yaml(write(tmp_path, megatron + "context_parallel_suite:\n")) == expected
    same = write(tmp_path, megatron + "context_parallel_suite: {context_parallel_size: 4}")
    assert SuiteSettings.from_yaml(same) == expected
    assert SuiteSettings.from_yaml(same, ["context_parallel_suite.verify_plans=true"]).verify_plans
    assert SuiteSettings.from_yaml(CONFIGS / "reference.yaml") == SuiteSettings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model_parallel: {context_parallel_size: 4}\ncontext_parallel_suite:\n  context_parallel_size: 2",
            ":3: .* = 4",
        ),
        ("model_parallel: {context_parallel_size: 4}", "no section context_parallel_suite"),
        (
            "algorithm: hierarchical\nfetch_peices: 1",
            "no section context_parallel_suite, and fetch_peices: unknown key; did you mean fetch_pieces",
        ),
        ("context_parallel_suite: 3", "must be a section"),
        (
            "context_parallel_suite:\n  algorithm: auto\n  routing: false",
            ":3: context_parallel_suite.routing = false: must be left out with algorithm: auto",
        ),
        (
            "context_parallel_suite:\n  context_parallel_size: 2\n  cluster: a9",
            ":3: context_parallel_suite.cluster = .a9.: cannot be used: cluster 'a9': no such preset; .*valid: a2, ",
        ),
        ("context_parallel_size: 16\ncluster: a2", ":2: cluster = .a2.: cannot be used: .* nodes have 8 ranks"),
        ("context_parallel_size: x", ":1: context_parallel_size = .x.: must be an integer >= 1"),
    ],
)
def test_an_invalid_suite_section_is_refused_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SuiteSettings.from_yaml(write(tmp_path, text))


def test_ranks_must_make_whole_replicas_and_share_the_batch() -> None:
    settings = Settings(
        train={"global_batch_size": 6, "tensor_model_parallel_size": 2},  # type: ignore[arg-type]
        context_parallel_suite={"context_parallel_size": 2},  # type: ignore[arg-type]
    )
    assert [data_parallel_size(settings, n) for n in (4, 8, 12)] == [1, 2, 3]
    for ranks in (0, 1, 2, 6):
        with pytest.raises(ConfigError, match=rf"^{ranks} ranks .* = 4; start 4"):
            data_parallel_size(settings, ranks)
    with pytest.raises(ConfigError, match=r"global_batch_size = 6: must be a multiple of the 4 replicas .* use 8"):
        data_parallel_size(settings, 16)


@pytest.mark.parametrize(
    ("values", "directional"),
    [
        ({"algorithm": "ring"}, True),
        ({"algorithm": "double_ring"}, True),
        ({"algorithm": "direct"}, False),
        ({"algorithm": "direct", "p2p_groups": "directional"}, True),
        ({"algorithm": "p2p", "p2p_groups": "batched"}, False),
    ],
)
def test_directional_groups_are_the_default_of_rings(values: dict[str, object], directional: bool) -> None:
    suite = SuiteSettings(context_parallel_size=4, **values)
    assert suite.uses_directional_groups is directional and suite.hccl_options == {}
    assert SuiteSettings(context_parallel_size=4, **values, hccl_buffer_mb=50).hccl_options == {"buffer_mb": 50}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"model": {"num_attention_heads": 512, "hidden_size": 4096}},
            "attention.heads is 512; valid for the npu backend: 256 on a tensor-parallel rank at most",
        ),
        (
            {"model": {"num_attention_heads": 2, "hidden_size": 2000}},
            "attention.head_dim is 1000; valid for the npu backend: 1 to 768",
        ),
        (
            {"model": {"position_embedding_type": "alibi"}, "context_parallel_suite": {"npu_lowering": "masks"}},
            "attention.alibi is on and npu.lowering is 'masks'.*valid: npu.lowering 'tnd'",
        ),
        (
            {"context_parallel_suite": {"backend": "cpu"}},
            r"context_parallel_suite.backend = .cpu.: does not run on train.device = npu \(npu\); use auto",
        ),
    ],
)
def test_limits_of_npus_are_checked_when_settings_are_read(values: dict[str, dict[str, object]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings(**{**values, "train": {"device": "npu"}})
    if "backend" not in values.get("context_parallel_suite", {}):
        Settings(**{**values, "train": {"device": "cpu"}})
    with pytest.raises(ConfigError, match=r"backend = .npu.: does not run on train.device = cpu"):
        Settings(context_parallel_suite={"backend": "npu"}, train={"device": "cpu"})


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        ({"cluster": "a9"}, r"context_parallel_suite.cluster = .a9.: cannot be used: cluster 'a9': no such preset"),
        (
            {"cluster": ""},
            r"context_parallel_suite.cluster = \"\": cannot be used: cluster '': no such preset; valid: a2, ",
        ),
        ({"nodes": 1, "context_parallel_size": 16, "cluster": "a2"}, r"cluster = .a2.: cannot be used: .* 8 ranks"),
        (
            {"max_seqlen_per_dp_cp_rank": 1000},
            r"= 1000: is too little for rows of data.seq_length = 4096 .* use 1024 or",
        ),
    ],
)
def test_a_cluster_and_a_bound_are_checked_when_settings_are_read(
    tmp_path: Path, suite: dict[str, Any], expected: str
) -> None:
    given = {"algorithm": "hierarchical", "context_parallel_size": 4, "nodes": 2, **suite}
    file = write(tmp_path, yaml.safe_dump({"context_parallel_suite": given, "data": {"seq_length": 4096}}))
    with pytest.raises(ConfigError, match=expected):
        load_settings(file)


def test_a_bound_that_a_row_just_fits_under_is_accepted(tmp_path: Path) -> None:
    suite = {"algorithm": "hierarchical", "context_parallel_size": 4, "nodes": 2, "max_seqlen_per_dp_cp_rank": 1024}
    file = write(tmp_path, yaml.safe_dump({"context_parallel_suite": suite, "data": {"seq_length": 4096}}))
    assert load_settings(file).context_parallel_suite.options["max_seqlen_per_dp_cp_rank"] == 1024


def test_a_bare_off_in_yaml_is_the_text(tmp_path: Path) -> None:
    text = "context_parallel_suite:\n  algorithm: hierarchical\n  remap: off\n"
    assert load_settings(write(tmp_path, text)).context_parallel_suite.options["remap"] == "off"
    text = "context_parallel_suite:\n  latents: on\n"
    assert load_settings(write(tmp_path, text)).context_parallel_suite.options["latents"] == "on"
