"""A folder that is held stays the same, and others than its owner cannot change it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.held_folder import HeldFolder, check_can_be_owned, keep_files_owned


@pytest.fixture
def umask() -> Iterator[None]:
    """Restores this process' mask of modes."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_held_folder_outlives_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("first")
    held = HeldFolder(folder)
    assert held.is_at(folder)
    folder.rename(tmp_path / "aside")
    folder.mkdir()
    (folder / "file").write_text("second")
    assert not held.is_at(folder)
    with held.open("file") as file:
        assert file.read() == b"first"
    assert (held.path / "file").read_text() == "first"
    held.close()
    with pytest.raises(OSError):
        held.open("file")


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "folder" / "link").symlink_to("../file")
    with pytest.raises(OSError):
        HeldFolder(tmp_path / "link")
    with pytest.raises(OSError):
        HeldFolder(tmp_path / "folder").open("link")
    HeldFolder(tmp_path / "folder", owned=False).open("link").close()


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_what_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=rf"folder: others can change it \(its mode is {mode:04o}\).*trust_unsigned"):
        HeldFolder(folder)
    assert not HeldFolder(folder, owned=False).is_owned


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid() == 0:  # what belongs to the system's own user is not another's
        HeldFolder(tmp_path)
        os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigError, match=r"others can change it \(it belongs to user \d+\)"):
        HeldFolder(tmp_path)


def test_without_proc_a_folder_cannot_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: not str(self).startswith("/proc") and exists(self))
    with pytest.raises(ConfigError, match=r"/proc is not mounted"):
        HeldFolder(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    held = HeldFolder(folder, owned=False)
    assert held.path == folder
    folder.rename(tmp_path / "aside")
    assert held.is_at(tmp_path / "aside")


def test_a_place_where_new_files_are_given_to_others_is_told_before_a_run(tmp_path: Path, umask: None) -> None:
    os.umask(0)
    with pytest.raises(ConfigError, match=r"others can change new files in it \(its mode is 0666\).*getfacl"):
        check_can_be_owned(tmp_path)
    keep_files_owned()
    check_can_be_owned(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"cannot be written to: No such file"):
        check_can_be_owned(tmp_path / "gone")
