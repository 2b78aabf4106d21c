"""Builds the stand-in libraries for the torch_npu that is installed.

    python -m tests.host_cann.build FOLDER

torch_npu is not imported. What it needs is read out of its binaries:

* names of the CANN runtime (acl..., rt..., Msprof...) and of HCCL that its libraries leave undefined (nm);
* names of the runtime that it looks up later, by dlsym: texts in libtorch_npu.so;
* libraries that it wants to be loaded (readelf) and that neither torch nor the system has.

The C sources here make libascendcl.so, opapi*.cpp make libopapi.so, hccl*.cpp make libhccl.so; all are compiled against the C
headers in the wheel, so that a signature that is not torch_npu's is a compiler error. A name that is needed but that no source
defines becomes a function which writes itself down (host_cann_missing in host_cann.h) and then, in the runtime, does nothing, in
HCCL, refuses.

The folder holds libraries.txt, the libraries in the order in which to load them, and `built`, a digest of the sources and of
the wheel's version: with both unchanged there is nothing to do. Two builds at once are safe.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARIES = "libraries.txt"
STAMP = "built"
TOOLS = {"gcc": "gcc", "g++": "g++", "nm": "binutils", "readelf": "binutils"}
WARNINGS = ["-Wall", "-Wextra"]
C = ["gcc", "-std=c17", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-pthread", *WARNINGS]
CPP = ["g++", "-std=c++17", "-O2", "-g", "-fPIC", "-pthread", *WARNINGS]

RUNTIME_NAME = re.compile(r"(acl[A-Z]|acl(rt|mdl|op|prof|sys)[A-Z]|Msprof|rt[A-Z])\w*")
# Of the acl names, those that belong to libopapi, where a missing one is found out by torch_npu itself.
OPAPI_NAME = re.compile(
    r"aclnn\w*|acl(Create|Destroy)(Tensor|TensorList|IntArray|BoolArray|FloatArray|Scalar|ScalarList|AclOpExecutor)"
    r"|aclGetViewShape|aclRfft1D\w*|aclStft\w*"
)
REPORT = re.compile(r"Msprof|aclAppLog|aclprof")
LOOKED_UP = re.compile(rb"\x00(acl(?:rt|mdl|op|prof|sys)?[A-Z][A-Za-z0-9]{3,60})(?=\x00)")
OF_THE_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp)\.so|ld-linux|libpython|linux-vdso")


class BuildError(Exception):
    """What is missing on this machine, or what the compiler said."""


def build(folder: Path) -> list[Path]:
    """Brings the libraries in `folder` up to date and returns them in the order in which to load them."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        wanted, stamp = digest(), folder / STAMP
        if not (stamp.is_file() and stamp.read_text() == wanted):
            stamp.unlink(missing_ok=True)
            _compile(folder)
            stamp.write_text(wanted)
    return [folder / name for name in (folder / LIBRARIES).read_text().split()]


def digest() -> str:
    """Of the sources, this file, the compilers and the wheel."""
    state = hashlib.sha256()
    for path in sorted([*HERE.glob("*.c"), *HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__)]):
        state.update(path.name.encode() + path.read_bytes())
    wheel = _package("torch_npu")
    state.update(f"{wheel} {importlib.metadata.version('torch-npu')} {importlib.metadata.version('torch')}".encode())
    return state.hexdigest() + "\n"


