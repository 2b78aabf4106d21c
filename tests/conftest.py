"""Fixtures and options shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.workers import GlooPool

#: Examples of a hypothesis test by profile, as a share of those that the test asks for, and the least.
EXAMPLES = {"ci": (0.25, 10), "thorough": (1.0, 0)}

#: Files that take longest. They come first: xdist gives whole files to its processes in this order, and a long one at the end
#: would leave the other processes without work.
LONG = (
    "launch_scripts/test_training.py",
    "faults/test_processes.py",
    "faults/test_checkpoints.py",
    "train/test_training.py",
    "train/test_splits.py",
    "train/test_pool.py",
    "train/test_balance.py",
    "integrations/huggingface/test_finetune.py",
    "integrations/huggingface/test_tree_rl.py",
    "doctor/test_ranks.py",
    "megatron/test_remap.py",
    "megatron/test_gpt.py",
    "test_readme.py",
    "train/test_bad_steps.py",
    "doctor/test_calibrate.py",
    "npu/test_profile.py",
    "npu/test_doctor.py",
    "npu/test_training.py",
    "npu/test_table.py",
    "npu/test_bad_input.py",
    "npu/test_hccl_streams.py",
    "npu/test_calibrate.py",
)

for profile in EXAMPLES:
    settings.register_profile(profile, deadline=None)


# pytest imports readline, which exports the size of a terminal to child processes. In these, and so in xdist's workers, tables
# would be as narrow.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-cuda", type=int, metavar="GPUS",
        help="fail at once where the cuda backend has fewer GPUs, and do not skip the tests that need them",
    )  # fmt: skip
    parser.addoption(
        "--thorough", action="store_true",
        help="run the tests of the full matrix too, and hypothesis tests with all their examples (make test-all)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(_profile(config))
    wanted = config.getoption("require_cuda")
    if wanted is None:
        return
    if wanted < 1:
        raise pytest.UsageError(f"--require-cuda {wanted}: valid: 1 or more")
    # Imports torch, which some tests must import first.
    from mindspeed_cp.doctor.machine import backend_status, device_status

    devices = device_status("cuda")
    status = backend_status("cuda", devices)
    if not status["available"]:
        raise pytest.UsageError(f"--require-cuda {wanted}: {status['why']}")
    if devices["count"] < wanted:
        raise pytest.UsageError(f"--require-cuda {wanted}: fewer CUDA devices are visible, {devices['count']}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long files first; without --thorough leave out what is marked `thorough`; give hypothesis tests the examples of
    the profile."""
    order = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(LONG)))
    if not config.getoption("thorough"):
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    share, least = EXAMPLES[_profile(config)]
    for test in {item.obj for item in items if isinstance(item, pytest.Function)}:
        asked_for = getattr(test, "_hypothesis_internal_use_settings", None)
        if asked_for is not None:
            examples = min(asked_for.max_examples, max(round(asked_for.max_examples * share), least))
            test._hypothesis_internal_use_settings = settings(asked_for, max_examples=examples)


def _profile(config: pytest.Config) -> str:
    """The hypothesis profile: that of --thorough, or of the environment variable HYPOTHESIS_PROFILE."""
    name = "thorough" if config.getoption("thorough") else os.environ.get("HYPOTHESIS_PROFILE", "ci")
    if name not in EXAMPLES:
        raise pytest.UsageError(f"HYPOTHESIS_PROFILE = {name!r}: valid: {', '.join(EXAMPLES)}")
    return name


@pytest.fixture(scope="session")
def workers() -> Iterator[GlooPool]:
    """The pool of gloo processes; started by the first test that uses it."""
    pool = GlooPool()
    yield pool
    pool.close()
