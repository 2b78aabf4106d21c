"""Settings: what is accepted, and that whatever is wrong is one line with the key, its value and what is valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_cp import Documents, build_plan
from mindspeed_cp.algorithms import ALGORITHMS, ALIASES, LAYOUT_NAMES, UNSUPPORTED_ALGORITHMS, algorithm_options
from mindspeed_cp.config import Settings, SuiteSettings, capabilities, load_settings
from mindspeed_cp.config.aliases import UNSUPPORTED_KEYS
from mindspeed_cp.config.candidates import compared_algorithms
from mindspeed_cp.config.model import ModelSettings
from mindspeed_cp.config.reference import reference_yaml
from mindspeed_cp.config.rules import data_parallel_size
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig, Topology

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
    settings = load_settings(path, ["train.lr=1E-2", "model.num_query_groups=2", "checkpoint.resume=false"])
    assert (settings.train.lr, settings.train.seed) == (1e-2, 7)
    assert settings.model.num_query_groups == 2
    assert settings.checkpoint.resume is False


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


def test_yaml_1_2_floats_are_numbers(tmp_path: Path) -> None:
    for text, value in (("1e-3", 1e-3), ("5E2", 500.0), (".5", 0.5), ("2", 2.0), ("3.", 3.0)):
        assert load_settings(write(tmp_path, f"train: {{lr: {text}}}")).train.lr == value


def test_the_reference_file_lists_every_key_with_its_default() -> None:
    path = CONFIGS / "reference.yaml"
    assert path.read_text(encoding="utf-8") == reference_yaml(), (
        "run: python -m mindspeed_cp.config.reference > configs/reference.yaml"
    )
    assert load_settings(path) == Settings()


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
    train = quickstart.train.model_copy(update={"compare": []})
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
        ("train:\n  lr: -1", ["train.lr = -1", "a number > 0"]),
        ("train: {lr: .nan}", ["train.lr = NaN", "a number > 0"]),
        ("train: {lr: .inf}", ["train.lr = Infinity"]),
        ("model: {num_layers: 2.5}", ["model.num_layers = 2.5", "an integer >= 1"]),
        ("model: {num_layers: '2'}", ['model.num_layers = "2"', "an integer >= 1"]),
        ("model: {num_layers: true}", ["model.num_layers = true", "an integer >= 1"]),
        ("train: {seed: 10000000000000000000000000}", ["train.seed = 1", "an integer >= 0 and <= 1e9"]),
        ("model: &a {x: *a}", ["not valid YAML: nested too deeply, or refers to itself"]),
        ("model: {num_query_groups: 0}", ["model.num_query_groups = 0", "an integer >= 1 and <= 1e9 or null"]),
        ("model: {swiglu: 1}", ["model.swiglu = 1", "true or false"]),
        ("model: {normalization: batch}", ['model.normalization = "batch"', "one of RMSNorm, LayerNorm"]),
        ("output: {folder: ''}", ["output.folder", '""', "text"]),
        ("data: {seq_length: 1}", ["data.seq_length = 1", "an integer >= 2"]),
        ("train: 3", ["train = 3", "must be a section", "train_iters"]),
        ("trian: {lr: 1}", ["trian: unknown key", "did you mean train?", "context_parallel_suite"]),
        ("train:\n  lrr: 1", [":2: train.lrr: unknown key", "did you mean train.lr?", "valid: train_iters"]),
        ("train: {learning_rate: 1}", ["did you mean train.lr?"]),
        ("train: {num_layers: 1}", ["train.num_layers: unknown key", "did you mean model.num_layers?"]),
        ("num_layers: 1", ["did you mean model.num_layers?"]),
        ("train: {lr: 1, lr: 2}", ["train.lr is given twice"]),
        ("train: {lr: [1", ["settings.yaml:1:", "not valid YAML"]),
        ("train:\n\tlr: 1", ["settings.yaml:2:1", "not valid YAML"]),
        ("- train", ["must be a mapping", "a list"]),
        ("1: 2", ["the key '1' must be text"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, expected: list[str]) -> None:
    line = error(write(tmp_path, text))
    for part in expected:
        assert part in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {hidden_size: 100}", ["model.hidden_size = 100", "num_attention_heads = 8", "nearest: 96"]),
        ("model: {num_query_groups: 3}", ["model.num_query_groups = 3", "valid: 1, 2, 4, 8"]),
        ("model: {kv_channels: 3}", ["model.kv_channels = 3", "even", "position_embedding_type"]),
        ("train: {tensor_model_parallel_size: 3}", ["tensor_model_parallel_size = 3", "num_attention_heads = 8"]),
        ("train: {pipeline_model_parallel_size: 2}", ["pipeline_model_parallel_size = 2", "valid: 1"]),
        ("train: {min_lr: 1.0}", ["train.min_lr = 1.0", "train.lr = 0.001"]),
        ("train: {lr_warmup_iters: 100}", ["train.lr_warmup_iters = 100", "less than train.train_iters = 100"]),
    ],
)
def test_settings_that_do_not_fit_together(tmp_path: Path, text: str, expected: list[str]) -> None:
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
def test_a_wrong_override_is_told_as_one(tmp_path: Path, override: str, expected: str) -> None:
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
    assert valid.startswith("num_layers, ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such file" in error(tmp_path / "missing.yaml")
    assert "cannot be read" in error(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\xfe")
    assert "not UTF-8" in error(tmp_path / "latin.yaml")
    (tmp_path / "control.yaml").write_bytes(b"a: \x00")
    assert "not valid YAML" in error(tmp_path / "control.yaml")


NAMES = [*((name, name) for name in ALGORITHMS), *ALIASES.items()]


@pytest.mark.parametrize(("name", "own"), NAMES, ids=[name for name, _ in NAMES])
def test_every_algorithm_has_the_names_of_megatron_and_mindspeed(name: str, own: str) -> None:
    assert SuiteSettings(algorithm=name).algorithm == own
    assert SuiteSettings(**{"cp_comm_type": name}).algorithm == own
    assert SuiteSettings(**{"cp_comm_type": name, "algorithm": own}).algorithm == own


@pytest.mark.parametrize("name", UNSUPPORTED_ALGORITHMS)
def test_algorithms_of_later_versions_name_the_nearest(name: str) -> None:
    for key in ("algorithm", "cp_comm_type"):
        with pytest.raises(ConfigError, match=f'{key} = "{name}": is not in this version; nearest: ') as caught:
            SuiteSettings(**{key: name})
        nearest, valid = str(caught.value).split("nearest: ")[1].split("; valid: ")
        assert nearest.split()[0].rstrip(",") in ALGORITHMS and all(known in valid for known, _ in NAMES)


def test_one_algorithm_under_two_keys_must_agree() -> None:
    with pytest.raises(ConfigError, match='cp_comm_type = "a2a": differs from algorithm = ring; give only one'):
        SuiteSettings(**{"cp_comm_type": "a2a", "algorithm": "ring"})
    with pytest.raises(ConfigError, match="unknown algorithm; did you mean ring"):
        SuiteSettings(algorithm="rign")
    with pytest.raises(ConfigError, match="one algorithm per layer"):
        SuiteSettings(**{"cp_comm_type": ["p2p", "p2p"]})


RING = "context_parallel_suite:\n  context_parallel_size: 4\n  algorithm: ring\n"
SUITE = "context_parallel_suite."


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (
            RING,
            ["cp_comm_type=a2a"],
            '--set: {S}cp_comm_type = "a2a": differs from algorithm = ring; give only one; {S}algorithm stands in {F}:3; '
            "on the command line: --set {S}algorithm=ulysses",
        ),
        (
            RING.replace("algorithm: ring", "cp_comm_type: p2p"),
            ["algorithm=direct"],
            '{F}:3: {S}cp_comm_type = "p2p": differs from algorithm = direct; give only one; {S}algorithm is from --set; '
            "on the command line: --set {S}cp_comm_type=direct",
        ),
        (
            RING + "  cp_comm_type: a2a\n",
            [],
            '{F}:4: {S}cp_comm_type = "a2a": differs from algorithm = ring; give only one; {S}algorithm stands in {F}:3',
        ),
        (
            RING,
            ["hierarchical_context_parallel_sizes=[2, 2]"],
            "--set: {S}hierarchical_context_parallel_sizes = [2, 2]: algorithm = ring does not use it; give algorithm: "
            "hybrid (Megatron's a2a+p2p), or remove the key; {S}algorithm stands in {F}:3; on the command line: --set "
            "{S}algorithm=hybrid",
        ),
        (
            RING.replace("algorithm: ring", "cp_comm_type: p2p"),
            ["hierarchical_context_parallel_sizes=[2, 2]"],
            "--set: {S}hierarchical_context_parallel_sizes = [2, 2]: cp_comm_type = p2p does not use it; give "
            "algorithm: hybrid (Megatron's a2a+p2p), or remove the key; {S}cp_comm_type stands in {F}:3; on the command "
            "line: --set {S}cp_comm_type=hybrid",
        ),
        (
            RING.replace("ring", "hybrid") + "  hierarchical_context_parallel_sizes: [2, 2]\n",
            ["ulysses_degree=4"],
            "{F}:4: {S}hierarchical_context_parallel_sizes = [2, 2]: differs from ulysses_degree = 4; give only one; "
            "{S}ulysses_degree is from --set; on the command line: --set {S}hierarchical_context_parallel_sizes=null",
        ),
    ],
    ids=["override", "file", "both in the file", "sizes", "sizes and cp_comm_type", "degree"],
)
def test_keys_that_do_not_agree_are_told_with_both_places_and_a_cure_that_works(
    tmp_path: Path, text: str, overrides: list[str], expected: str
) -> None:
    path = write(tmp_path, text)
    given = [SUITE + one for one in overrides]
    line = error(path, *given)
    assert line == expected.format(S=SUITE, F=path)
    with pytest.raises(ConfigError, match=re.escape(line)):
        SuiteSettings.from_yaml(path, given)
    if "--set " in line:
        load_settings(path, [*given, line.split("--set ")[-1]])


def test_the_keys_of_megatron_that_are_read_are_among_the_valid_ones(tmp_path: Path) -> None:
    line = error(write(tmp_path, "context_parallel_suite: {cp_comm_typ: a2a}"))
    assert "unknown key; did you mean context_parallel_suite.cp_comm_type? valid: context_parallel_size, " in line
    assert line.endswith(", cp_comm_type, hierarchical_context_parallel_sizes")
    with pytest.raises(
        ConfigError, match=r"unknown key; valid: .*, cp_comm_type, hierarchical_context_parallel_sizes$"
    ):
        SuiteSettings(**{"qqq": 2})
    assert "cp_comm_type" not in error(write(tmp_path, "train: {qqq: 1}"))


EXAMPLES = {
    "layout": "contiguous",
    "cp_window_size": 2,
    "ulysses_degree": 4,
    "prefetch": 3,
    "routing": False,
    "head_split": False,
    "remap": "off",
    "simulated_placements": 2,
    "max_seqlen_per_dp_cp_rank": 40,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_options_belong_to_algorithms(algorithm: str) -> None:
    """Every option of every builder is a key; it reaches the builder, or is refused with the algorithms that have it."""
    own = algorithm_options(algorithm)
    assert set(own) <= set(EXAMPLES) <= set(SuiteSettings.key_names())
    ranks = {"context_parallel_size": 8, "nodes": 2, "algorithm": algorithm}
    suite = SuiteSettings(**ranks, **{name: EXAMPLES[name] for name in own})
    assert suite.options == {name: EXAMPLES[name] for name in own} and suite.topology == Topology(2, 4)
    plan = build_plan(Documents([50, 3]), suite.topology, AttentionConfig(8), suite.algorithm, **suite.options)
    assert (plan.algorithm, plan.ranks) == (algorithm, 8)
    for name in set(EXAMPLES) - set(own):
        with pytest.raises(ConfigError, match=f"{name} = .*: is no option of algorithm {algorithm}; .* have it: ") as e:
            SuiteSettings(**ranks, **{name: EXAMPLES[name]})
        assert str(e.value).endswith(f"--set context_parallel_suite.{name}=null")
        having = str(e.value).split("have it: ")[1].split(";")[0].split(", ")
        assert having == [other for other in ALGORITHMS if name in algorithm_options(other)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"nodes": 4}, "nodes = 4: must divide context_parallel_size = 6; valid: 1, 2, 3, 6"),
        (
            {"algorithm": "hybrid", "ulysses_degree": 4},
            "ulysses_degree = 4: must be a divisor of the 6 ranks: 1, 2, 3, 6",
        ),
        (
            {"algorithm": "double_ring", "cp_window_size": 12},
            "cp_window_size = 12: must be a divisor of the 6 ranks: 1, 2, 3, 6",
        ),
        ({"algorithm": "direct", "prefetch": 0}, "prefetch = 0: must be a whole number of rounds >= 1"),
        ({"layout": "striped"}, f"layout = .striped.: must be one of {', '.join(LAYOUT_NAMES)} or null"),
    ],
)
def test_options_are_checked_with_the_number_of_ranks(values: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SuiteSettings(**{"context_parallel_size": 6, **values})


def test_megatrons_hierarchical_sizes_are_the_degree_of_the_hybrid() -> None:
    key, common = "hierarchical_context_parallel_sizes", {"context_parallel_size": 6, "cp_comm_type": "a2a+p2p"}
    expected = SuiteSettings(context_parallel_size=6, algorithm="hybrid", ulysses_degree=2)
    assert SuiteSettings(**common, **{key: [2, 3]}) == expected
    assert SuiteSettings(**common, **{key: [2, 3], "ulysses_degree": 2}) == expected
    for values, says in (
        ({**common, key: [2, 2]}, r"must be context_parallel_size = 6; valid: \[1, 6\], \[2, 3\], \[3, 2\]"),
        ({**common, key: [2, 3, 1]}, "must be two whole numbers"),
        ({**common, key: 2}, "must be two whole numbers"),
        ({**common, key: [2, 3], "ulysses_degree": 3}, "differs from ulysses_degree = 3"),
        ({key: [2, 3]}, "no algorithm is given; give algorithm: hybrid"),
        ({"algorithm": "ring", key: [2, 3]}, "algorithm = ring does not use it; give algorithm: hybrid"),
    ):
        with pytest.raises(ConfigError, match=f"{key} = .*{says}"):
            SuiteSettings(**values)


def test_settings_are_checked_against_the_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model": {"attention_dropout": 0.1}, "context_parallel_suite": {"algorithm": "direct"}}
    Settings(**values)
    where = {"algorithm": "direct", "dropout": "some"}
    monkeypatch.setattr(capabilities, "REFUSALS", (capabilities.Refusal(where, "dropout is 0.1", "0, or ring"),))
    expected = "model.attention_dropout = 0.1: dropout is 0.1; valid: 0, or ring .algorithm direct, backend auto.$"
    with pytest.raises(ConfigError, match=expected):
        Settings(**values)
    Settings(**{**values, "context_parallel_suite": {"algorithm": "ring"}})
    monkeypatch.setattr(capabilities, "REFUSALS", (capabilities.Refusal({"algorithm": "ring"}, "no", "direct"),))
    with pytest.raises(ConfigError, match=r"context_parallel_suite\.algorithm = .ring.: no; valid: direct"):
        Settings()


@pytest.mark.parametrize("key", UNSUPPORTED_KEYS)
def test_keys_of_megatron_that_would_do_nothing_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = 4: is Megatron's, and not in this version; algorithm: hier"):
        SuiteSettings(**{key: 4})
    assert SuiteSettings(**{key: None}) == SuiteSettings()


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
        ("context_parallel_suite: 3", "must be a section"),
        (
            "context_parallel_suite:\n  algorithm: auto\n  routing: false",
            ":3: context_parallel_suite.routing = false: must be left out with algorithm: auto",
        ),
        ("context_parallel_size: x", ":1: context_parallel_size = .x.: must be an integer >= 1"),
    ],
)
def test_a_wrong_suite_section(tmp_path: Path, text: str, expected: str) -> None:
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
def test_what_the_npu_refuses_is_told_when_settings_are_read(values: dict[str, dict[str, object]], said: str) -> None:
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


def test_a_bare_off_is_the_name(tmp_path: Path) -> None:
    text = "context_parallel_suite:\n  algorithm: hierarchical\n  remap: off\n"
    assert load_settings(write(tmp_path, text)).context_parallel_suite.options["remap"] == "off"
