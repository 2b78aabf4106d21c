"""Versions: tested, allowed, refused or missing; and what works where torch and Megatron-core are not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from mindspeed_cp.device import versions
from mindspeed_cp.device.versions import (
    LIMITS,
    installed_version,
    require_megatron_of_train,
    version_report,
    version_status,
)
from mindspeed_cp.errors import ConfigError
from tools import test_versions

TESTED = versions.tested_rows
LIMIT = {limit.package: limit for limit in LIMITS}
ROWS = [
    {
        "python": "3.10.13", "torch": "2.7.1", "numpy": "1.26.4", "megatron-core": "0.12.1",
        "suites": {"decisions": 9, "engine": 2, "ops": 3, "megatron": 4},
    },
    {
        "python": "3.11.2", "torch": "2.9.0", "numpy": "1.26.4", "megatron-core": "0.16.1",
        "suites": {"decisions": 9, "ops": 3},
    },
]  # fmt: skip


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "tested_rows", lambda: ROWS)


@pytest.mark.parametrize(
    ("package", "version", "status", "reason"),
    [
        ("torch", "2.7.1+cpu", "tested", ""),
        ("torch", "2.7.0", "allowed", "tested: 2.7.1"),
        ("torch", "2.9.0", "allowed", "tested: 2.7.1"),  # the engine's tests are missing
        ("torch", "2.6.0", "refused", "needed is 2.7 or later"),
        ("python", "3.10.2", "tested", ""),
        ("python", "3.13.0", "allowed", "tested: 3.10.13, 3.11.2"),
        ("numpy", "1.25.2", "refused", "needed is 1.26 or later"),
        ("megatron-core", "0.12.1", "tested", ""),
        ("megatron-core", "0.14.0", "refused", "needed is 0.12, or 0.16 or later"),
        ("megatron-core", "0.16.0rc1", "allowed", "tested: 0.12.1"),
        ("megatron-core", "0.11.0", "refused", "needed is 0.12 or later"),
        ("megatron-core", "0.20.0rc0", "allowed", "tested: 0.12.1"),
        ("megatron-core", "unknown", "allowed", "a source tree"),
        ("torch-npu", "2.9.0", "allowed", "tested: none"),
        ("torch-npu", None, "missing", "needed for NPUs"),
    ],
)
def test_each_version_has_a_status_and_a_reason(package: str, version: str | None, status: str, reason: str) -> None:
    given = version_status(LIMIT[package], version)
    assert (given.status, given.version) == (status, version) and given.reason.startswith(reason)


@pytest.mark.parametrize(
    ("version", "is_refused"), [("0.12.1", True), ("0.15.0rc8", True), ("0.16.1", False), ("unknown", False)]
)
def test_train_refuses_an_older_megatron(version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda limit: version)
    with (
        pytest.raises(ConfigError, match=f"megatron-core is {version}; valid .*: 0.16") if is_refused else nullcontext()
    ):
        require_megatron_of_train()


def test_torch_npu_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cpu", "torch-npu": "2.7.1.post11"}
    monkeypatch.setattr(versions, "installed_version", lambda limit: installed.get(limit.package))
    [npu] = [status for status in version_report() if status.package == "torch-npu"]
    assert npu.status == "refused" and npu.reason == "torch is 2.13.0+cpu; they must be of one release"
    installed["torch-npu"] = "2.13.0.post2"
    assert "refused" not in {status.status for status in version_report()}


def test_the_version_of_a_source_tree_is_that_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tmp_path / "tree_of_megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 1\nPRE_RELEASE = ''\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    limit = versions.Limit("no-such-package", "tree_of_megatron.core", (0, 12), "", "", ())
    assert installed_version(limit) == "0.12.1"
    (core / "package_info.py").unlink()
    assert installed_version(limit) == "unknown"
    assert installed_version(versions.Limit("no-such-package", "no_such.core", (0,), "", "", ())) is None


def test_the_tested_rows_name_versions_and_tests() -> None:
    for row in TESTED():
        assert {"python", "torch", "numpy", "megatron-core", "suites"} <= row.keys()
        assert all(count > 0 for count in row["suites"].values())


def test_a_suite_that_fails_loses_what_it_passed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "tested.json"
    results.write_text('{"rows": []}', "utf-8")
    monkeypatch.setattr(test_versions, "RESULTS", results)
    installed = {"python": "3.10.13", "torch": "2.7.1", "numpy": "1.26.4", "megatron-core": "0.12.1"}
    test_versions.record(installed, {"ops": 3, "engine": 2})
    test_versions.record(installed, {"ops": None, "decisions": 9})
    assert TESTED(results) == [{**installed, "suites": {"engine": 2, "decisions": 9}}]
    test_versions.record(installed, {"engine": None, "decisions": None})
    assert TESTED(results) == []


def test_every_row_to_test_says_where_its_training_loop_is(tmp_path: Path) -> None:
    rows = json.loads(test_versions.ROWS.read_text("utf-8"))["rows"]
    assert [row["training"] for row in rows if row["megatron-core"] < "0.17"] == [
        f"core_v{row['megatron-core']}" for row in rows if row["megatron-core"] < "0.17"
    ]
    assert {row["training"] for row in rows if row["megatron-core"] > "0.17"} == {"wheel"}
    (tmp_path / "core_v0.12.1" / "megatron" / "training").mkdir(parents=True)
    assert test_versions.training_tree("core_v0.12.1", tmp_path) == tmp_path.resolve() / "core_v0.12.1"
    assert test_versions.training_tree("core_v0.16.1", tmp_path) is None is test_versions.training_tree("wheel", None)


#: Runs the command line where torch, Megatron-core and psutil are not installed.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "psutil", "torch_npu"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util, importlib.metadata
find, version = importlib.util.find_spec, importlib.metadata.version
def find_spec(name, package=None):
    return None if name.split(".")[0] in ("torch", "torch_npu") else find(name, package)
def metadata_version(name):
    if name in ("torch", "torch-npu", "megatron-core"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.util.find_spec, importlib.metadata.version = find_spec, metadata_version
from mindspeed_cp.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True)


def test_plans_pictures_and_the_simulator_need_no_torch(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    size = ("--lengths", "500,37,1200", "--cp", "4")
    done = without_torch("plan", *size, "--png", str(picture))
    assert done.returncode == 0 and picture.read_bytes().startswith(b"\x89PNG"), done.stderr
    done = without_torch("simulate", *size)
    assert done.returncode == 0 and done.stdout, done.stderr


ENTRIES = (
    "from mindspeed_cp import context_parallel_attention",
    "from mindspeed_cp import check_agreement",
    "import mindspeed_cp.integrations.huggingface",
    "import mindspeed_cp.integrations.verl",
    "import mindspeed_cp.integrations.ms_swift",
    "import mindspeed_cp.megatron",
    "import mindspeed_cp.megatron.pretrain",
)
HOOK = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_without_torch_tells_the_remedy(entry: str) -> None:
    program = HOOK.format(package="torch") + (
        f"from mindspeed_cp.errors import ConfigError\ntry:\n    {entry}\nexcept ConfigError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch is not installed: pip install 'torch") and done.stdout.count("\n") == 1


@pytest.mark.parametrize(("command", "package"), [("train", "torch"), ("train", "megatron"), ("doctor", "torch")])
def test_a_command_without_a_package_tells_the_remedy(command: str, package: str, tmp_path: Path) -> None:
    program = HOOK.format(package=package) + "from mindspeed_cp.cli.main import main\nmain()"
    done = subprocess.run([sys.executable, "-c", program, command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert done.stderr.startswith(f"error: {package} is not installed: pip install") and done.stderr.count("\n") == 1
