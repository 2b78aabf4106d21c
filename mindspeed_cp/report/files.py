"""Output files: written beside their place and then moved there, so that nobody reads an unfinished file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mindspeed_cp.errors import ConfigError


def check_output_path(option: str, path: str | Path, suffixes: Sequence[str]) -> Path:
    """Return the path of a file to write.

    Args:
        option: command-line option that names the file, for errors, such as "--png".
        path: file to write.
        suffixes: valid suffixes, in lower case.

    Raises:
        ConfigError: the path has another suffix, or its folder does not exist.
    """
    target = Path(path)
    if target.suffix.lower() not in suffixes:
        valid = " or ".join(suffixes)
        raise ConfigError(f"{option} {path}: the suffix is {target.suffix!r}; valid: a file name with {valid}")
    if not target.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {target.parent}; create it, or give another path")
    return target


def write_atomically(option: str, path: str | Path, write: Callable[[Path], object]) -> Path:
    """Replace a file as :func:`replace_file` does, and return its path.

    Raises:
        ConfigError: the file cannot be written; names the option.
    """
    try:
        replace_file(Path(path), write)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return Path(path)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with the path of an empty file beside `path`, then move that file to `path`.

    The file is new: a link of its name, which somebody may have put there, is removed and not followed.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        write(temporary)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
