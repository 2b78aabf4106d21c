"""The memory table of docs/ascend.md is what its command prints."""

from __future__ import annotations

from pathlib import Path

from tests.npu.memory_table import main, rows


def test_the_table_of_the_documentation(capsys) -> None:
    main()
    text = (Path(__file__).resolve().parent.parent.parent / "docs" / "ascend.md").read_text("utf-8")
    assert capsys.readouterr().out.strip() in text, "run: python -m tests.npu.memory_table"


def test_no_mask_of_ours_grows_with_the_context() -> None:
    table = rows()
    counted = {row.name: row.bytes for row in table if row.counted and "document ids" not in row.name}
    assert len(counted) == 3 and all(len(set(sizes.values())) == 1 for sizes in counted.values())
    [by_ids] = [row.bytes for row in table if "document ids" in row.name]
    assert all(
        size <= 1.01 * (tokens / 8) ** 2 for size, tokens in zip(by_ids.values(), (2**15, 2**18, 10**6), strict=True)
    )
