"""What is installed: operators and presets inside the package, and nothing under their generic names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("ops", "ascend_kernels")
DATA = {
    "cluster/presets": "configs/clusters",
    "data/length_bins": "configs/lengths",
    "config/quickstart.yaml": "configs/quickstart.yaml",
    "config/reference.yaml": "configs/reference.yaml",
}

#: Links of the package -> what they lead to.
LINKS = {name: f"../{name}" for name in LINKED} | {name: f"../../{target}" for name, target in DATA.items()}

pytestmark = pytest.mark.skipif(
    not (ROOT / "ops").is_dir(), reason="a source distribution holds real folders in place of the links"
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what setuptools reads, links kept as links."""
    copy = tmp_path_factory.mktemp("packaging") / "checkout"
    copy.mkdir()
    for name in ("mindspeed_cp", "configs", *LINKED):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def build(checkout: Path, kind: str) -> Path:
    """The "wheel" or "sdist" of a checkout, made as pip makes it."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return checkout / "dist" / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build(checkout, "wheel")


def sources(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative_and_lead_to_folders_at_the_top(name: str) -> None:
    link = ROOT / "mindspeed_cp" / name
    assert os.readlink(link) == LINKS[name] and link.exists()


def test_a_wheel_holds_the_linked_packages_and_one_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"mindspeed_cp"}
    for name in LINKED:
        inside = {f"mindspeed_cp/{name}/{source}" for source in sources(ROOT / name)}
        assert inside and inside <= set(names)
    assert "mindspeed_cp/py.typed" in names
    for name, target in DATA.items():
        paths = (ROOT / target).iterdir() if (ROOT / target).is_dir() else [None]
        presets = {f"mindspeed_cp/{name}" + (f"/{path.name}" if path else "") for path in paths}
        assert presets and presets == {path for path in names if path.startswith(f"mindspeed_cp/{name}")}


def test_a_wheel_made_from_a_source_distribution_is_the_same(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build(checkout, "sdist")) as archive:
        archive.extractall(tmp_path)
    (unpacked,) = tmp_path.iterdir()
    for name in ("ops", *DATA):
        assert not (unpacked / "mindspeed_cp" / name).is_symlink()
    names = [sorted(zipfile.ZipFile(path).namelist()) for path in (wheel, build(unpacked, "wheel"))]
    assert names[0] == names[1]


@pytest.mark.parametrize(("name", "target"), LINKS.items())
def test_a_checkout_that_lost_its_links_is_refused(name: str, target: str, checkout: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkout, broken, symlinks=True)
    (broken / "mindspeed_cp" / name).unlink()
    (broken / "mindspeed_cp" / name).write_text(target)  # what git writes where links are not allowed
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=broken, capture_output=True, text=True)
    assert done.returncode == 1 and f"must be a link to {target}" in done.stderr and "core.symlinks=true" in done.stderr


def test_the_version_is_written_once_and_named_by_changes_and_citation(wheel: Path) -> None:
    import mindspeed_cp

    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    assert f"\nVersion: {mindspeed_cp.__version__}\n" in zipfile.ZipFile(wheel).read(metadata).decode()
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    (cited,) = re.findall(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert newest == cited == mindspeed_cp.__version__


def test_messages_of_an_installation_name_files_that_it_has(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from mindspeed_cp.config import load_settings; load_settings('s.yaml')"
    (tmp_path / "s.yaml").write_text("train: {lrr: 3}")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    (named,) = re.findall(r"which (\S+) lists", done.stderr)
    assert Path(named) == tmp_path / "mindspeed_cp" / "config" / "reference.yaml" and Path(named).is_file()


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    pages = {path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}
    made = {"api.md", "settings.md", "errors.md"}
    assert pages <= listed and all((ROOT / page).is_file() for page in listed - made)
