"""Names of algorithms and keys of Megatron and MindSpeed are read, and must agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_cp.algorithms import ALGORITHMS, ALIASES, UNSUPPORTED_ALGORITHMS
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.errors import ConfigError
from tests.config.test_config import error, write

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


def test_the_keys_of_megatron_that_are_read_are_among_the_valid_ones(tmp_path: Path) -> None:
    line = error(write(tmp_path, "context_parallel_suite: {cp_comm_typ: a2a}"))
    assert "unknown key; did you mean context_parallel_suite.cp_comm_type?" in line and len(line) < 400
    assert {"cp_comm_type", "hierarchical_context_parallel_sizes"} <= set(SuiteSettings.key_names())
    with pytest.raises(ConfigError, match="unknown key; valid: "):
        SuiteSettings(**{"qqq": 2})
    assert "cp_comm_type" not in error(write(tmp_path, "train: {qqq: 1}"))
