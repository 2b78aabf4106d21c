"""Show that the tests catch seeded faults: apply each patch of tests/mutants to a copy of the tree and run tests there.

    python tools/mutants.py                                  # all patches
    python tools/mutants.py dk_dv_swapped ring_drops_last_hop --jobs 2
    python tools/mutants.py --list                           # names and what each fault is
    python tools/mutants.py --control                        # the named tests must pass without a fault

A patch is a unified diff against the root of the repository, behind lines that start with `#`: what is wrong and why it
matters; `# tests:`, the paths that should catch it, the most likely first; and `# environment: npu` or `triton` for
faults that only the tests of `make test-npu` or `make test-triton` can catch. A fault is caught if a test fails, a
module with tests cannot be imported, or a test reaches the time limit. The exit status is 1 if a fault survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "mutants"
TEST_LIMIT = 600  # seconds for one test: a fault may make ranks wait for ever

#: A plugin of pytest: a failing example of hypothesis is a verdict, and need not be made smaller.
NO_SHRINKING = """\
from hypothesis import Phase, settings
settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
settings.load_profile("mutants")
"""

#: environment -> (its folder, variables, arguments of pytest), as in the Makefile.
ENVIRONMENTS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "main": ("", {}, ()),
    "npu": (
        ".venv-npu",
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HOST_CANN_BUILD": str(ROOT / ".venv-npu" / "host_cann")},
        ("--timeout-method=thread",),
    ),
    "triton": (".venv-triton", {"TRITON_INTERPRET": "1"}, ()),
}


@dataclass(frozen=True)
class Mutant:
    """A fault: a patch and the tests that should catch it."""

    patch: Path
    why: str
    tests: tuple[str, ...]
    environment: str

    @property
    def name(self) -> str:
        return self.patch.stem


@dataclass(frozen=True)
class Verdict:
    """What caught the fault, None if it survived, how long the tests ran, and why they could not."""

    mutant: Mutant
    caught_by: str | None
    seconds: float
    problem: str = ""

    @property
    def text(self) -> str:
        """One line of the table."""
        return f"caught by {self.caught_by}" if self.caught_by else self.problem or "SURVIVED"


def read_mutant(patch: Path) -> Mutant:
    """Read the header of a patch.

    Raises:
        ValueError: the header lacks its first line or the tests, or names an unknown environment.
    """
    header = [line[1:].strip() for line in patch.read_text("utf-8").splitlines() if line.startswith("#")]
    keys = dict(line.split(": ", 1) for line in header[1:] if ": " in line)
    environment = keys.get("environment", "main")
    if not header or not header[0] or not keys.get("tests") or environment not in ENVIRONMENTS:
        raise ValueError(f"{patch}: its first lines must be `# what is wrong` and `# tests: PATHS`")
    return Mutant(patch, header[0], tuple(keys["tests"].split()), environment)


def all_mutants() -> list[Mutant]:
    return [read_mutant(patch) for patch in sorted(FOLDER.glob("*.patch"))]


def copy_tree(target: Path) -> None:
    """Copy the tracked files as they are in the working tree, links included, into a repository of its own."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    subprocess.run("git init -q && git add -A", shell=True, cwd=target, check=True, stderr=subprocess.DEVNULL)


def run_tests(tree: Path, paths: Sequence[str], environment: str) -> str | None:
    """Return the first test that fails in a tree, None if all pass.

    Raises:
        RuntimeError: pytest itself fails, or there are no tests.
    """
    folder, variables, arguments = ENVIRONMENTS[environment]
    python = str(ROOT / folder / "bin" / "python") if folder else sys.executable
    command = [python, "-m", "pytest", "-x", "-q", "--tb=no", f"--timeout={TEST_LIMIT}"]
    command += ["-p", "no:cacheprovider", "-p", "no_shrinking"]
    (tree.parent / "no_shrinking.py").write_text(NO_SHRINKING)
    variables = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    variables["PYTHONPATH"] = f"{tree}{os.pathsep}{tree.parent}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    ran = subprocess.run(
        [*command, *arguments, *paths], cwd=tree, env=kept | variables, capture_output=True, text=True, errors="replace"
    )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    if ran.returncode == 0:
        return None
    if failed:
        return failed[1]
    timed_out = re.search(
        r"^\s*File \"\S*?(tests/\S*test_\w+\.py)\", line \d+, in (test_\w+)", ran.stderr, re.MULTILINE
    )
    if "Timeout" in ran.stderr and timed_out:
        return f"{timed_out[1]}::{timed_out[2]} (time limit)"
    raise RuntimeError(f"pytest {' '.join(paths)} ended with {ran.returncode}:\n{(ran.stdout + ran.stderr)[-2000:]}")


def judge(mutant: Mutant, whole: bool) -> Verdict:
    """Run the tests of a fault in a copy of the tree, and the whole default suite after them with `whole`."""
    began = time.monotonic()
    problem, caught_by = "", None
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        copy_tree(tree)
        subprocess.run(["git", "apply", str(mutant.patch)], cwd=tree, check=True)
        try:
            for path in mutant.tests:
                caught_by = caught_by or run_tests(tree, [path], mutant.environment)
            if whole and caught_by is None:  # in a tree with a fault its patch does not apply
                caught_by = run_tests(tree, ["tests", "--ignore=tests/test_mutants.py"], "main")
        except RuntimeError as error:
            problem = f"NOT TESTED: {error}"
    return Verdict(mutant, caught_by, time.monotonic() - began, problem)


def control(mutants: Sequence[Mutant]) -> int:
    """Run the tests of all faults without a fault; return the number of paths that fail."""
    wanted = sorted({(mutant.environment, path) for mutant in mutants for path in mutant.tests})
    failures = 0
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        copy_tree(tree)
        for environment, path in wanted:
            failed = run_tests(tree, [path], environment)
            failures += failed is not None
            print(f"{path}: {'passes' if failed is None else f'{failed} FAILED'}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="patches of tests/mutants; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="how many patches at once")
    parser.add_argument("--whole", action="store_true", help="run all tests where the named ones catch nothing")
    parser.add_argument("--list", action="store_true", help="print names and faults, and run nothing")
    parser.add_argument("--control", action="store_true", help="run the named tests on the tree without a fault")
    given = parser.parse_args()
    known = {mutant.name: mutant for mutant in all_mutants()}
    names = [name.removesuffix(".patch").rpartition("/")[2] for name in given.names] or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no patch {', '.join(unknown)} in {FOLDER}; --list names them")
    mutants = [known[name] for name in names]
    width = max(map(len, names), default=0)
    if given.list:
        for mutant in mutants:
            print(f"{mutant.name:<{width}}  {mutant.why}")
        return 0
    if given.control:
        return int(control(mutants) > 0)
    survivors = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for verdict in pool.map(lambda mutant: judge(mutant, given.whole), mutants):
            survivors += verdict.caught_by is None
            print(f"{verdict.mutant.name:<{width}}  {verdict.seconds:6.0f} s  {verdict.text}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} faults are caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
