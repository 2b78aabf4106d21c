"""Entry point of setuptools; everything is declared in pyproject.toml.

This code leaves bytecode out of source distributions, and makes one check: `mindspeed_cp/ops` and
`mindspeed_cp/ascend_kernels` are relative links to the folders at the top of the repository, and three more lead to
presets and to the quick start in `configs`. A checkout without links (git on Windows, some archive tools) has small
text files in their place, and the package would be installed without its operators and presets. A source distribution
holds real folders and files instead.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

#: Link in the package, its target, and the beginning of a file that it leads to.
LINKS = (
    ("ops", "../ops", "__init__.py", '"""'),
    ("ascend_kernels", "../ascend_kernels", "__init__.py", '"""'),
    ("cluster/presets", "../../configs/clusters", "a2.yaml", "#"),
    ("data/length_bins", "../../configs/lengths", "wikipedia.yaml", "#"),
    ("config/quickstart.yaml", "../../configs/quickstart.yaml", "", "#"),
    ("config/reference.yaml", "../../configs/reference.yaml", "", "#"),
)

for name, target, file, beginning in LINKS:
    link = Path(__file__).resolve().parent / "mindspeed_cp" / name
    if not (link / file).is_file() or not (link / file).read_text("utf-8").startswith(beginning):
        raise SystemExit(
            f"{link} must be a link to {target}, but {f'has no {file}' if file else 'is a file of its own'}; "
            "check the repository out again with `git clone -c core.symlinks=true`"
        )


class SourceDistribution(sdist):
    """Leaves bytecode out, about which a line of MANIFEST.in would warn where there is none."""

    def make_distribution(self) -> None:
        self.filelist.exclude_pattern(r"(^|/)__pycache__/|\.py[cod]$", is_regex=True)
        super().make_distribution()


setup(cmdclass={"sdist": SourceDistribution})
