"""Names of algorithms and keys of Megatron and MindSpeed are read, and must agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_cp.algorithms import ALGORITHMS, ALIASES, UNSUPPORTED_ALGORITHMS
from mindspeed_cp.config import SuiteSettings, load_settings
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
def test_an_error_of_keys_that_contradict_names_both_places_and_an_override_that_works(
    tmp_path: Path, text: str, overrides: list[str], expected: str
) -> None:
    path = write(tmp_path, text)
    given = [SUITE + override for override in overrides]
    line = error(path, *given)
    assert line == expected.format(S=SUITE, F=path)
    with pytest.raises(ConfigError, match=re.escape(line)):
        SuiteSettings.from_yaml(path, given)
    if "--set " in line:
        load_settings(path, [*given, line.split("--set ")[-1]])


def test_the_keys_of_megatron_that_are_read_are_among_the_valid_ones(tmp_path: Path) -> None:
    line = error(write(tmp_path, "context_parallel_suite: {cp_comm_typ: a2a}"))
    assert "unknown key; did you mean context_parallel_suite.cp_comm_type?" in line and len(line) < 400
    assert {"cp_comm_type", "hierarchical_context_parallel_sizes"} <= set(SuiteSettings.key_names())
    with pytest.raises(ConfigError, match="unknown key; valid: "):
        SuiteSettings(**{"qqq": 2})
    assert "cp_comm_type" not in error(write(tmp_path, "train: {qqq: 1}"))
