"""Which versions of torch, NumPy, Megatron-core and torch-npu are tested, allowed or refused. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_cp.errors import INSTALL, ConfigError

#: Oldest Megatron-core whose checkpoints `mindspeed-cp train` writes.
OLDEST_MEGATRON_OF_TRAIN = (0, 16)
#: Rows of versions that were tested together, written by `make test-versions`.
TESTED_FILE = Path(__file__).parent / "tested_versions.json"


@dataclass(frozen=True)
class Limit:
    """The versions of a package that may be used.

    Attributes:
        package: its name on the package index.
        module: what is imported.
        first: oldest version, as numbers.
        why: what older ones lack.
        needed_for: what runs only with it.
        suites: tests that a row of tested versions must have passed for this package to count.
        gap: first version after `first` that is not supported, and the next one that is; None: there are none.
    """

    package: str
    module: str
    first: tuple[int, ...]
    why: str
    needed_for: str
    suites: tuple[str, ...]
    gap: tuple[tuple[int, ...], tuple[int, ...]] | None = None


_UNTESTED = "no older one was tested"

LIMITS = (
    Limit("python", "", (3, 10), "the syntax of type annotations", "everything", ("decisions",)),
    Limit("numpy", "numpy", (1, 26), _UNTESTED, "everything", ("decisions",)),
    Limit("torch", "torch", (2, 7), _UNTESTED, "attention, training, doctor", ("engine", "ops")),
    Limit(
        "megatron-core",
        "megatron.core",
        (0, 12),
        _UNTESTED,
        "mindspeed_cp.megatron, training",
        ("megatron",),
        gap=((0, 13), (0, 16)),
    ),
    Limit("torch-npu", "torch_npu", (2, 7), _UNTESTED, "NPUs; of torch's own release", ("npu",)),
)


@dataclass(frozen=True)
class Status:
    """What is known of an installed version.

    Attributes:
        package: name.
        version: installed version; None: not installed, or without metadata.
        status: "tested", "allowed", "refused" or "missing".
        reason: one line.
    """

    package: str
    version: str | None
    status: str
    reason: str


def tested_rows(path: Path = TESTED_FILE) -> list[dict[str, Any]]:
    """Return the rows of versions that were tested together: {package: version, ..., "suites": {suite: tests}}."""
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["rows"]
    return rows


def installed_version(limit: Limit) -> str | None:
    """Return the version of a package; of a source tree without metadata, "unknown"; None if it cannot be imported."""
    if limit.package == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(limit.package)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        spec = importlib.util.find_spec(limit.module)
    except ModuleNotFoundError:  # the package above it is missing
        return None
    return None if spec is None else version_in_source(spec.origin) or "unknown"


def version_status(limit: Limit, version: str | None) -> Status:
    """Return whether a version is tested, allowed or refused."""
    if version is None:
        return Status(limit.package, None, "missing", f"needed for {limit.needed_for}")
    release = _numbers(version)
    if release is None:
        return Status(limit.package, version, "allowed", "a source tree whose version is unknown")
    if release < limit.first:
        return Status(limit.package, version, "refused", f"needed is {version_text(limit.first)} or later: {limit.why}")
    if limit.gap is not None and limit.gap[0] <= release < limit.gap[1]:
        versions = f"{version_text(limit.first)}, or {version_text(limit.gap[1])} or later"
        reason = f"needed is {versions}: those between are not tested"
        return Status(limit.package, version, "refused", reason)
    rows = [row for row in tested_rows() if row.get(limit.package) and set(limit.suites) <= set(row["suites"])]
    tested = sorted({str(row[limit.package]) for row in rows}, key=_key)
    short = 2 if limit.package == "python" else 3
    if any(_key(known)[:short] == release[:short] for known in tested):
        return Status(limit.package, version, "tested", "")
    return Status(limit.package, version, "allowed", f"tested: {', '.join(tested) or 'none'}")


def require_megatron_of_train() -> None:
    """Raise ConfigError where torch or Megatron-core is missing, or Megatron-core is too old for `mindspeed-cp train`;
    imports nothing. (The launcher itself needs neither: its ranks would end one by one.)"""
    for package in ("torch", "megatron"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed: {INSTALL[package]}")
    [limit] = [limit for limit in LIMITS if limit.package == "megatron-core"]
    version = installed_version(limit)
    release = None if version is None else _numbers(version)
    if release is not None and release < OLDEST_MEGATRON_OF_TRAIN:
        oldest = version_text(OLDEST_MEGATRON_OF_TRAIN)
        raise ConfigError(
            f"megatron-core is {version}; valid for `mindspeed-cp train`: {oldest} or later, for whose formats its "
            "checkpoints are made; with an older one train by your own script (docs/megatron.md)"
        )


def version_report() -> list[Status]:
    """Return the status of every package of LIMITS, and of torch-npu beside another release of torch."""
    versions = {limit.package: installed_version(limit) for limit in LIMITS}
    report = {limit.package: version_status(limit, versions[limit.package]) for limit in LIMITS}
    torch, npu = versions["torch"], versions["torch-npu"]
    if torch and npu and _key(torch)[:3] != _key(npu)[:3]:
        report["torch-npu"] = Status("torch-npu", npu, "refused", f"torch is {torch}; they must be of one release")
    return [*report.values()]


def version_in_source(origin: str | None) -> str | None:
    """Return the version that megatron/core/package_info.py states, for a source tree without metadata."""
    info = Path(origin or "").with_name("package_info.py")
    if not origin or not info.is_file():
        return None
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text("utf-8"), re.MULTILINE))
    return ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH")) if len(parts) == 3 else None


def version_text(release: tuple[int, ...]) -> str:
    """Return the numbers of a release with points between them."""
    return ".".join(map(str, release))


def _numbers(version: str) -> tuple[int, ...] | None:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else None


def _key(version: str) -> tuple[int, ...]:
    return _numbers(version) or ()
