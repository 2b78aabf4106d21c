"""Writes requirements/lock/: the pins of requirements/*.txt and of all that they need, with the digests of their files.

    make lock        (or, with uv and packaging at hand:  python requirements/lock.py --torch-index URL)

uv resolves for all supported versions of Python at once. The digests are those of the wheels that `TARGETS` take, and
of the source where one of them has no wheel: a comment says so, as pip checks no digest of the tools that build it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REQUIREMENTS = Path(__file__).resolve().parent
LOCKS = REQUIREMENTS / "lock"
INCLUDED = {"dev.txt": None, "npu.txt": "dev.txt", "triton.txt": "dev.txt", "cuda.txt": "dev.txt"}  # by "-r"
NAMES = (*INCLUDED, "ascend.txt", "site.txt", "tools.txt")
OWN_TORCH = ("cuda.txt", "torch.txt")  # the others have torch from torch.txt
HEADING = "# Written by `make lock` from ../{name}.\n"


@dataclass(frozen=True)
class Target:
    """A Python on a system and a machine, as markers and the tags of wheels name them."""

    python: tuple[int, int]
    system: str
    machine: str

    @cached_property
    def tags(self) -> frozenset[Tag]:
        if self.system == "darwin":
            platforms = list(mac_platforms((14, 0), self.machine))
        else:  # torch 2.13 wants glibc 2.28
            platforms = [f"manylinux_2_{minor}_{self.machine}" for minor in range(28, 4, -1)]
            platforms += [f"manylinux{name}_{self.machine}" for name in ("2014", "2010", "1")] + [
                f"linux_{self.machine}"
            ]
        cpython = cpython_tags(self.python, platforms=platforms)
        return frozenset((*cpython, *compatible_tags(self.python, platforms=platforms)))

    def needs(self, marker: str | None) -> bool:
        version = ".".join(map(str, self.python))
        values = {"python_version": version, "python_full_version": f"{version}.0", "sys_platform": self.system}
        values |= {"platform_machine": self.machine, "platform_system": self.system.capitalize()}
        return marker is None or Marker(marker).evaluate(values)


PYTHONS = ((3, 10), (3, 11), (3, 12))
MACHINES = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
TARGETS = [Target(python, *machine) for python, machine in product(PYTHONS, MACHINES)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch-index", required=True, help="package index that has CPU builds of torch")
    index = parser.parse_args().torch_index
    LOCKS.mkdir(exist_ok=True)
    written: dict[str | None, list[str]] = {None: []}
    for name in NAMES:
        base = INCLUDED.get(name)
        entries = [locked(package) for package in resolved(name)]
        written[name] = [entry for entry in entries if entry not in written[base]]
        write(name, [f"-r {base}\n"] * (base is not None) + written[name])
    try:
        write(
            "torch.txt", [locked(package) for package in resolved("torch.txt", "--no-deps", "--default-index", index)]
        )
    except subprocess.CalledProcessError:
        print(f"lock: {index} cannot be read, so lock/torch.txt stays as it is", file=sys.stderr)
        return 1
    return 0


def write(name: str, lines: list[str]) -> None:
    (LOCKS / name).write_text(HEADING.format(name=name) + "".join(lines), encoding="utf-8")


def resolved(name: str, *options: str) -> list[dict[str, Any]]:
    """The packages of a resolution, as a pylock.toml (PEP 751) has them."""
    with TemporaryDirectory() as folder:
        out, overrides = Path(folder) / "pylock.toml", Path(folder) / "overrides.txt"
        overrides.write_text('torch ; sys_platform == "none"\n', encoding="utf-8")
        if name not in OWN_TORCH:
            options = (*options, "--override", str(overrides), "--no-emit-package", "torch")
        oldest = ".".join(map(str, PYTHONS[0]))
        command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", str(REQUIREMENTS / name), "-q"]
        command += ["--universal", "--python-version", oldest, "--format", "pylock.toml", "-o", str(out)]
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
        return tomllib.loads(out.read_text("utf-8"))["packages"]


def locked(package: dict[str, Any]) -> str:
    """A pin with the digests of all files that a target takes; "" if no target needs the package.

    Raises:
        SystemExit: a target needs it, and there is neither a wheel nor a source.
    """
    name, version, marker = package["name"], package["version"], package.get("marker")
    digests, without = set(), []
    for target in filter(lambda target: target.needs(marker), TARGETS):
        files = [wheel for wheel in package.get("wheels", []) if target.tags & tags(wheel)]
        if not files:
            if "sdist" not in package:
                raise SystemExit(f"lock: {name} {version} has nothing for {target}; a marker can leave it out")
            without.append(f"{target.system} {target.machine}, Python {target.python[0]}.{target.python[1]}")
            files = [package["sdist"]]
        digests |= {file["hashes"]["sha256"] for file in files}
    if not digests:
        return ""
    equal = "===" if name == "torch" and "+" not in version else "=="  # "==2.13.0" would take 2.13.0+cpu as well
    pin = f"{name}{equal}{version}" + (f" ; {marker}" if marker else "")
    comment = f"# no wheel, built from source: {'; '.join(without)}\n" if without else ""
    return comment + " \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(digests))]) + "\n"


def tags(wheel: dict[str, Any]) -> frozenset[Tag]:
    return parse_wheel_filename(unquote(wheel["url"].rsplit("/", 1)[-1]))[3]


if __name__ == "__main__":
    sys.exit(main())
