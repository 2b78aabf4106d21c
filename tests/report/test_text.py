"""Tables on terminals of any width."""

import pytest

from mindspeed_cp.report.text import Table, print_tables

NAMES = ("ring", "hierarchical", "direct:layout=balanced")
FIGURES = tuple(f"{number},{number}99.{number} MiB" for number in range(10))
WIDE = Table(
    "Wide", ("algorithm", *(f"heading {i}" for i in range(10)), "text"), tuple((n, *FIGURES, "q, k, v") for n in NAMES)
)
STEPS = Table(
    "Steps", ("", "", "attention", "step"), (("step 3", "predicted", "1.25", "12,345.6"), ("", "ratio", "-", "7.1"))
)
TEXTS = Table("Texts", ("", ""), (("documents", "4 documents of 6,830 tokens " * 8), ("ranks", "8")))
LONG_NAMES = Table("Long", ("check", "largest"), (("cuda bf16: causal, window, ALiBi and dropout " * 3, "1.5e-03"),))

HALVES = Table("Halves", ("case", "found"), tuple(("c" * 54, "x" * 54) for _ in range(2)))


def printed(table: Table, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    print_tables([table])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("table", [WIDE, STEPS, TEXTS, LONG_NAMES], ids=lambda table: table.title)
def test_no_word_and_no_figure_is_cut(
    table: Table, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(table, width, monkeypatch, capsys)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for cell in (cell for row in (table.columns, *table.rows) for cell in row):
        words = [cell] if len(cell) <= width // 3 else cell.split()
        assert all(word in text for word in words), cell
    assert "\u2026" not in text


@pytest.mark.parametrize("width", [80, 108, 110, 112, 120])
def test_no_letter_is_lost_in_columns_of_half_the_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(printed(HALVES, width, monkeypatch, capsys)[3:])
    assert (text.count("c"), text.count("x")) == (108, 108)


def test_output_that_is_no_terminal_is_as_wide_as_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_tables([WIDE])
    lines = capsys.readouterr().out.splitlines()
    assert sum(NAMES[1] in line for line in lines) == 1
    assert all(figure in next(line for line in lines if NAMES[1] in line) for figure in FIGURES)


def test_cells_are_printed_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert any(
        "[bold] :smile:" in line
        for line in printed(Table("T", ("", ""), (("a", "[bold] :smile:"),)), 80, monkeypatch, capsys)
    )


def test_numbers_are_aligned_right_and_words_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_tables([Table("t", ("name", "count", "remark"), (("a", "5", "none"), ("b", "1,000", "some of them")))])
    first, second = capsys.readouterr().out.splitlines()[-3:-1]
    assert first.index("5") == second.index("1,000") + 4 and first.index("none") == second.index("some")
