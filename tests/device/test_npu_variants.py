"""The fastest variant of which every row that concerns the attention passed, and one line where there is none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_cp import AttentionConfig, ConfigError
from mindspeed_cp.config.suite import SuiteSettings
from mindspeed_cp.device.npu_profile import NpuProfile
from mindspeed_cp.device.npu_variants import DEFAULTS, VARIANTS, Need, choose_variants, concerns
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from tests.device.profiles import profile, row

PLAIN = Need("bf16", alibi=False, window=False, widths=(128, 128), group=4, deterministic=False)
FAST = {"lowering": "tnd", "alibi": "split", "statistics": "lse", "key_gaps": "skipped"}


def chosen(content: NpuProfile, need: Need = PLAIN, **given: str) -> dict[str, str]:
    return choose_variants(content, "doctor.json", need, given)


def test_defaults_are_those_of_the_backend_and_the_safe_variants() -> None:
    assert {option: getattr(NpuAttention(), option) for option in VARIANTS} == DEFAULTS
    assert all(DEFAULTS[option] == VARIANTS[option][-1] for option in VARIANTS if option != "lowering")
    for option, variants in VARIANTS.items():
        assert {NpuAttention(**{option: variant}).key for variant in variants} > {NpuAttention().key}


def test_what_passed_is_taken_the_fastest_first() -> None:
    assert chosen(profile()) == FAST
    assert chosen(profile(), replace(PLAIN, alibi=True)) == FAST | {"alibi": "shared"}


@pytest.mark.parametrize("option", ["alibi", "statistics", "key_gaps"])
def test_a_variant_that_failed_gives_way_to_the_safe_one_alone(option: str) -> None:
    fast, safe = VARIANTS[option]
    need = replace(PLAIN, alibi=True)
    assert chosen(profile((option, fast)), need) == FAST | {"alibi": "shared"} | {option: safe}


def test_where_packed_calls_fail_everything_is_taken_under_masks() -> None:
    assert chosen(profile(("lowering", "tnd"))) == FAST | {"lowering": "masks", "key_gaps": "copied"}
    both = ("key_gaps", "skipped"), ("key_gaps", "copied")
    assert chosen(profile(*both))["lowering"] == "masks"  # it has no gaps between keys


def test_rows_of_other_attention_do_not_count() -> None:
    others = {
        "window": row("lowering", "tnd", False, window=True),
        "deterministic": row("lowering", "tnd", False, deterministic=True),
        "widths": row("lowering", "tnd", False, widths=[192, 128]),
        "group": row("lowering", "tnd", False, min_group=8),
        "dtype": row("lowering", "tnd", False, dtype="fp16"),
    }
    needs = {
        "window": replace(PLAIN, window=True),
        "deterministic": replace(PLAIN, deterministic=True),
        "widths": replace(PLAIN, widths=(192, 128)),
        "group": replace(PLAIN, group=8),
        "dtype": replace(PLAIN, dtype="fp16"),
    }
    for name, failed in others.items():
        content = profile(more=(failed,))
        assert chosen(content) == FAST
        assert chosen(content, needs[name])["lowering"] == "masks", name
        assert [other for other in needs if concerns(failed, needs[other])] == [name]


def test_what_an_attention_needs_is_read_from_it() -> None:
    attention = AttentionConfig(8, 2, 192, 128, window=(5, 0), alibi=True)
    assert Need.of_attention(attention, "fp16", True) == Need("fp16", True, True, (192, 128), 4, True)
    plain = AttentionConfig(4, head_dim=64)
    assert Need.of_attention(plain, "fp32", False) == Need("fp32", False, False, (64, 64), 1, False)


@pytest.mark.parametrize("other", ["fp16", "fp32"])
def test_calls_in_another_type_need_the_rows_of_that(tmp_path: Path, other: str) -> None:
    path = tmp_path / "doctor.json"
    content = profile(dtypes=("bf16",), more=tuple(x for x in profile(("statistics", "lse"), dtypes=(other,)).rows))
    path.write_text(content.model_dump_json())
    attention = AttentionConfig(2)
    for precision, statistics in (("input", "lse"), (other, "max_sum")):
        suite = SuiteSettings(npu_profile=str(path), npu_precision=precision, backend="npu")
        options = suite.npu_options(attention, "bf16", False)
        assert (options["statistics"], options["precision"]) == (statistics, precision)


def test_a_variant_that_settings_name_is_taken_if_it_passed() -> None:
    assert chosen(profile(), statistics="max_sum", lowering="masks") == {
        "lowering": "masks",
        "alibi": "split",
        "statistics": "max_sum",
        "key_gaps": "copied",
    }
    line = r'^npu_statistics = "lse": failed in npu_profile doctor.json: npu_statistics lse failed, lse on a shape .*; use max_sum, or null'
    with pytest.raises(ConfigError, match=line):
        chosen(profile(("statistics", "lse")), statistics="lse")
    with pytest.raises(
        ConfigError, match=r'^npu_lowering = "tnd": failed in npu_profile doctor.json: .*; use masks, or'
    ):
        chosen(profile(("lowering", "tnd")), lowering="tnd", statistics="lse")


@pytest.mark.parametrize(
    ("content", "need", "reason"),
    [
        (profile(("lowering", "tnd"), ("lowering", "masks")), PLAIN, "npu_lowering tnd failed, tnd on a shape (bf16): out differs from fp64 by 5.0e-01, limit 2e-02; npu_lowering masks failed"),
        (profile(("lowering", "tnd")), replace(PLAIN, alibi=True), "npu_lowering masks has no ALiBi"),
        (profile(("alibi", "split"), ("alibi", "shared")), replace(PLAIN, alibi=True), "npu_alibi shared failed"),
        (profile(("statistics", "lse"), ("statistics", "max_sum")), PLAIN, "npu_statistics max_sum failed"),
        (profile(dtypes=("fp32",)), PLAIN, "npu_lowering tnd has no row in bf16"),
    ],
    ids=["both lowerings", "packed calls under ALiBi", "ALiBi", "statistics", "another type"],
)  # fmt: skip
def test_without_a_variant_that_passed_there_is_one_line(content: NpuProfile, need: Need, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        chosen(content, need)
    line = str(caught.value)
    assert line.startswith('npu_profile = "doctor.json": leaves no safe way to compute attention in bf16') and "\n" not in line  # fmt: skip
    assert "mindspeed-cp doctor --device npu --npu-profile doctor.json" in line
