"""Files of the doctor: what is wrong is one line when settings are read, and which variants they allow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError
from mindspeed_cp.cli.main import run
from mindspeed_cp.config.settings import Settings, load_settings
from mindspeed_cp.config.suite import SuiteSettings
from mindspeed_cp.device.npu_profile import (
    DEFAULTS,
    VARIANTS,
    Need,
    NpuIdentity,
    NpuProfile,
    check_profile_device,
    choose_variants,
    concerns,
    read_profile,
)
from mindspeed_cp.doctor.kernel_capability import write_json
from mindspeed_cp.ops.attention.backends import backend_from_settings
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from tests.device.profiles import profile, row


def written(folder: Path, content: Any) -> str:
    path = folder / "doctor.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return the content of a sound file after a change."""
    content = profile().model_dump()
    change(content)
    return content


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    write_json("--npu-profile", path, profile(("alibi", "shared")).model_dump())
    assert read_profile(str(path)) == profile(("alibi", "shared"))
    assert [file.name for file in tmp_path.iterdir()] == ["doctor.json"]


TEXT = json.dumps(profile().model_dump())
DAMAGED = {
    "cut off": (TEXT[: len(TEXT) // 2], "is damaged, or no JSON"),
    "empty": ("", "is damaged, or no JSON"),
    "no text": ("\x00\xff", "is damaged, or no JSON"),
    "deep": ("[" * 100_000, "is damaged, or no JSON"),
    "a list": ([], "is no profile of this version"),
    "another format": (changed(lambda x: x.update(format=1)), "is no profile of this version"),
    "the report of --json": ({"ok": True, "checks": []}, "is no profile of this version"),
    "no rows": (changed(lambda x: x.update(rows=[])), "is damaged (rows"),
    "rows missing": (changed(lambda x: x.pop("rows")), "is damaged (rows: is missing"),
    "a key too many": (changed(lambda x: x.update(more=1)), "is damaged (more: unknown key"),
    "a row without a verdict": (changed(lambda x: x["rows"][3].pop("ok")), "is damaged (rows.3.ok"),
    "a verdict in words": (changed(lambda x: x["rows"][0].update(ok="yes")), "is damaged (rows.0.ok"),
    "another option": (changed(lambda x: x["rows"][0].update(option="speed")), "is damaged (rows.0.option"),
    "not a number": (changed(lambda x: x["rows"][0].update(limit=float("nan"))), "is damaged (rows.0.limit"),
    "ok above the limit": (changed(lambda x: x["rows"][0]["differences"].update(dq=0.7)), "is ok with differences above its limit"),
    "ok with infinity": (changed(lambda x: x["rows"][0]["differences"].update(dq=None)), "is ok with differences above its limit"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, words = DAMAGED[name]
    monkeypatch.chdir(tmp_path)  # long paths are cut in errors
    path = written(Path(), content)
    with pytest.raises(ConfigError) as caught:
        SuiteSettings(npu_profile=path)
    line = str(caught.value)
    assert line.startswith(f'npu_profile = "{path}": ') and words in line and "\n" not in line
    assert f"run `mindspeed-cp doctor --device npu --npu-profile {path}` on this machine again" in line


def test_a_file_that_is_not_there_is_told_with_the_line_of_the_settings(tmp_path: Path) -> None:
    settings = tmp_path / "mine.yaml"
    settings.write_text("context_parallel_suite:\n  npu_profile: nowhere.json\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(settings)
    line = f'{settings}:2: context_parallel_suite.npu_profile = "nowhere.json": cannot be read (No such file'
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        (NpuIdentity("Ascend910_9392", "2.13.0", "9.0.0"), "is of device Ascend910B1, and this machine has Ascend910_9392"),
        (NpuIdentity("Ascend910B1", "2.9.0", "9.0.0"), "is of torch-npu 2.13.0, and this machine has 2.9.0"),
        (NpuIdentity("Ascend910B1", "2.13.0", "8.5.0"), "is of CANN 9.0.0, and this machine has 8.5.0"),
        (NpuIdentity("Ascend910B1", "2.13.0", None), "is of CANN 9.0.0, and this machine has unknown"),
    ],
)  # fmt: skip
def test_a_file_of_another_device_or_version_is_refused(identity: NpuIdentity, words: str) -> None:
    check_profile_device(profile(), "doctor.json", NpuIdentity("Ascend910B1", "2.13.0", "9.0.0"))
    with pytest.raises(ConfigError, match=words) as caught:
        check_profile_device(profile(), "doctor.json", identity)
    assert "\n" not in str(caught.value) and "npu_profile: null" in str(caught.value)


#: Options that no profile decides.
OTHERS = {"merge": "fp32", "precision": "input"}


def test_settings_take_what_passed_in_the_type_of_the_tensors(tmp_path: Path) -> None:
    """On the CPU, the npu backend with an operator of its own has no device to be of."""
    content = profile(("statistics", "lse"), dtypes=("bf16",)).rows + profile(dtypes=("fp32",)).rows
    path = written(tmp_path, profile().model_dump() | {"rows": [row.model_dump() for row in content]})
    suite = SuiteSettings(npu_profile=path)
    attention = AttentionConfig(2, alibi=True)
    assert suite.npu_options(attention, "fp32", False)["statistics"] == "lse"
    assert suite.npu_options(attention, "bf16", False)["statistics"] == "max_sum"
    assert suite.npu_options(attention, "bf16", False)["alibi"] == "shared"
    assert SuiteSettings().npu_options(attention, "bf16", False) == DEFAULTS | OTHERS
    merging = SuiteSettings(npu_profile=path, npu_merge="ring_update", npu_alibi="split")
    assert merging.npu_options(attention, "fp32", False) == {
        "lowering": "tnd", "alibi": "split", "merge": "ring_update", "statistics": "lse", "key_gaps": "skipped",
        "precision": "input",
    }  # fmt: skip


def test_the_backend_of_settings_without_a_profile_is_the_default() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        backend = backend_from_settings(SuiteSettings(backend="npu"), "npu", AttentionConfig(2), dtype)
        assert backend == NpuAttention()


def on_an_npu(path: str, **suite: Any) -> Settings:
    section = {"npu_profile": path, **suite}
    return Settings(**{"train": {"device": "npu"}, "context_parallel_suite": section})


def test_settings_of_a_training_are_checked_with_its_own_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ("statistics", "lse"), ("statistics", "max_sum")
    monkeypatch.chdir(tmp_path)
    path = written(Path(), profile(("alibi", "shared"), ("alibi", "split"), *both).model_dump())
    with pytest.raises(ConfigError, match="leaves no safe way to compute attention in fp32") as caught:
        on_an_npu(path)
    assert str(caught.value).startswith(f'context_parallel_suite.npu_profile = "{path}": ')


def test_a_variant_that_failed_and_is_named_is_told_by_its_own_key(tmp_path: Path) -> None:
    path = written(tmp_path, profile(("statistics", "lse")).model_dump())
    assert on_an_npu(path).context_parallel_suite.npu_profile == path
    with pytest.raises(ConfigError, match=r'^context_parallel_suite\.npu_statistics = "lse": failed in npu_profile'):
        on_an_npu(path, npu_statistics="lse")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "cpu", "--npu-profile", "x.json"], "error: --npu-profile x.json: --device cpu has none; use --device npu"),
        (["--npu-profile", "nowhere/doctor.json"], "error: --npu-profile nowhere/doctor.json: there is no folder nowhere"),
        (["--npu-profile", "mine.yaml"], "error: --npu-profile mine.yaml: the suffix is '.yaml'; valid: a file name with .json"),
    ],
)  # fmt: skip
def test_the_command_refuses_what_it_cannot_do(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    assert run(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.startswith(line)


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
