"""Launch scripts in the manner of real ones: settings and remaining flags, and that both run."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp import AttentionConfig, Documents, build_plan, verify_plan
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.convert import convert_flags, convert_script
from mindspeed_cp.convert.flag_table import Outcome

LAUNCHES = Path(__file__).parent / "launches"

#: Script -> section context_parallel_suite, remaining flags.
CONVERTED: dict[str, tuple[dict[str, Any], str]] = {
    "adaptive": (
        {"context_parallel_size": 4, "algorithm": "direct"},
        """
        --context-parallel-size 4 --reset-position-ids --num-attention-heads 8 --calculate-per-token-loss
        --no-create-attention-mask-in-dataloader --cp-plan-documents --spec mindspeed_cp.megatron.pretrain spec
        --cp-plan suite.yaml""",
    ),
    "default_ring": (
        {"context_parallel_size": 4, "algorithm": "ring"},
        """
        --context-parallel-size 2 --num-attention-heads 4 --context-parallel-size 4 --softmax-type vanilla
        --calculate-per-token-loss --no-create-attention-mask-in-dataloader --spec mindspeed_cp.megatron.pretrain spec
        --cp-plan suite.yaml""",
    ),
    "hybrid_two_nodes": (
        {"context_parallel_size": 8, "nodes": 2, "algorithm": "hybrid", "ulysses_degree": 4},
        """
        --num-attention-heads 16 --num-query-groups 4 --position-embedding-type rope --tensor-model-parallel-size 2
        --context-parallel-size 8 --bf16 --calculate-per-token-loss --no-rope-fusion
        --no-create-attention-mask-in-dataloader --spec mindspeed_cp.megatron.pretrain spec --cp-plan suite.yaml""",
    ),
    "megatron_016_p2p": (
        {"context_parallel_size": 4, "algorithm": "ring"},
        """
        --use-mcore-models --num-layers 32 --num-attention-heads 32 --group-query-attention --num-query-groups 8
        --kv-channels 128 --seq-length 32768 --position-embedding-type rope --tensor-model-parallel-size 2
        --context-parallel-size 4 --sequence-parallel --mock-data --reset-position-ids --reset-attention-mask
        --save checkpoints/llama --calculate-per-token-loss --no-rope-fusion --no-create-attention-mask-in-dataloader
        --spec mindspeed_cp.megatron.pretrain spec --cp-plan suite.yaml""",
    ),
    "megatron_019_hierarchical": (
        {"context_parallel_size": 8, "algorithm": "hybrid", "ulysses_degree": 2},
        """
        --context-parallel-size 8 --dataloader-inter-document-masking --no-rope-fusion --calculate-per-token-loss
        --num-attention-heads 8 --position-embedding-type rope --window-size 1024,0 --recompute-granularity selective
        --recompute-modules core_attn mlp --no-create-attention-mask-in-dataloader
        --spec mindspeed_cp.megatron.pretrain spec --cp-plan suite.yaml""",
    ),
    "megatron_hybrid_cp": (
        {"context_parallel_size": 4, "algorithm": "hierarchical", "max_seqlen_per_dp_cp_rank": 2048},
        """
        --context-parallel-size 4 --calculate-per-token-loss --num-attention-heads 8
        --no-create-attention-mask-in-dataloader --cp-plan-pool --spec mindspeed_cp.megatron.pretrain spec
        --cp-plan suite.yaml""",
    ),
    "ring_mindspeed_012": (
        {"context_parallel_size": 8, "algorithm": "ring", "npu_merge": "ring_update"},
        """
        --tensor-model-parallel-size 1 --context-parallel-size 8 --use-flash-attn --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --seq-length 65536 --max-position-embeddings 65536
        --position-embedding-type rope --use-fused-rotary-pos-emb --recompute-granularity full --recompute-method block
        --recompute-num-layers 2 --bf16 --distributed-backend nccl --calculate-per-token-loss --no-rope-fusion
        --no-create-attention-mask-in-dataloader --spec mindspeed_cp.megatron.pretrain spec --cp-plan suite.yaml""",
    ),
    "slurm_function": (
        {"context_parallel_size": 8, "nodes": 2, "algorithm": "all_gather"},
        """
        --context-parallel-size 8 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 --num-experts 8
        --num-attention-heads 6 --train-samples 1_000 --data-path 0.5 'data/a b' 0.5 data/c --calculate-per-token-loss
        --no-create-attention-mask-in-dataloader --cp-plan suite.yaml""",
    ),
    "ulysses_mla_moe": (
        {"context_parallel_size": 4, "algorithm": "ulysses"},
        """
        --spec my_team.specs.latent layer_spec --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
        --num-layers-per-virtual-pipeline-stage 2 --context-parallel-size 4 --num-attention-heads 16
        --position-embedding-type rope --use-fused-rmsnorm --swap-attention --multi-latent-attention
        --qk-pos-emb-head-dim 64 --qk-head-dim 128 --q-lora-rank 1536 --kv-lora-rank 512 --v-head-dim 128
        --moe-grouped-gemm --moe-token-dispatcher-type alltoall --num-experts 64 --expert-model-parallel-size 16
        --moe-router-topk 6 --moe-router-load-balancing-type aux_loss --calculate-per-token-loss --no-rope-fusion
        --no-create-attention-mask-in-dataloader --cp-plan suite.yaml""",
    ),
}

#: Script -> the rows that are refused.
REFUSED = {"ulysses_tune_pack": ["posttrain_gpt.py"]}


def test_every_script_is_a_case() -> None:
    assert {path.stem for path in LAUNCHES.glob("*.sh")} == {*CONVERTED, *REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_an_alternative_and_gives_no_settings(name: str) -> None:
    _, conversion = convert_script(LAUNCHES / f"{name}.sh")
    assert [change.flag for change in conversion.refused] == REFUSED[name]
    assert all("planned_batch_from" in row.became for row in conversion.refused)
    assert conversion.settings is None and conversion.suite is None and conversion.exit_code == 1


@pytest.mark.parametrize(
    ("launched", "takes_spec"),
    [
        ("pretrain_gpt.py", True),
        ("${MEGATRON}/pretrain_gpt.py", True),
        ("our/train.py", False),
        ("pretrain_gpt.py.py", False),
        ("-m our.train", False),
    ],
)
def test_only_scripts_that_build_layers_from_the_spec_get_it(launched: str, takes_spec: bool, tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text(f"python {launched} --context-parallel-size 2 --num-attention-heads 4\n")
    _, conversion = convert_script(tmp_path / "launch.sh")
    assert ("--spec" in conversion.added) == takes_spec
    (script,) = (row for row in conversion.changes if row.outcome is Outcome.NEXT)
    assert (
        script.flag == launched.removeprefix("-m ").replace("${MEGATRON}", "") and "docs/megatron.md" in script.became
    )
    others = conversion.to_do
    assert [row.flag for row in others] == ([] if takes_spec else ["--spec mindspeed_cp.megatron.pretrain spec"])
    assert conversion.exit_code == (0 if takes_spec else 3)
    assert takes_spec or "mindspeed_cp.megatron.install" in others[0].became


def check_plan(path: Path, flags: tuple[str, ...]) -> None:
    """Build and prove a plan of the settings in a file, for heads of the flags."""
    suite = SuiteSettings.from_yaml(path)
    values = {flag: value for flag, value in pairwise(flags) if flag.startswith("--")}
    heads = int(values["--num-attention-heads"])
    window = (int(values["--window-size"].split(",")[0]) // 16, 0) if "--window-size" in values else None
    attention = AttentionConfig(heads, int(values.get("--num-query-groups", heads)), 8, window=window)
    documents = Documents([70, 3, 0, 155, 41])
    plan = build_plan(documents, suite.topology, attention, suite.algorithm, **suite.options)
    verify_plan(plan)
    assert plan.ranks == suite.context_parallel_size == int(values["--context-parallel-size"])


@pytest.mark.parametrize("name", CONVERTED)
def test_a_script_becomes_settings_of_a_proved_plan_and_flags(name: str, tmp_path: Path) -> None:
    settings, flags = CONVERTED[name]
    launch, conversion = convert_script(LAUNCHES / f"{name}.sh")
    assert conversion.settings == settings
    assert list(conversion.flags) == shlex.split(flags)
    assert not conversion.refused
    (tmp_path / "suite.yaml").write_text(conversion.yaml())
    check_plan(tmp_path / "suite.yaml", conversion.flags)
    again = convert_flags(conversion.flags)
    assert "--cp-plan suite.yaml" in [change.flag for change in again.refused], "it was converted before"
    of_flags = convert_flags(launch.words)
    nodes = {"nodes": settings["nodes"]} if "nodes" in settings else {}
    assert of_flags.settings is not None and of_flags.settings | nodes == settings
