"""Run the tests on the versions of torch, NumPy and Megatron-core that users have; `make test-versions`.

    python -m tools.test_versions                 # all rows of requirements/versions.json
    python -m tools.test_versions --only 0.12.1   # rows that contain this text

Each row gets an environment of its own in .venv-versions. A row whose Python is not on this machine is left out, and
said so. What passed is written to mindspeed_cp/device/tested_versions.json, from which `mindspeed-cp doctor` and
docs/versions.md (`make docs-tables`) say what is tested.

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
#: Tests of each suite, run one after the other.
SUITES = {
    "decisions": ("tests/layout", "tests/plan", "tests/algorithms", "tests/choose", "tests/simulate"),
    "engine": ("tests/engine", "tests/comm"),
    "ops": ("tests/ops",),
    "megatron": ("tests/megatron",),
}
#: Packages of requirements/dev.txt that a row names itself.
OWN = ("numpy", "megatron-core", "torch", "torch-npu")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="rows that contain this text")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES), help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="test files that run at once (2)")
    arguments = parser.parse_args()
    rows = [row for row in json.loads(ROWS.read_text("utf-8"))["rows"] if arguments.only in json.dumps(row)]
    failed = 0
    for row in rows:
        title = ", ".join(f"{name} {version}" for name, version in row.items() if name != "also")
        python = find_python(row["python"])
        if python is None:
            print(f"{title}: left out: no Python {row['python']} on this machine", flush=True)
            continue
        print(f"{title}:", flush=True)
        environment, variables = make_environment(row, python)
        passed: dict[str, int] = {}
        for suite in arguments.suites:
            count, error = run_suite(SUITES[suite], environment, variables, arguments.jobs)
            print(f"  {suite}: {error or f'{count} passed'}", flush=True)
            failed += error is not None
            if error is None:
                passed[suite] = count
        record({**installed(environment, row), "suites": passed})
    return 1 if failed else 0


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
        named = [f"{name}=={row[name]}" for name in ("numpy", "megatron-core", "torch-npu") if name in row]
        pip(interpreter, *requirements(), *named, *row.get("also", ()))
        stamp.write_text(wanted)
    torch = next(folder.glob("lib/python*/site-packages/torch"))
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
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


def run_suite(folders: tuple[str, ...], python: Path, variables: dict[str, str], jobs: int) -> tuple[int, str | None]:
    """Run tests; return how many passed, and one line if not all did."""
    spread = ["-n", str(jobs), "--dist", "loadfile"]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *spread, *folders]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    summary = next((line for line in reversed(done.stdout.splitlines()) if re.search(r"\d+ (passed|failed)", line)), "")
    count = re.search(r"(\d+) passed", summary)
    if done.returncode == 0 and count:
        return int(count[1]), None
    log = ROOT / ".venv-versions" / "failed.log"
    log.write_text(done.stdout + done.stderr)
    return 0, f"FAILED: {summary.strip('= ') or 'no summary'}; see {log.relative_to(ROOT)}"


def installed(python: Path, row: dict[str, Any]) -> dict[str, str]:
    """Return the versions of an environment by its own word."""
    code = (
        "import importlib.metadata as m, platform, sys; print(platform.python_version(), *map(m.version, sys.argv[1:]))"
    )
    names = [name for name in OWN if name in row]
    out = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(("python", *names), out, strict=True))


def record(result: dict[str, Any]) -> None:
    """Write a row of results in place of the one of the same versions; suites that were not run keep theirs."""
    whole = json.loads(RESULTS.read_text("utf-8"))
    # Installed beside the others, torch-npu is tested by a suite of its own alone.
    left_out = {"suites"} if "npu" in result["suites"] else {"suites", "torch-npu"}
    same = {name: value for name, value in result.items() if name not in left_out}
    before = [row for row in whole["rows"] if {k: v for k, v in row.items() if k != "suites"} == same]
    suites = {**(before[0]["suites"] if before else {}), **result["suites"]}
    rows = [row for row in whole["rows"] if row not in before]
    if suites:
        rows.append({**same, "suites": suites})
    rows.sort(
        key=lambda row: [list(map(int, re.findall(r"\d+", str(row[name]))))[:3] for name in ("python", "megatron-core")]
    )
    RESULTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
