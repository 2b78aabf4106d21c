"""Write everything in the documentation that is computed; run by `make docs-tables`.

tests/test_docs.py compares the pages with what this writes. The tables of benchmarks/results, and the rows
of speed that README.md takes from them, take minutes and are made by the commands beside them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS, Algorithm, AlgorithmOption
from mindspeed_cp.algorithms.registry import with_reduce_dtype
from mindspeed_cp.device.select import min_cann
from mindspeed_cp.device.versions import LIMITS, tested_rows, version_text
from mindspeed_cp.report.plan import PlanSummary
from tools import convert_table, megatron_arguments, mindspeed_table, reliability
from tools.capabilities import capabilities_md
from tools.reference import reference_yaml

ROOT = Path(__file__).parent.parent
OPTIONS_HEAD = "| algorithm | Megatron, MindSpeed | options (defaults) | use it for |\n|---|---|---|---|\n"
BYTES_HEAD = (
    "| | (a) sent | ... in bf16 | (a) buffers | (b) sent | ... in bf16 | (b) buffers |\n|---|---|---|---|---|---|---|\n"
)

#: Lengths of the documents of the two batches of the table of bytes.
BATCHES = (
    [32768],
    [12000, 6000, 4000, 3000, 2000, 1500, 1200, 900, 700, 500, 400, 300, 150, 100, 18],
)
MIB = 2**20


def algorithms_page(page: str) -> str:
    """Return docs/algorithms.md with the tables of options and of bytes."""
    common = {
        name for name in ALGORITHMS["ring"].options if all(name in other.options for other in ALGORITHMS.values())
    }
    rows = [_options_row(algorithm, common) for algorithm in ALGORITHMS.values()]
    rows.append(_row(["all of them", "", _options(ALGORITHMS["ring"].options, common), ""]))
    page = _with_rows(page, OPTIONS_HEAD, "".join(rows))
    return _with_rows(page, BYTES_HEAD, bytes_rows())


def bytes_rows() -> str:
    """Return the rows of the table of bytes: the most that any rank sends and holds, by plans."""
    attention = AttentionConfig(heads=32, kv_heads=8, head_dim=128)
    cases: list[tuple[str, str, dict[str, object]]] = [(name, name, {}) for name in ALGORITHMS]
    rows = ""
    for label, name, options in [*cases, ("direct, `layout: balanced`", "direct", {"layout": "balanced"})]:
        cells = [label]
        for lengths in BATCHES:
            plan = build_plan(Documents(lengths), Topology(2, 4), attention, name, **options)
            summary, in_bf16 = PlanSummary(plan), PlanSummary(with_reduce_dtype(plan, "bfloat16"))
            buffers = summary.buffers.max(0) / MIB
            cells += [_sent(summary), _sent(in_bf16), f"{buffers[0]:.0f}, {buffers[1]:.0f}"]
        rows += _row(cells)
    return rows


def _sent(summary: PlanSummary) -> str:
    """Return what the busiest rank sends, forward + backward, in MiB."""
    return f"{summary.sent_forward.max() / MIB:.0f} + {summary.sent_backward.max() / MIB:.0f}"


def readme_page(page: str, comma: str) -> str:
    """Return README.md or its translation with a row for each algorithm and its other names.

    The third cell, and the second of an algorithm without other names, keep their text; an algorithm without a row gets
    the first line of its builder's docstring.
    """
    head, rows = re.findall(r"^<!-- make docs-tables -->\n(\|.*\n\|.*\n)((?:\|.*\n)*)", page, re.MULTILINE)[0]
    texts = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", rows, re.MULTILINE))
    new_rows = ""
    for algorithm in ALGORITHMS.values():
        old_names, _, text = texts.get(algorithm.name, f"|{algorithm.summary.rstrip('.')}").partition("|")
        names = comma.join(f"`{alias}`" for alias in algorithm.aliases)
        new_rows += _row([f"`{algorithm.name}`", names or old_names.strip(), text.strip()])
    return page.replace(head + rows, head + new_rows)


def versions_page(page: str) -> str:
    """Return docs/versions.md with the tables of tested versions and of limits."""
    before, mark, after = page.partition("<!-- make docs-tables -->\n")
    _, heading, rest = after.partition("\n## ")
    assert mark and heading
    packages = ("python", "torch", "torch-npu", "numpy", "megatron-core")
    tables = "| Python | torch | torch-npu | NumPy | Megatron-core | tests passed |\n|---|---|---|---|---|---|\n"
    for row in tested_rows():
        tables += _row([str(row.get(name) or "-") for name in packages] + [f"{sum(row['suites'].values()):,}"])
    tables += "\n| package | oldest | refused below, because | needed for |\n|---|---|---|---|\n"
    for limit in LIMITS:
        gap = "" if limit.gap is None else "; not from {} on until {}".format(*map(version_text, limit.gap))
        tables += _row([limit.package, f"{version_text(limit.first)}{gap}", limit.why, limit.needed_for])
    tables += "\n| torch-npu | oldest CANN |\n|---|---|\n"
    for releases in ("2.7.1 and 2.8.0", "2.9.0 and later"):
        tables += _row([releases, min_cann(releases.split(" ")[0])])
    return f"{before}{mark}{tables}{heading}{rest}"


#: File -> the function that returns its new text from its present one.
PAGES: dict[str, Callable[[str], str]] = {
    "docs/versions.md": versions_page,
    "README.md": lambda page: readme_page(page, ", "),
    "README.zh.md": lambda page: readme_page(page, "、"),
    "configs/reference.yaml": lambda _: reference_yaml(),
    "docs/algorithms.md": algorithms_page,
    "docs/convert.md": lambda page: _with_rows(
        _with_rows(
            _with_rows(page, convert_table.FLAGS_HEAD, convert_table.flag_rows()),
            convert_table.REFUSED_HEAD,
            convert_table.refused_rows(),
        ),
        convert_table.ADDED_HEAD,
        convert_table.added_rows(),
    ),
    "docs/capabilities.md": lambda _: capabilities_md(),
    "docs/megatron_arguments.md": lambda _: megatron_arguments.page(),
    "docs/mindspeed.md": lambda page: _with_rows(
        _with_rows(page, mindspeed_table.REPLACED_HEAD, mindspeed_table.replaced_rows()),
        mindspeed_table.REFUSED_HEAD,
        mindspeed_table.refused_rows(),
    ),
    "docs/reliability.md": lambda page: _with_rows(page, reliability.HEAD, reliability.rows()),
}


def _with_rows(page: str, head: str, rows: str) -> str:
    """Return the page with other rows in the table that has this head."""
    start = page.index(head)
    return page[:start] + head + rows + page[page.index("\n\n", start) + 1 :]


def _row(cells: list[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|\n"


def _options_row(algorithm: Algorithm, common: set[str]) -> str:
    names = ", ".join(f"`{alias}`" for alias in algorithm.aliases)
    own = _options(algorithm.options, set(algorithm.options) - common)
    return _row([f"`{algorithm.name}`", names, own, algorithm.use_for])


def _options(options: Mapping[str, AlgorithmOption], names: set[str]) -> str:
    return ", ".join(f"`{name}` ({_default(option)})" for name, option in options.items() if name in names)


def _default(option: AlgorithmOption) -> str:
    if option.from_model:
        return "the model's"
    if option.default is None:
        return re.split("default: ", option.description, flags=re.IGNORECASE)[-1].rstrip(".")
    return str(option.default).lower() if isinstance(option.default, bool) else str(option.default)


def main() -> None:
    """Write all pages."""
    for name, update in PAGES.items():
        path = ROOT / name
        path.write_text(update(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
