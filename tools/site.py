"""Build the documentation as a site without links to other servers: `make site` writes build/site.

Pages keep their places in the repository, so that the same links lead on in a checkout and in the site; what they link
is copied beside them. The API is read from docstrings, the settings from configs/reference.yaml, and what is refused
from mindspeed_cp/schema/unsupported.yaml.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import griffe
import yaml

ROOT = Path(__file__).parent.parent
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"

#: Modules whose public names are the API.
MODULES = (
    "mindspeed_cp",
    "mindspeed_cp.integrations.huggingface",
    "mindspeed_cp.integrations.verl",
    "mindspeed_cp.integrations.ms_swift",
    "mindspeed_cp.megatron",
)


class Roles(griffe.Extension):
    """Roles of Sphinx and its mark of a code block, as Markdown writes them."""

    def on_object(self, *, obj: griffe.Object, **others: object) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def copy_with_links(page: Path) -> None:
    """Copy a page and all that its links lead to, to the same places below PAGES."""
    target = PAGES / page.relative_to(ROOT)
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if page.suffix != ".md":
        shutil.copy(page, target)
        return
    text = page.read_text("utf-8")
    target.write_text(text, "utf-8")
    for link in re.findall(r"\]\(([^)#: ]+)", text):
        linked = (page.parent / link).resolve()
        if linked.is_file() and linked.is_relative_to(ROOT):
            copy_with_links(linked)


def api_page() -> str:
    """Return the page of all public names."""
    package, text = griffe.load("mindspeed_cp", search_paths=[str(ROOT)], allow_inspection=False), "# API\n"
    for name in MODULES:
        module = package if name == "mindspeed_cp" else package[name.partition(".")[2]]
        text += f"\n## {name}\n\n::: {name}\n    options:\n      members: []\n      show_root_heading: false\n\n"
        text += "".join(f"::: {name}.{member}\n\n" for member in sorted(map(str, module.exports or ())))
    return text


def settings_page() -> str:
    """Return the page of all settings."""
    reference = (ROOT / "configs" / "reference.yaml").read_text("utf-8")
    return f"# Settings\n\nAll settings with their defaults, `configs/reference.yaml`.\n\n```yaml\n{reference}```\n"


def errors_page() -> str:
    """Return the page of the errors, and of the values that are refused."""
    errors = griffe.load("mindspeed_cp.errors", search_paths=[str(ROOT)], allow_inspection=False)
    names = sorted(name for name in errors.classes if name.endswith("Error"))
    text = "# Errors\n\n" + "".join(f"::: mindspeed_cp.errors.{name}\n\n" for name in names) + "## What is refused\n"
    rows = yaml.safe_load((ROOT / "mindspeed_cp" / "schema" / "unsupported.yaml").read_text("utf-8"))
    for section, refused in rows.items():
        text += f"\n### {section}\n\n| setting | valid | why, and what to use |\n|---|---|---|\n"
        for row in refused:
            names = row["setting"] if isinstance(row["setting"], list) else [row["setting"]]
            why = "; ".join(str(row[key]) for key in ("reason", "alternative") if row.get(key))
            cells = (", ".join(f"`{name}`" for name in names), f"`{row.get('valid', False)}`", why)
            text += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return text


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]:
        copy_with_links(page)
    for name, text in {"api": api_page(), "settings": settings_page(), "errors": errors_page()}.items():
        (PAGES / f"{name}.md").write_text(text, "utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(SITE)]
    command += ["--config-file", str(ROOT / "mkdocs.yml")]
    return subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
