"""Output files, written beside their place and then moved there, so that nobody reads an unfinished file; and figures.

matplotlib is imported when a figure is made.
"""

from __future__ import annotations

import colorsys
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_cp.errors import ConfigError, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def new_figure(width: float, height: float, dpi: int, **options: Any) -> Figure:
    """Return an empty white figure that belongs to no pyplot window.

    Args:
        width, height: inches.
        dpi: pixels per inch.
        options: further arguments of matplotlib's Figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "the picture needs matplotlib, which is not installed; valid: pip install 'matplotlib>=3.8'; the tables of "
            "mindspeed-cp plan and simulate have the same figures"
        ) from None
    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def write_png(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a PNG file, and return its path.

    Raises:
        ConfigError: the file has another suffix, or cannot be written.
    """
    target = check_output_path("--png", path, (".png",))
    return write_atomically("--png", target, lambda new: figure.savefig(new, format="png"))


def drawn_text(text: str, limit: int = 300) -> str:
    """Return a text as matplotlib draws it letter by letter: a `$` begins no formula, and half characters are escaped.

    Args:
        text: words that may come from outside, such as the name of a folder.
        limit: characters, of which the middle is left out beyond that.
    """
    return shortened(text, limit).encode("utf-8", "backslashreplace").decode().replace("$", r"\$")


def rank_colours(ranks: int) -> list[tuple[float, float, float]]:
    """Return a colour for each rank; neighbours differ, none is grey."""
    few = ["1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd", "8c564b", "e377c2", "bcbd22", "17becf"]
    if ranks <= len(few):
        return [(int(c[:2], 16) / 255, int(c[2:4], 16) / 255, int(c[4:], 16) / 255) for c in few[:ranks]]
    return [
        colorsys.hsv_to_rgb(rank / ranks, (0.55, 0.9)[rank % 2], (0.9, 0.7, 0.8)[rank % 3]) for rank in range(ranks)
    ]
