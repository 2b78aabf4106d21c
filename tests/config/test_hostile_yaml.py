"""YAML that means harm: bombs, half characters, endless texts; and what an error shows of a value."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings, load_settings
from mindspeed_cp.errors import MESSAGE_LIMIT, ConfigError, shortened
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.schema.messages import format_value
from mindspeed_cp.schema.yaml_file import MAX_FILE_BYTES, apply_overrides, parse_settings


def bomb(levels: int, open_: str, item: str, close: str) -> str:
    rows = [f"a0: &a0 {open_}{item.format(0, 'x')}{close}"]
    for level in range(1, levels):
        rows.append(
            f"a{level}: &a{level} {open_}{', '.join(item.format(i, f'*a{level - 1}') for i in range(9))}{close}"
        )
    return "\n".join(rows)


@pytest.mark.parametrize("item", ["{1}", "k{0}: {1}"])
def test_aliases_cannot_stand_for_billions_of_values(item: str) -> None:
    text = bomb(30, *("[", item, "]") if item == "{1}" else ("{", item, "}"))
    with pytest.raises(
        ConfigError, match=r"f:\d+:\d+: not valid YAML: more than 30 aliases \(\*name\); write the values"
    ):
        parse_settings(text, "f")


def test_some_aliases_are_taken() -> None:
    assert parse_settings("a: &x [1, 2]\nb: *x\nc: {<<: {d: *x}}", "f").data["c"] == {"d": [1, 2]}


@pytest.mark.parametrize(
    "text",
    [
        '{train: {lr: "\\ud800"}}', '{"\\ud800": 1}', "{a: &x [*x]}", "a: !!bool x", "a: !!int ''", "a: !!timestamp x", "a: 2026-13-45",
        "a: " + "[" * 100_000, "9" * 5000 + ": 1", "a: 1" + "9" * 5000,
    ],
)  # fmt: skip
def test_odd_yaml_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**parse_settings(text, "f").data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= MESSAGE_LIMIT


def test_a_file_is_read_to_its_limit_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"/dev/zero: is larger than any settings file, {MAX_FILE_BYTES:,} bytes"):
        load_settings("/dev/zero")
    for name in ("a\0b", str(tmp_path / "loop")):
        Path(tmp_path / "loop").unlink(missing_ok=True)
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(ConfigError, match="cannot be read: "):
            load_settings(name)


@pytest.mark.parametrize("values", [{"\ud800": 1}, {"data": {"corpus": "\ud800"}}, {"train": {"compare": ["\ud800"]}}])
def test_half_characters_are_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"\ud800|is no Unicode text"):
        Settings(**values)


def test_of_a_value_only_what_is_shown_is_written() -> None:
    shared: list[object] = ["x"]
    for _ in range(60):
        shared = [shared] * 9  # 9**60 items
    assert len(format_value(shared)) == 80
    assert len(format_value([{1, 2}, shared])) == 80
    deep: list[object] = []
    for _ in range(10 * sys.getrecursionlimit()):
        deep = [deep]
    assert len(format_value(deep)) == 80


def test_messages_keep_their_beginning_and_their_end() -> None:
    assert shortened("abc", 3) == "abc" and shortened("x" * 99 + "end", 20) == "xxxxxxxxxxxx...xxend"
    message = str(ConfigError(f"a = {'x' * 10_000}: must be {'y, ' * 5000} or z"))
    assert message.startswith("a = xxx") and message.endswith("or z") and len(message) == MESSAGE_LIMIT


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0o10", 8), ("0x10", 16), ("+5", 5), ("-5", -5), ("0", 0), ("1e3", 1000.0), (".5", 0.5), ("true", True), ("~", None),
        ("1:30", "1:30"), ("1_000", "1_000"), ("0b11", "0b11"), ("yes", "yes"), ("off", "off"), ("2026-01-01", "2026-01-01"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    (read,) = parse_settings(f"a: {text}", "f").data.values()
    assert read == value and type(read) is type(value)
    assert apply_overrides(parse_settings("", "f"), [f"a.b={text}"]).data == {"a": {"b": value}}


@pytest.mark.parametrize("text", ["010", "-08", "00010", "0x" + "f" * 9000, "9" * 5000, "0o" + "7" * 9000])
def test_a_number_of_two_readings_or_of_any_length_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f:2:4: .*(has a leading 0: write -?\d+|more than 40 digits)"):
        parse_settings(f"b: 1\na: {text}", "f")
    with pytest.raises(ConfigError, match=r"^--set "):
        apply_overrides(parse_settings("", "f"), [f"train.train_iters={text}"])


def test_an_integer_that_python_does_not_write_is_named_by_its_bits() -> None:
    huge = 16**9000
    for section in ({"train_iters": huge}, {"lr": huge}, {"lr": [huge]}):
        with pytest.raises(ConfigError, match="an integer of 36,001 bits"):
            Settings(**{"train": section})
    with pytest.raises(ConfigError, match=r"attention\.window is .*an integer"):
        AttentionConfig(4, window=(-huge, 0))
