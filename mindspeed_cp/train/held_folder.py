"""The folder of a checkpoint: held open, and changed by nobody else.

Digests tell what files held when they were read, and loading reads them again. So what was compared must stay: only
the user who trains may write in the folder and in its files. A descriptor holds the folder, since whoever may write in
the folder above could put another one in its place.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from pathlib import Path
from typing import BinaryIO
from weakref import finalize

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.run_files import error_text

SWITCH = "checkpoint.trust_unsigned"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class HeldFolder:
    """A folder, held open until `close`.

    Args:
        folder: path of the folder; not a link.
        owned: whether to require that nobody else can change the folder.

    Attributes:
        path: leads to this folder in this process, also when another one has taken its name (on Linux; elsewhere it is
            the path of the folder).
        is_owned: False if others can change the folder, or a file that was opened.

    Raises:
        ConfigError: others can change it.
        OSError: it cannot be opened.
    """

    def __init__(self, folder: Path, *, owned: bool = True) -> None:
        self._folder, self._owned = folder, owned
        self.is_owned = True
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self.close = finalize(self, os.close, self._descriptor)
        self._check(os.fstat(self._descriptor), folder)
        self.path = Path(f"/proc/self/fd/{self._descriptor}")
        if sys.platform != "linux" or (not self.path.exists() and not owned):
            self.path = folder
        elif not self.path.exists():
            raise ConfigError(
                f"{folder}: cannot be held open, since /proc is not mounted; mount it, or set {SWITCH} = true if "
                "nobody else can write here"
            )

    def is_at(self, path: Path) -> bool:
        """Return True if a path leads to this folder."""
        return os.path.samestat(os.fstat(self._descriptor), os.stat(path, follow_symlinks=False))

    def open(self, name: str) -> BinaryIO:
        """Open a file of the folder to read it; raises as the class does, also for a link if `owned`."""
        flags = os.O_RDONLY | (os.O_NOFOLLOW if self._owned else 0)
        file = os.fdopen(os.open(self.path / name, flags), "rb", buffering=0)
        self._check(os.fstat(file.fileno()), self._folder / name)
        return file

    def _check(self, status: os.stat_result, path: Path) -> None:
        problem = _change_by_others(status)
        self.is_owned = self.is_owned and problem is None
        if problem is not None and self._owned:
            raise ConfigError(
                f"{path}: others can change it ({problem}), and so run code while it is loaded; make it yours alone "
                f"(chown, chmod -R go-w), or set {SWITCH} = true if you trust all of them"
            )


def check_can_be_owned(folder: Path) -> None:
    """Raise ConfigError if others can change what this process writes in a folder; on some file systems modes say
    nothing, and an access control list can give new files to others."""
    probe = folder / f".probe-{secrets.token_hex(8)}"
    try:
        probe.mkdir(0o755)
        try:
            file = probe / "file"
            file.touch()
            problem = _change_by_others(file.stat()) or _change_by_others(probe.stat())
            file.unlink()
        finally:
            probe.rmdir()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to: {error_text(error)}; give another folder") from None
    if problem is not None:
        raise ConfigError(
            f"{folder}: others can change new files in it ({problem}), and so run code when a checkpoint is loaded; "
            "give an output.folder where modes count and no access control list (getfacl) gives them away, or set "
            f"{SWITCH} = true if you trust all of them"
        )


def keep_files_owned() -> None:
    """Let this process, and those that it starts, write files that others cannot change."""
    os.umask(os.umask(0o077) | _OTHERS_WRITE)


def _change_by_others(status: os.stat_result) -> str | None:
    """Return why others than this user and the system's can change a file."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    return f"its mode is {mode:04o}" if mode & _OTHERS_WRITE else None
