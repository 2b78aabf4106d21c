"""Stand-ins for the CUDA libraries, so that PyPI's build of torch for x86-64 can be imported without their gigabytes.

    python -m tests.versions.cuda_stand_in TORCH_FOLDER OUT

For every library of NVIDIA that torch's own libraries name, OUT gets a shared object of that name. Its functions are
those that torch asks for, and each of them fails: torch finds no device and runs on the CPU. Nothing of CUDA is
computed, so nothing that runs on these says anything about CUDA. Needs gcc, nm and readelf; OUT goes to LD_LIBRARY_PATH.

Standard library alone: it runs before torch can be imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

#: Names of libraries, and of functions, that are NVIDIA's.
LIBRARY = re.compile(r"lib(cu|nv|nccl)[\w-]*\.so")
FUNCTION = re.compile(r"(cu|nccl|nv|cupti|__cuda)\w*$")
#: What these give back is read as text.
TEXT = re.compile(r"(String|Name)\w*$")
FAILURE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE; an error of the other libraries as well


def needed(library: Path) -> set[str]:
    """Return the NVIDIA libraries that a shared object names."""
    out = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return {name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", out) if LIBRARY.match(name)}


def undefined(library: Path) -> set[tuple[str, str]]:
    """Return the NVIDIA functions that a shared object does not have itself, as (name, version of the symbol)."""
    out = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    symbols = (line.split()[-1].partition("@") for line in out.splitlines() if line.strip())
    return {(name, version.lstrip("@")) for name, _, version in symbols if FUNCTION.match(name)}


def build(torch_folder: Path, out: Path) -> list[str]:
    """Write the stand-ins for a torch (its folder in site-packages) to `out`; return their names."""
    libraries = sorted((torch_folder / "lib").glob("*.so*")) + sorted(torch_folder.glob("_C*.so"))
    names = sorted(set().union(*map(needed, libraries)))
    symbols = set().union(*map(undefined, libraries))
    owner = _owners(names, symbols)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        _compile(name, [symbol for symbol in sorted(symbols) if owner[symbol] == name], out)
    return names


def _owners(names: list[str], symbols: set[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the library of each symbol: the one that its version is named after, else the first one."""
    stems = {name.split(".so")[0]: name for name in names}
    return {
        (name, version): next((full for stem, full in stems.items() if version.startswith(stem + ".so")), names[0])
        for name, version in symbols
    }


def _compile(name: str, symbols: list[tuple[str, str]], out: Path) -> None:
    source, script = out / f"{name}.c", out / f"{name}.map"
    source.write_text(
        "".join(
            f'const char *{symbol}(void) {{ return "stand-in for CUDA"; }}\n'
            if TEXT.search(symbol)
            else f"int {symbol}(void) {{ return {FAILURE}; }}\n"
            for symbol in sorted({symbol for symbol, _ in symbols})
        )
        or "typedef int nothing;\n"
    )
    nodes = defaultdict(list)
    for symbol, version in symbols:
        if version:
            nodes[version].append(symbol)
    script.write_text("".join(f"{node} {{ global: {'; '.join(members)}; }};\n" for node, members in nodes.items()))
    versions = [f"-Wl,--version-script={script}"] if nodes else []
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", *versions]
    subprocess.run([*command, "-o", str(out / name), str(source)], check=True)
    source.unlink()
    script.unlink()


if __name__ == "__main__":
    print("\n".join(build(Path(sys.argv[1]), Path(sys.argv[2]))))
