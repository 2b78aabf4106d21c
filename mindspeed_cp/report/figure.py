"""New matplotlib figures.  matplotlib is imported when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(caller: str, width: float, height: float, dpi: int) -> Figure:
    """Return an empty white figure, independent of pyplot, which notebooks show as a PNG picture.

    Args:
        caller: what draws, for the error.
        width, height: inches.
        dpi: pixels per inch.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from mindspeed_cp.report.png_figure import PngFigure
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            f"{caller} draws with matplotlib, which is not installed; valid: pip install 'matplotlib>=3.8'; what is "
            "drawn is also in the tables of mindspeed-cp plan and simulate"
        ) from None
    return PngFigure(width, height, dpi)
