"""Fixtures of the Megatron tests."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from mindspeed_cp.device.versions import version_in_source
from mindspeed_cp.megatron.patches.imports import parse_version
from tests.megatron.gpt import VERSION, LackingSetting, one_rank
from tests.megatron.ranks import MegatronRanks
from tests.megatron.script_arguments import stand_in
from tests.processes import preload
from tools.megatron_arguments import arguments_at_hand

preload("tests.megatron.gpt")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test whose model the installed Megatron-core cannot have, and name what it lacks."""
    try:
        return (yield)
    except LackingSetting as lacking:
        pytest.skip(str(lacking))


@pytest.fixture(scope="session")
def ranks() -> Iterator[MegatronRanks]:
    """Processes in which Megatron's world is the ranks of the test."""
    pool = MegatronRanks()
    yield pool
    pool.close()


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    """A file for --cp-plan."""
    path = tmp_path / "suite.yaml"
    path.write_text("context_parallel_suite:\n  algorithm: ring\n", "utf-8")
    return str(path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, plan_file: str) -> Callable[..., Namespace]:
    """A function that sets the arguments of Megatron's script and returns them."""
    modules, start = stand_in(plan_file)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return start


@pytest.fixture
def alone() -> Iterator[None]:
    """Megatron in this process, a world of one rank, on the CPU."""
    with one_rank():
        yield


@pytest.fixture(scope="session")
def megatron_parser() -> dict[str, tuple[str, list[str]]]:
    """The arguments of the Megatron at hand: name -> title of the group, flags; skips without megatron.training, and
    fails if MEGATRON_LM is of another version."""
    tree = os.environ.get("MEGATRON_LM")
    if tree is not None:
        version = version_in_source(str(Path(tree) / "megatron" / "core" / "__init__.py"))
        if version is None or parse_version(version) != parse_version(VERSION):
            pytest.fail(f"MEGATRON_LM is {tree}, of version {version}; valid: a source tree of {VERSION}, as installed")
    if find_spec("megatron.training") is None and tree is None:
        pytest.skip("this megatron-core has no megatron.training, and MEGATRON_LM names no source tree of Megatron-LM")
    try:
        return arguments_at_hand()
    except ImportError as error:
        if tree is not None:
            raise
        pytest.skip(str(error))


# What Megatron-core says about itself in every one of these tests, and nobody here can change.
_NOISE = (
    "MLP requires ffn_hidden_size",
    "Warning. tp_group is None",
    "If you are using transformer_engine as the transformer implementation",
    "`torch.distributed.*` is deprecated",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep Megatron's own deprecations out of the summary of these tests."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for text in _NOISE:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))
