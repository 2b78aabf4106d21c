"""Entry point of setuptools; everything is declared in pyproject.toml.

Kept as code is one check: `mindspeed_cp/ops` and `mindspeed_cp/ascend_kernels` are relative links to the folders at the
top of the repository, and two more in `mindspeed_cp/cost` lead to the presets in `configs`. A checkout without links
(git on Windows, some archive tools) has small text files in their place, and the package would be installed without its
operators and presets. A source distribution holds real folders, as good.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup

#: Link in the package, where it leads, and a file that must then be there.
LINKS = (
    ("ops", "../ops", "__init__.py"),
    ("ascend_kernels", "../ascend_kernels", "__init__.py"),
    ("cost/clusters", "../../configs/clusters", "a2.yaml"),
    ("cost/length_bins", "../../configs/lengths", "wikipedia.yaml"),
)

for name, target, file in LINKS:
    link = Path(__file__).resolve().parent / "mindspeed_cp" / name
    if not (link / file).is_file():
        raise SystemExit(
            f"{link} must be a link to {target}, but has no {file}; "
            "check the repository out again with `git clone -c core.symlinks=true`"
        )

setup()