def _compile(folder: Path) -> None:
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise BuildError(
                f"{tool} is not on PATH; it is needed to build the stand-in (Debian and Ubuntu: apt install {package})"
            )
    wheel = _package("torch_npu")
    needed, wanted = _needs(wheel)
    include = [
        f"-I{path}" for path in (HERE, wheel / "include", wheel / "include/acl", wheel / "include/third_party/hccl/inc")
    ]

    objects = _objects(folder, C, include, sorted(HERE.glob("*.c")))
    missing = {name for name in needed if RUNTIME_NAME.fullmatch(name) and not OPAPI_NAME.fullmatch(name)} - _defined(
        objects
    )
    stubs = _write(folder / "missing_acl.c", _stubs(missing, 207000))  # ACL_ERROR_RT_FEATURE_NOT_SUPPORT
    objects += _objects(folder, C, include, [stubs])
    _link(folder, "libascendcl.so", objects)

    forwarding = sorted((wanted | {"libruntime.so"}) - {"libascendcl.so", "libhccl.so"})
    for name in forwarding:  # the runtime's other libraries: their names are all in libascendcl
        _link(folder, name, [], "-Wl,--no-as-needed", "-lascendcl")

    opapi = _objects(folder, CPP, include, sorted(HERE.glob("opapi*.cpp")))
    _link(folder, "libopapi.so", opapi, "-lascendcl")
    hccl = _objects(folder, CPP, include, sorted(HERE.glob("hccl*.cpp")))
    missing = {name for name in needed if name.startswith("Hccl")} - _defined(hccl)
    hccl += _objects(folder, C, include, [_write(folder / "missing_hccl.c", _stubs(missing, 5))])  # HCCL_E_NOT_SUPPORT
    _link(folder, "libhccl.so", hccl, "-lascendcl")
    _link(folder, "libhcomm.so", [], "-Wl,--no-as-needed", "-lhccl")  # where torch_npu looks up HcclGroupStart, -End
    libraries = ["libascendcl.so", *forwarding, "libopapi.so", "libhccl.so", "libhcomm.so"]
    _write(folder / LIBRARIES, "\n".join(libraries) + "\n")


def _needs(wheel: Path) -> tuple[set[str], set[str]]:
    """Functions and libraries that torch_npu needs and does not bring."""
    binaries = [
        *wheel.glob("_C*.so"),
        *(wheel / "lib" / f"lib{name}.so" for name in ("torch_npu", "tensorpipe", "npu_profiler")),
    ]
    functions, libraries = set(), set()
    for binary in filter(Path.is_file, binaries):
        undefined = (
            line.split()[-1].split("@")[0] for line in _run("nm", "-D", "--undefined-only", binary).splitlines()
        )
        functions.update(name for name in undefined if RUNTIME_NAME.fullmatch(name) or name.startswith("Hccl"))
        libraries.update(re.findall(r"NEEDED.*\[(.+)\]", _run("readelf", "-d", binary)))
    functions.update(name.decode() for name in LOOKED_UP.findall((wheel / "lib" / "libtorch_npu.so").read_bytes()))
    present = {path.name for folder in (wheel / "lib", _package("torch") / "lib") for path in folder.iterdir()}
    return functions, {name for name in libraries if name not in present and not OF_THE_SYSTEM.match(name)}


def _stubs(names: set[str], result: int) -> str:
    """C functions that write themselves down and return `result`, or 0 if they only report."""
    results = {name: 0 if REPORT.match(name) else result for name in sorted(names)}
    lines = [
        f'int {name}(void) {{ host_cann_note_missing("{name}"); return {value}; }}' for name, value in results.items()
    ]
    return "\n".join(['#include "host_cann.h"', *lines]) + "\n"


def _objects(folder: Path, compiler: list[str], include: list[str], sources: list[Path]) -> list[Path]:
    objects = [folder / f"{source.name}.o" for source in sources]
    for source, target in zip(sources, objects, strict=True):
        extra = ["-Wno-builtin-declaration-mismatch"] if source.parent == folder else []
        _run(*compiler, *extra, *include, "-c", source, "-o", target)
    return objects


def _defined(objects: list[Path]) -> set[str]:
    return {line.split()[-1] for path in objects for line in _run("nm", "--defined-only", "-g", path).splitlines()}


def _link(folder: Path, name: str, objects: list[Path], *extra: str) -> None:
    command = ["g++", "-shared", "-pthread", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", f"-L{folder}"]
    _run(*command, *objects, *extra, "-o", folder / name)


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(map(str, command))}\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)  # warnings
    return done.stdout


def _package(name: str) -> Path:
    """Folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            f"{name} is not installed for {sys.executable}; requirements/npu.txt names the version that is wanted"
        )
    return Path(spec.submodule_search_locations[0])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.host_cann.build FOLDER")
    try:
        print(*build(Path(sys.argv[1])), sep="\n")
    except BuildError as error:
        sys.exit(f"tests.host_cann.build: {error}")
