"""Options belong to algorithms and are checked when settings are read."""

from __future__ import annotations

import pytest

from mindspeed_cp import Documents, build_plan
from mindspeed_cp.algorithms import ALGORITHMS, LAYOUT_NAMES, algorithm_options
from mindspeed_cp.config import Settings, SuiteSettings, rules
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig, Topology
from mindspeed_cp.schema.unsupported import SUITE_KEYS

EXAMPLES = {
    "reduce_dtype": "bfloat16",
    "latents": "off",
    "layout": "contiguous",
    "cp_window_size": 2,
    "ulysses_degree": 4,
    "prefetch": 3,
    "routing": False,
    "head_split": False,
    "remap": "off",
    "simulated_placements": 2,
    "fetch_pieces": 2,
    "robustness": 0.02,
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
        with pytest.raises(
            ConfigError, match=f"{name} = .*: algorithm {algorithm} has no such option; .* have it: "
        ) as e:
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


def test_attention_that_no_kernel_of_the_device_computes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "resolve_device_type", lambda device: "cuda")
    values = {"model": {"position_embedding_type": "alibi", "attention_dropout": 0.1}, "train": {"bf16": True}}
    expected = r'model.position_embedding_type = "alibi": attention.alibi .*dropout.*; valid: one of the two'
    with pytest.raises(ConfigError, match=expected + r", or .*\(algorithm ring, backend auto\)$"):
        Settings(**values)
    Settings(**{**values, "model": {"position_embedding_type": "alibi"}})
    monkeypatch.setattr(rules, "resolve_device_type", lambda device: "cpu")
    Settings(**values)


@pytest.mark.parametrize("key", SUITE_KEYS)
def test_keys_of_megatron_that_would_do_nothing_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: is Megatron's, and not in this version; algorithm: hier"):
        SuiteSettings(**{key: 4})
