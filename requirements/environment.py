"""Makes or refreshes the virtual environments of `make train` and of the tests.  Standard library.

    python requirements/environment.py .venv --torch-index URL
    python requirements/environment.py .venv-npu --requirements npu.txt --torch-index URL
    python requirements/environment.py .venv-cuda --requirements cuda.txt --torch-index URL
    python requirements/environment.py .venv-ascend --requirements ascend.txt --bare --torch-index URL

Order of installation: torch, then the rest (dev.txt, which includes base.txt; npu.txt adds torch-npu), then this
package, editable; with --bare only the rest. torch comes first, and as its CPU build: on Linux any other way brings
gigabytes of CUDA libraries. What all need is downloaded once: the second takes it from pip's cache. A file that names a
build of torch itself ("torch===", cuda.txt) gets that one, which must have CUDA.

What is installed is named in requirements/lock, written by `make lock`, with the SHA-256 of every file. pip takes no
file of another content, wherever it comes from, and no package that is not named there. No index is put beside another:
it could offer a package of the other under a higher version.

Two makes at once are safe: the second waits for the first, then finds nothing left to do. A run that was stopped
half-way leaves no stamp, so the next one goes on. The stamp holds a digest of all that the environment depends on.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
LOCKS = REQUIREMENTS / "lock"
INPUTS = [LOCKS / "torch.txt", REQUIREMENTS / "environment.py", ROOT / "pyproject.toml", ROOT / "setup.py"]
STAMP = "installed"  # the Makefile knows this name
LOCKED = ("--require-hashes", "--no-deps")
HAS_CUDA = "import sys, torch; sys.exit(torch.version.cuda is None and f'torch {torch.__version__} has no CUDA')"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environment", type=Path, help="folder of the virtual environment")
    parser.add_argument("--torch-index", required=True, help="package index that has CPU builds of torch")
    parser.add_argument("--requirements", default="dev.txt", metavar="FILE", help="in requirements/lock (dev.txt)")
    parser.add_argument("--bare", action="store_true", help="neither torch nor this package")
    arguments = parser.parse_args()
    requirements = LOCKS / arguments.requirements
    if not requirements.is_file():
        parser.error(f"--requirements {arguments.requirements}: not a file of {LOCKS}")
    environment: Path = arguments.environment.resolve()
    environment.mkdir(parents=True, exist_ok=True)
    stamp = environment / STAMP
    wanted = digest(requirements)
    with locked(environment):
        if stamp.is_file() and stamp.read_text() == wanted:
            stamp.touch()
            return 0
        stamp.unlink(missing_ok=True)
        try:
            install(environment, requirements, None if arguments.bare else arguments.torch_index)
        except subprocess.CalledProcessError as error:
            command = " ".join(map(str, error.cmd))
            print(f"environment: `{command}` failed (exit code {error.returncode})", file=sys.stderr)
            return 1
        stamp.write_text(wanted)
    return 0


def digest(requirements: Path) -> str:
    """Of the requirements, the package's declaration, the Python and the place, which an editable install remembers."""
    state = hashlib.sha256(f"{sys.version} {sys.executable} {ROOT}".encode())
    for path in (*INPUTS, *included(requirements)):
        state.update(path.read_bytes())
    return state.hexdigest() + "\n"


def included(requirements: Path) -> list[Path]:
    """A file of requirements and those that it includes by "-r"."""
    names = [line.split()[1] for line in requirements.read_text().splitlines() if line.startswith("-r ")]
    return [requirements, *(path for name in names for path in included(requirements.parent / name))]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock on `folder`; the system lets go of it even if this process is killed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"environment: waiting for another make that is filling {folder}", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def install(environment: Path, requirements: Path, torch_index: str | None) -> None:
    """Everything; without an index of torch neither torch nor this package."""
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"environment: filling {environment} for Python {version} (a few minutes the first time)", flush=True)
    python = environment / "bin" / "python"
    if not usable(python):
        subprocess.run([sys.executable, "-I", "-m", "venv", "--clear", environment], check=True)
    cuda = any(line.startswith("torch===") for line in requirements.read_text().splitlines())
    if torch_index is not None and not cuda:
        install_torch(python, torch_index)
    print(f"environment: installing the pinned packages of requirements/lock/{requirements.name}", flush=True)
    pip(python, *LOCKED, "-r", requirements)
    if torch_index is None:
        return
    if cuda:
        subprocess.run([python, "-I", "-c", HAS_CUDA], check=True)
    print("environment: installing mindspeed-cp, editable", flush=True)
    # The build needs setuptools alone, which is pinned and installed by now; isolation would fetch another one.
    pip(python, "--no-deps", "--no-build-isolation", "-e", ROOT)


def usable(python: Path) -> bool:
    """True if `python` is an interpreter of the same version as this one and has pip."""
    code = "import sys, pip; print(sys.version)"
    try:
        answer = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    except OSError:
        return False
    return answer.returncode == 0 and answer.stdout.rstrip("\n") == sys.version


def install_torch(python: Path, torch_index: str) -> None:
    """From pip's own configuration if that offers the CPU build, else from PyTorch's index of CPU builds alone.

    Where only PyPI's build can be had (the index is out of reach), that one is installed with its CUDA libraries: it
    works on CPU as well.
    """
    print("environment: installing torch, CPU build", flush=True)
    pinned = (*LOCKED, "-r", LOCKS / "torch.txt")
    for sources in ((), ("--index-url", torch_index)):
        try:
            return pip(python, *sources, *pinned, quiet_failure=True)
        except subprocess.CalledProcessError:
            where = sources[-1] if sources else "pip's own configuration"
            print(f"environment: {where} does not give a file of requirements/lock/torch.txt", flush=True)
    print("environment: installing PyPI's build of torch, gigabytes with its CUDA libraries", flush=True)
    pip(python, *LOCKED, "-r", LOCKS / "cuda.txt")


def pip(python: Path, *arguments: str | Path, quiet_failure: bool = False) -> None:
    """Runs `pip install`, which prints nothing but errors."""
    command = [python, "-I", "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check", *arguments]
    own = {name: value for name, value in os.environ.items() if name not in ("PIP_USER", "PIP_TARGET", "PIP_PREFIX")}
    errors = subprocess.DEVNULL if quiet_failure else None
    subprocess.run(command, check=True, cwd=ROOT, env=own, stdin=subprocess.DEVNULL, stderr=errors)


if __name__ == "__main__":
    sys.exit(main())
