"""Settings: what is accepted, and that whatever is wrong is one line with the key, its value and what is valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.config import Settings, load_settings
from mindspeed_cp.config.candidates import compared_algorithms
from mindspeed_cp.config.model import ModelSettings
from mindspeed_cp.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def error(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(path, overrides)
    line = str(caught.value)
    assert "\n" not in line and "Traceback" not in line and len(line) < 1000
    return line


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, "")) == Settings()
    assert load_settings(write(tmp_path, "train:\nmodel: {}\n")) == Settings()


def test_values_come_from_the_file_and_overrides_win(tmp_path: Path) -> None:
    path = write(tmp_path, "train:\n  lr: 3e-4\n  seed: 7\n")
    settings = load_settings(path, ["train.lr=1E-2", "model.num_query_groups=2", "output.tensorboard=true"])
    assert (settings.train.lr, settings.train.seed) == (1e-2, 7)
    assert settings.model.num_query_groups == 2
    assert settings.output.tensorboard is True


@pytest.mark.parametrize(
    ("algorithm", "compare", "expected"),
    [
        ("hierarchical", "[ring]", ["ring", "hierarchical"]),
        ("ring", "[ring]", ["ring"]),
        ("ring", "[p2p, direct, direct]", ["direct", "ring"]),
    ],
)
def test_the_algorithm_of_the_run_is_compared_once_and_last(
    algorithm: str, compare: str, expected: list[str], tmp_path: Path
) -> None:
    overrides = [f"train.compare={compare}", f"algorithm={algorithm}", "context_parallel_size=4"]
    assert compared_algorithms(load_settings(write(tmp_path, ""), overrides)) == expected


def test_the_reference_file_means_the_defaults() -> None:
    assert load_settings(CONFIGS / "reference.yaml") == Settings()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_settings_file_of_the_repository_is_valid(path: Path) -> None:
    """Runs do not share a folder; a comment that shows a command names this file, and one that shows a switch has it
    right."""
    settings = load_settings(path)
    text = path.read_text("utf-8")
    if path.name == "reference.yaml":
        return
    assert settings.output.folder == f"runs/{path.stem}" and f"mindspeed-cp train configs/{path.name}" in text
    for key, value in re.findall(r"^  # (\w+): (\S+)", text, re.MULTILINE):
        section = next(
            name for name in ("model", "context_parallel_suite") if key in getattr(settings, name).key_names()
        )
        load_settings(path, [f"{section}.{key}={value}"])


@pytest.mark.parametrize("name", [*ALGORITHMS, "balanced"])
def test_there_is_a_settings_file_for_every_algorithm(name: str) -> None:
    """It trains the model of the quick start, so that its losses are the same."""
    settings, quickstart = (load_settings(CONFIGS / f"{file}.yaml") for file in (name, "quickstart"))
    suite = settings.context_parallel_suite
    assert (suite.options.get("layout") if name == "balanced" else suite.algorithm) == name
    off = {"check_attention_interval": 0}
    train = quickstart.train.model_copy(update={"compare": [], **off})
    assert (settings.model, settings.data, settings.train.model_dump()) == (
        quickstart.model, quickstart.data, train.model_dump(),
    )  # fmt: skip
    assert suite.context_parallel_size == quickstart.context_parallel_suite.context_parallel_size


def test_the_settings_files_of_features_have_them() -> None:
    alibi, window, mla, moe = (load_settings(CONFIGS / f"{name}.yaml") for name in ("alibi", "window", "mla", "moe"))
    assert alibi.model.position_embedding_type == "alibi" and window.model.window_size == [512, 0]
    assert mla.model.multi_latent_attention and mla.model.head_dim != mla.model.head_dim_v
    assert moe.model.num_moe_experts and moe.train.expert_model_parallel_size == 2 == moe.model_parallel_size


def test_settings_survive_json(tmp_path: Path) -> None:
    settings = load_settings(CONFIGS / "reference.yaml", ["train.lr=1", "model.num_query_groups=4"])
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train:\n  lr: fast", ["settings.yaml:2: ", 'train.lr = "fast"', "a number > 0 and <= 1000"]),
        ("train: {lr: .nan}", ["train.lr = NaN", "a number > 0"]),
        ("model: {num_layers: '2'}", ['model.num_layers = "2"', "an integer >= 1"]),
        ("model: {num_layers: true}", ["model.num_layers = true", "an integer >= 1"]),
        ("train: {seed: 10000000000000000000000000}", ["train.seed = 1", "an integer >= 0 and <= 1e9"]),
        ("model: &a {x: *a}", ["not valid YAML: nested too deeply, or refers to itself"]),
        ("model: {num_query_groups: 0}", ["model.num_query_groups = 0", "an integer >= 1 and <= 1e9 or null"]),
        ("model: {swiglu: 1}", ["model.swiglu = 1", "true or false"]),
        ("model: {normalization: batch}", ['model.normalization = "batch"', "one of RMSNorm, LayerNorm"]),
        ("train: 3", ["train = 3", "must be a section", "configs/reference.yaml lists"]),
        ("trian: {lr: 1}", ["trian: unknown key", "did you mean train?", "context_parallel_suite"]),
        (
            "train:\n  lrr: 1",
            [":2: train.lrr: unknown key", "did you mean train.lr?", "configs/reference.yaml lists"],
        ),
        ("train: {num_layers: 1}", ["train.num_layers: unknown key", "did you mean model.num_layers?"]),
        ("train: {lr: 1, lr: 2}", ["train.lr is given twice"]),
        ("train:\n\tlr: 1", ["settings.yaml:2:1", "not valid YAML"]),
        ("- train", ["must be a mapping", "a list"]),
        ("1: 2", ["the key '1' must be text"]),
        ("model: {hidden_size: 100}", ["model.hidden_size = 100", "num_attention_heads = 8", "nearest: 96"]),
        ("model: {num_query_groups: 3}", ["model.num_query_groups = 3", "valid: 1, 2, 4, 8"]),
        ("model: {kv_channels: 3}", ["model.kv_channels = 3", "even", "position_embedding_type"]),
        ("train: {tensor_model_parallel_size: 3}", ["tensor_model_parallel_size = 3", "num_attention_heads = 8"]),
        ("train: {min_lr: 1.0}", ["train.min_lr = 1.0", "train.lr = 0.001"]),
        ("train: {lr_warmup_iters: 100}", ["train.lr_warmup_iters = 100", "less than train.train_iters = 100"]),
    ],
)
def test_an_error_names_setting_value_and_valid_values(tmp_path: Path, text: str, expected: list[str]) -> None:
    line = error(write(tmp_path, text))
    for part in expected:
        assert part in line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr=fast", "--set: train.lr"),
        ("train.lrr=1", "did you mean train.lr?"),
        ("train.lr", "must be KEY=VALUE"),
        ("=1", "must be KEY=VALUE"),
        ("train.lr.x=1", "train.lr is a value, not a section"),
        ("train.lr=[", "not valid YAML"),
    ],
)
def test_an_error_of_an_override_names_set(tmp_path: Path, override: str, expected: str) -> None:
    line = error(write(tmp_path, "train: {lr: 1}"), override)
    assert "--set" in line and expected in line


def test_the_value_of_an_override_may_contain_an_equals_sign(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, ""), ["output.folder=runs/lr=0.1"]).output.folder == "runs/lr=0.1"


def test_an_override_may_leave_out_the_section_that_only_one_has(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {lr: 1}")
    settings = load_settings(path, ["algorithm=direct", "num_layers=3", "cp_comm_type=null"][:2])
    assert (settings.context_parallel_suite.algorithm, settings.model.num_layers) == ("direct", 3)
    assert load_settings(path, ["cp_comm_type=a2a"]).context_parallel_suite.algorithm == "ulysses"
    assert "give train.tensor_model_parallel_size or context_parallel_suite." in error(
        path, "tensor_model_parallel_size=2"
    )
    assert "num_layer: unknown key" in error(path, "num_layer=2")


@pytest.mark.parametrize("key", ["train_iters", "lr_decay_iters"])
def test_a_shorter_run_on_the_command_line_shortens_the_warm_up_of_the_file(tmp_path: Path, key: str) -> None:
    path = write(
        tmp_path, "train: {lr_warmup_iters: 8, lr_decay_iters: 20}" if key[0] == "l" else "train: {lr_warmup_iters: 8}"
    )
    notes: list[str] = []
    settings = load_settings(path, [f"train.{key}=4"], notes.append)
    assert settings.train.lr_warmup_iters == 3
    assert notes == [f"train.lr_warmup_iters = 3 instead of 8: train.{key} is 4"]
    assert load_settings(path, [f"train.{key}=9"], notes.append).train.lr_warmup_iters == 8 and len(notes) == 1
    expected = f"train.lr_warmup_iters = 8: must be less than train.{key} = 4"
    assert expected in error(path, f"train.{key}=4", "train.lr_warmup_iters=8")  # asked for in the same place
    assert expected in error(write(tmp_path, f"train: {{{key}: 4, lr_warmup_iters: 8}}"))


def test_an_unknown_key_names_the_three_nearest_before_the_valid_ones(tmp_path: Path) -> None:
    line = error(write(tmp_path, "model: {moe_router_load: 2}"))
    hint, valid = line.split("did you mean ")[1].split("? valid: ")
    assert hint == "model.moe_router_topk, model.moe_router_pre_softmax or model.moe_router_load_balancing_type"
    assert valid == f"{len(ModelSettings.key_names())} keys, which configs/reference.yaml lists"


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert "no such file" in error(tmp_path / "missing.yaml")
    assert "cannot be read" in error(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\xfe")
    assert "not UTF-8" in error(tmp_path / "latin.yaml")
    (tmp_path / "control.yaml").write_bytes(b"a: \x00")
    assert "not valid YAML" in error(tmp_path / "control.yaml")
