"""Entry point of setuptools; everything is declared in pyproject.toml.

Kept as code is one check: `mindspeed_cp/ops` and `mindspeed_cp/ascend_kernels` are relative links to the folders at the
top of the repository. A checkout without links (git on Windows, some archive tools) has small text files in their
place, and the package would be installed without its operators. A source distribution holds real folders, as good.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup

for name in ("ops", "ascend_kernels"):
    link = Path(__file__).resolve().parent / "mindspeed_cp" / name
    if not (link / "__init__.py").is_file():
        raise SystemExit(
            f"{link} must be a link to ../{name}, but leads to no package; "
            "check the repository out again with `git clone -c core.symlinks=true`"
        )

setup()
