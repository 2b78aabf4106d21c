"""A comparison as one HTML page: a table to sort and filter, a timeline to zoom, tiles to point at.

The page is one file that needs no network and no library: the template, its styles and scripts stand beside this module
and are put together here with the data.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from pathlib import Path
from string import Template

from mindspeed_cp.report.files import write_file
from mindspeed_cp.report.simulated import Comparison
from mindspeed_cp.report.simulated_data import page_data

HERE = Path(__file__).parent
SCRIPTS = ("simulated_table.js", "simulated_timeline.js", "simulated_documents.js")


def write_page(comparison: Comparison, path: str | Path, switch: str = "--html") -> Path:
    """Write the page.

    Args:
        comparison: what it shows.
        path: HTML file to write.
        switch: what asked for it, for the error.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = page(comparison)
    return write_file(switch, path, lambda aside: aside.write_text(text, encoding="utf-8"))


def page(comparison: Comparison) -> str:
    """The page as text."""
    topology = comparison.problem.topology
    data = json.dumps(page_data(comparison), separators=(",", ":"), allow_nan=False).encode()
    return Template(_read("simulated.html")).substitute(
        title=html.escape(f"{topology.ranks} ranks of {comparison.problem.cluster.name}"),
        style=_read("simulated.css"),
        data=base64.b64encode(gzip.compress(data, 6, mtime=0)).decode(),
        script="\n".join(_read(name) for name in SCRIPTS),
    )


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8").strip()
