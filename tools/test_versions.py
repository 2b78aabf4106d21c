"""Run the tests on the versions of torch, NumPy and Megatron-core that users have; `make test-versions`.

    python -m tools.test_versions                   # all rows of requirements/versions.json
    python -m tools.test_versions --only 0.12.1     # rows that contain this text
    python -m tools.test_versions --trees FOLDER    # with the training loops of FOLDER/core_v0.12.1 and the like

Each row gets an environment of its own in .venv-versions. A row whose Python is not on this machine is left out, and
said so. What passed is written to mindspeed_cp/device/tested_versions.json, from which `mindspeed-cp doctor` and
docs/versions.md (`make docs-tables`) say what is tested.

Megatron's training loop is in the wheels of megatron-core from 0.17 on. For older ones `training` of a row names the
source tree of Megatron-LM, by its tag; without that tree the suite "training-loop" is left out, and said so.

torch is the CPU build where one is offered. Elsewhere it is PyPI's build for CUDA without its libraries, for which
tests/versions/cuda_stand_in.py makes stand-ins that find no device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "requirements" / "versions.json"
RESULTS = ROOT / "mindspeed_cp" / "device" / "tested_versions.json"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
#: Tests of Megatron's training loop: without it, all are skipped, and the suite counts as failed.
TRAINING_TESTS = "tests/megatron/test_pretrain_script.py"
#: Tests of NPUs over the stand-in for CANN, for rows with torch-npu. The others look into one release of it.
NPU_TESTS = tuple(f"test_{name}.py" for name in ["agreement", "counts", "operators", "roll", "sink", "syncs", "table"])
#: Tests of each suite, run one after the other, as arguments of pytest.
SUITES = {
    "decisions": ("tests/layout", "tests/plan", "tests/algorithms", "tests/choose", "tests/simulate"),
    "engine": ("tests/engine", "tests/comm"),
    "ops": ("tests/ops",),
    "megatron": ("tests/megatron", f"--ignore={TRAINING_TESTS}"),
    "training-loop": (TRAINING_TESTS,),
    "npu": ("--timeout-method=thread", *(f"tests/npu/{name}" for name in NPU_TESTS)),
}
#: Packages of requirements/dev.txt that a row names itself.
OWN = ("numpy", "megatron-core", "torch", "torch-npu")
#: Keys of a row that name no package.
NO_PACKAGES = ("also", "training")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="rows that contain this text")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES), help="default: all")
    parser.add_argument("--trees", type=Path, help="folder with source trees of Megatron-LM, by their tags")
    parser.add_argument("--jobs", type=int, default=2, help="test files that run at once (2)")
    arguments = parser.parse_args()
    rows = [row for row in json.loads(ROWS.read_text("utf-8"))["rows"] if arguments.only in json.dumps(row)]
    failed = 0
    for row in rows:
        title = ", ".join(f"{name} {version}" for name, version in row.items() if name not in NO_PACKAGES)
        python = find_python(row["python"])
        if python is None:
            print(f"{title}: left out: no Python {row['python']} on this machine", flush=True)
            continue
        print(f"{title}:", flush=True)
        environment, variables = make_environment(row, python)
        results: dict[str, int | None] = {}
        wanted, tree = row["training"], training_tree(row["training"], arguments.trees)
        if tree is not None:
            variables["MEGATRON_LM"] = str(tree)
        for suite in arguments.suites:
            if suite == "training-loop" and tree is None and wanted != "wheel":
                print(f"  {suite}: left out: --trees names no folder with {wanted}", flush=True)
                continue
            if suite == "npu" and "torch-npu" not in row:
                continue
            results[suite], error = run_suite(SUITES[suite], environment, variables, arguments.jobs)
            print(f"  {suite}: {error or f'{results[suite]} passed'}", flush=True)
            failed += error is not None
        record(installed(environment, row), results)
    return 1 if failed else 0


def training_tree(name: str, trees: Path | None) -> Path | None:
    """Return the source tree of Megatron-LM of this name in a folder, or None."""
    tree = None if trees is None else trees.resolve() / name
    return tree if tree is not None and (tree / "megatron" / "training").is_dir() else None


def find_python(version: str) -> str | None:
    """Return an interpreter of a version such as "3.10": on PATH, or of pyenv."""
    names = [f"python{version}", *sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))]
    for name in names:
        path = shutil.which(name)
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if path and subprocess.run([path, "-c", code], capture_output=True, text=True).stdout.strip() == version:
            return path
    return None


def make_environment(row: dict[str, Any], python: str) -> tuple[Path, dict[str, str]]:
    """Make or refresh the environment of a row; return its Python and variables for its programs."""
    folder = ROOT / ".venv-versions" / "-".join(str(row[name]) for name in ("python", "torch", "megatron-core"))
    stamp, wanted = folder / "installed", json.dumps([row, requirements(), sys.version])
    interpreter = folder / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        install_torch(interpreter, row["torch"])
        named = [f"{name}=={row[name]}" for name in OWN if name in row and name != "torch"]
        pip(interpreter, *requirements(), *named, *row.get("also", ()))
        stamp.write_text(wanted)
    torch = next(folder.glob("lib/python*/site-packages/torch"))
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    variables["HOST_CANN_BUILD"] = str(folder / "host_cann")
    if any((torch / "lib").glob("libtorch_cuda.so")):
        if not (folder / "cuda").is_dir():
            build = [sys.executable, "-m", "tests.versions.cuda_stand_in", torch, folder / "cuda"]
            subprocess.run(build, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        variables["LD_LIBRARY_PATH"] = str(folder / "cuda")
    return interpreter, variables


def requirements() -> list[str]:
    """Return what requirements/base.txt and dev.txt pin, without the packages that a row names."""
    lines = [
        line for name in ("base.txt", "dev.txt") for line in (ROOT / "requirements" / name).read_text().splitlines()
    ]
    pins = [line.strip() for line in lines if re.match(r"[A-Za-z0-9]", line)]
    return [pin for pin in pins if re.split(r"[=\s]", pin)[0] not in OWN]


def install_torch(python: Path, version: str) -> None:
    """Install a release of torch without its dependencies: the CPU build if it can be had."""
    for arguments in ((f"torch=={version}+cpu",), ("--index-url", TORCH_INDEX, f"torch=={version}+cpu")):
        try:
            return pip(python, *arguments, quiet=True)
        except subprocess.CalledProcessError:
            continue
    pip(python, f"torch=={version}")


def pip(python: Path, *arguments: str, quiet: bool = False) -> None:
    command = [python, "-m", "pip", "install", "-qq", "--no-deps", "--retries", "1", *arguments]
    subprocess.run(
        command, check=True, stderr=subprocess.DEVNULL if quiet else None, stdin=subprocess.DEVNULL, cwd=ROOT
    )


def run_suite(
    tests: tuple[str, ...], python: Path, variables: dict[str, str], jobs: int
) -> tuple[int | None, str | None]:
    """Run tests; return how many passed, or None and one line if not all did."""
    spread = ["-n", str(jobs), "--dist", "loadfile"]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *spread, *tests]
    others = {name: value for name, value in os.environ.items() if name != "MEGATRON_LM"}
    done = subprocess.run(command, cwd=ROOT, env={**others, **variables}, capture_output=True, text=True)
    summary = next((line for line in reversed(done.stdout.splitlines()) if re.search(r"\d+ (passed|failed)", line)), "")
    count = re.search(r"(\d+) passed", summary)
    if done.returncode == 0 and count:
        return int(count[1]), None
    log = ROOT / ".venv-versions" / "failed.log"
    log.write_text(done.stdout + done.stderr)
    return None, f"FAILED: {summary.strip('= ') or 'no summary'}; see {log.relative_to(ROOT)}"


def installed(python: Path, row: dict[str, Any]) -> dict[str, str]:
    """Return the versions of an environment by its own word."""
    code = (
        "import importlib.metadata as m, platform, sys; print(platform.python_version(), *map(m.version, sys.argv[1:]))"
    )
    names = [name for name in OWN if name in row]
    out = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(("python", *names), out, strict=True))


def record(versions: dict[str, str], results: dict[str, int | None]) -> None:
    """Write the results of an environment into its row of tested versions; a row without any suite is left out.

    Args:
        versions: installed versions by package.
        results: number of tests that passed, by suite; None: the suite failed, and what passed before counts no more.
            Suites that were not run keep theirs.
    """
    whole = json.loads(RESULTS.read_text("utf-8"))
    same = [row for row in whole["rows"] if {k: v for k, v in row.items() if k != "suites"} == versions]
    before = same[0]["suites"] if same else {}
    suites = {name: count for name, count in {**before, **results}.items() if count is not None}
    rows = [row for row in whole["rows"] if row not in same]
    if suites:
        rows.append({**versions, "suites": suites})
    rows.sort(
        key=lambda row: [list(map(int, re.findall(r"\d+", str(row[name]))))[:3] for name in ("python", "megatron-core")]
    )
    RESULTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
