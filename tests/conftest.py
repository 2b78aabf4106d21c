"""Fixtures and options shared by all tests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.workers import GlooPool

#: Examples of a hypothesis test by profile, as a share of those that the test asks for, and the least.
EXAMPLES = {"ci": (0.25, 10), "thorough": (1.0, 0)}

#: Seconds that a test took when it was last measured (`make slow-tests`), for those of half a second and more.
MEASURED: dict[str, float] = json.loads((Path(__file__).parent / "slow.json").read_text("utf-8"))

#: `make test` leaves out tests of so many seconds, and `make test-quick` those of so many.
SLOW, NOT_QUICK = 1.5, 0.5

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
        help="run the slow tests and those of the full matrix too, and hypothesis tests with all their examples (make test-all)",
    )  # fmt: skip
    parser.addoption(
        "--quick", action="store_true", help="leave out what takes half a second or more (make test-quick)"
    )


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
    """Put files that take long first, mark what is slow, and leave it out with what is `thorough` unless --thorough is
    given; give hypothesis tests the examples of the profile. A test that an argument names by its function runs anyway."""
    limit = NOT_QUICK if config.getoption("quick") else SLOW
    seconds: dict[Path, float] = {}  # xdist hands out whole files in this order: a long one at the end would run alone
    for item in items:
        measured = MEASURED.get(item.nodeid, 0.0)
        if measured >= limit:
            item.add_marker("slow")
        if config.getoption("thorough") or measured < limit:
            seconds[item.path] = seconds.get(item.path, 0.0) + measured
    items.sort(key=lambda item: -seconds.get(item.path, 0.0))
    if not config.getoption("thorough") and not any("::" in argument for argument in config.args):
        left_out = [item for item in items if any(map(item.get_closest_marker, ("slow", "thorough")))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not any(map(item.get_closest_marker, ("slow", "thorough")))]
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
