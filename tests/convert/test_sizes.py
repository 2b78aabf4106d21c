"""The model's sizes go from a launch to plan and simulate."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from mindspeed_cp.cli.main import run
from mindspeed_cp.config import load_settings
from mindspeed_cp.config.derived import rank_attention
from mindspeed_cp.convert import convert_flags

LLAMA = shlex.split("""
    --context-parallel-size 8 --tensor-model-parallel-size 2 --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 32768
    --swiglu --bf16 --position-embedding-type rope
""")
LATENT = shlex.split("""
    --context-parallel-size 4 --num-layers 4 --hidden-size 2048 --num-attention-heads 16 --multi-latent-attention
    --kv-lora-rank 512 --q-lora-rank 1536 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --swiglu
    --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --position-embedding-type rope
""")


def test_heads_widths_layers_and_precision_are_those_of_the_launch(tmp_path: Path) -> None:
    conversion = convert_flags(LLAMA)
    (tmp_path / "suite.yaml").write_text(conversion.yaml())
    settings = load_settings(tmp_path / "suite.yaml")
    model, attention = settings.model, rank_attention(settings)
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (32, 4096, 14336)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (16, 4, 128)
    assert settings.train.bf16 and settings.train.tensor_model_parallel_size == 2
    assert settings.data.seq_length == 32768


def test_groups_without_their_flag_are_not_read_as_megatron_does_not() -> None:
    words = [word for word in LLAMA if word != "--group-query-attention"]
    assert "num_query_groups" not in convert_flags(words).sections["model"]


def test_latent_attention_and_experts_are_those_of_the_launch(tmp_path: Path) -> None:
    conversion = convert_flags([*LATENT, "--moe-layer-freq", "([0]*1+[1]*3)"])
    (tmp_path / "suite.yaml").write_text(conversion.yaml())
    model = load_settings(tmp_path / "suite.yaml").model
    assert (model.head_dim, model.head_dim_v, model.kv_lora_rank, model.q_lora_rank) == (192, 128, 512, 1536)
    assert (model.num_moe_experts, model.moe_router_topk, model.expert_layers) == (64, 6, 3)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("2", 2),
        ("[0,1,1,1]", [0, 1, 1, 1]),
        ("([0]*1+[1]*3)", [0, 1, 1, 1]),
        ("([1]*1+[0]*1)*2", [1, 0, 1, 0]),
        ("[1]*9**9", None),
        ("[1]*99999", None),
        ("[[1]]", None),
        ("__import__('os')", None),
    ],
)
def test_patterns_of_layers_are_those_of_megatron_or_no_size_is_written(
    text: str, pattern: int | list[int] | None
) -> None:
    words = "--context-parallel-size 4 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 4"
    conversion = convert_flags([*words.split(), "--moe-layer-freq", text])
    if pattern is None:
        assert not conversion.sections and any("is not understood" in note for note in conversion.notes)
    else:
        assert conversion.sections["model"]["moe_layer_freq"] == pattern


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        ("--context-parallel-size 4 --num-layers 4 --hidden-size 64", "--num-attention-heads is not given"),
        ("--context-parallel-size 4 --num-layers 4 --hidden-size 64 --num-attention-heads 7", "hidden_size"),
    ],
)
def test_sizes_that_cannot_be_known_are_left_out_with_a_note(words: str, remark: str) -> None:
    conversion = convert_flags(words.split())
    assert conversion.sections == {} and remark in conversion.notes[0] and conversion.settings is not None


def test_simulate_models_the_converted_launch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    assert run(["convert", "--output", str(path), "--", *LLAMA]) == 0
    capsys.readouterr()
    options = ["--cluster", "a2", "--lengths", "20000,9000", "--algorithms", "ring", "--json"]
    assert run(["simulate", str(path), *options]) == 2  # 8 x 2 devices on a node that has 8
    assert "give --ranks-per-node 4" in capsys.readouterr().err
    options += ["--ranks", "8", "--nodes", "2"]
    assert run(["simulate", str(path), *options]) == 0
    converted = json.loads(capsys.readouterr().out)
    both = "the model has 32 heads and 8 key/value heads; shown is one of 2 tensor-parallel ranks, which has 16 and 4"
    assert both in converted["notes"] and converted["bytes_per_element"] == 2
    assert run(["plan", str(path), "--lengths", "20000,9000", "--nodes", "2", "--ranks", "8", "--json"]) == 0
    assert both in json.loads(capsys.readouterr().out)["notes"]
    assert run(["simulate", "--heads", "16", "--kv-heads", "4", "--head-dim", "128", *options]) == 0
    by_hand = json.loads(capsys.readouterr().out)
    for key in ("heads", "kv_heads", "head_dim"):
        assert converted[key] == by_hand[key]
    for key in ("attention", "bytes_sent"):
        assert converted["algorithms"][0][key] == pytest.approx(by_hand["algorithms"][0][key])
