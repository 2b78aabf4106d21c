"""What the documentation says of plans is so, and what it shows runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.config.capabilities import FEATURES
from mindspeed_cp.report.plan.summary import summarize_plan

DOCS = Path(__file__).parent.parent / "docs"
ONE = [32768]
PACKED = [12000, 6000, 4000, 3000, 2000, 1500, 1200, 900, 700, 500, 400, 300, 150, 100, 18]
MIB = 2**20


def bytes_table() -> str:
    """The table of docs/algorithms.md: most bytes of any rank."""
    assert sum(PACKED) == 32768
    names = [(name, {}) for name in ALGORITHMS] + [("direct", {"layout": "balanced"})]
    lines = []
    for name, options in names:
        cells = []
        for lengths in (ONE, PACKED):
            attention = AttentionConfig(heads=32, kv_heads=8, head_dim=128)
            plan = build_plan(Documents(lengths), Topology(2, 4), attention, name, **options)  # type: ignore[arg-type]
            made = summarize_plan(plan)
            sent, back = made.sent_forward.max() / MIB, made.sent_backward.max() / MIB
            buffers = made.buffers.max(0) / MIB
            cells += [f"{sent:.0f} + {back:.0f}", f"{buffers[0]:.0f}, {buffers[1]:.0f}"]
        label = f"{name}, `layout: balanced`" if options else name
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_of_bytes_is_that_of_the_plans() -> None:
    expected = bytes_table()
    text = (DOCS / "algorithms.md").read_text("utf-8")
    assert expected in text, f"the table in docs/algorithms.md should be\n{expected}"
    assert all(f"{n}" in text for n in (",".join(map(str, PACKED)),))


def test_every_algorithm_is_explained_with_its_names_and_options() -> None:
    text = (DOCS / "algorithms.md").read_text("utf-8")
    tool = runpy.run_path(str(DOCS.parent / "tools" / "algorithm_table.py"))
    assert tool["table"]() in text, "the table of algorithms in docs/algorithms.md is stale: run `make docs-tables`"
    assert all(f"**{name}.**" in text for name in ALGORITHMS)
    assert set(FEATURES["algorithm"]) == set(ALGORITHMS)


def test_the_page_on_attention_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / "attention.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/attention.md", "exec"), scope)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_and_files_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (DOCS / link).exists(), link
    for path in re.findall(r"`((?:configs|tests|mindspeed_cp|ops|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (DOCS.parent / path).exists(), path


def test_commands_of_the_documentation_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Those that only plan."""
    from mindspeed_cp.cli.main import run

    found = []
    for page in DOCS.glob("*.md"):
        text = " ".join(re.sub(r" +# .*", "`", page.read_text("utf-8")).split())  # a command may go over two lines
        found += re.findall(r"mindspeed-cp (plan --lengths [^`]*?) *`", text)
    assert len(found) >= 3
    (tmp_path / "lengths.txt").write_text("700\n30\n4100\n")
    for command in found:
        words = [str(tmp_path / word) if word.endswith((".png", ".txt")) else word for word in command.split()]
        assert run(words) == 0, command
        assert capsys.readouterr().out
