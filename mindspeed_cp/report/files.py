"""Files that a report leaves: written beside their place, then moved there, so that nobody reads half of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mindspeed_cp.errors import ConfigError


def check_suffix(switch: str, path: str | Path, suffixes: Sequence[str]) -> Path:
    """The path, if it can be that of a file to write.

    Args:
        switch: what asked for it, for errors, such as "--png".
        path: file to write.
        suffixes: valid ones, in lower case.

    Raises:
        ConfigError: it has another suffix, or its folder is not there.
    """
    target = Path(path)
    if target.suffix.lower() not in suffixes:
        valid = " or ".join(suffixes)
        raise ConfigError(f"{switch} {path}: the suffix is {target.suffix!r}; valid: a file name with {valid}")
    if not target.parent.is_dir():
        raise ConfigError(f"{switch} {path}: there is no folder {target.parent}; make it, or give another place")
    return target


def write_file(switch: str, path: str | Path, write: Callable[[Path], object]) -> Path:
    """Have `write` write a file beside `path`, then put it there.

    Raises:
        ConfigError: it cannot be written; names the switch.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.new")
    try:
        write(aside)
        aside.replace(target)
    except OSError as error:
        raise ConfigError(f"{switch} {path}: cannot be written: {error.strerror or error}") from None
    finally:
        aside.unlink(missing_ok=True)
    return target
