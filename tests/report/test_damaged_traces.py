"""Damaged files of traced steps: one line that names the file, whatever is wrong in it, and never another error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.run.predicted_vs_measured import (
    compare_with_prediction,
    predicted_vs_measured_dict,
    predicted_vs_measured_tables,
    write_comparison_trace,
)
from mindspeed_cp.report.run.step_traces import trace_file_name, trace_text
from tests.cli.test_report import events, leave, metadata, settings

GONE = object()
VALUES = (GONE, None, "x", -1, 3, 0.5, 1e300, float("nan"), [], [["x"]], {"a": 1}, "\ud800")

ABOUT = ("otherData", "measured")
#: Of it, what nothing is made of.
UNUSED = ("cp_rank", "seconds")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 3 of two ranks."""
    made = tmp_path_factory.mktemp("run")
    for rank in (0, 1):
        path = leave(made, 3, rank)
        parts = [event for event in events(rank) if event.category in ("step", "attention") or event.details]
        path.write_text(trace_text(metadata(3, rank, settings(), documents=[[60, 4]]), parts[:3]))
    return made


@pytest.fixture
def path(run: Path) -> Iterator[Path]:
    """The trace of rank 0, which is put back afterwards."""
    file = run / "trace" / trace_file_name(3, 0)
    text = file.read_text()
    yield file
    file.unlink()
    file.write_text(text)


def report(run: Path) -> None:
    """All that `mindspeed-cp report` makes of a run, but the picture."""
    result = compare_with_prediction(run)
    predicted_vs_measured_tables(result)
    json.dumps(predicted_vs_measured_dict(result), allow_nan=False)
    write_comparison_trace(result, run / "all.json")


def refusal(run: Path) -> str:
    """The line of a run that cannot be reported."""
    with pytest.raises(ConfigError) as caught:
        report(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def places(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All keys and indices in JSON values, of settings one of each section."""
    if keys:
        yield keys
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inside = keys[2:3] == ("settings",) and len(keys) == 4
    for key, inner in list(items)[: 1 if inside else None]:
        yield from places(inner, (*keys, key))


@contextmanager
def changed(whole: Any, keys: tuple[Any, ...], value: Any) -> Iterator[None]:
    """Within the block another value is in a place, or none."""
    holder = whole
    for key in keys[:-1]:
        holder = holder[key]
    kept = list(holder.items()) if isinstance(holder, dict) else list(holder)
    if value is GONE:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = value
    yield
    holder.clear()
    (holder.update if isinstance(holder, dict) else holder.extend)(kept)


def test_whatever_value_is_wrong_nothing_but_one_line_comes_of_it(run: Path, path: Path) -> None:
    whole = json.loads(path.read_text())
    whole["traceEvents"] = [event for event in whole["traceEvents"] if not event["name"].endswith("_sort_index")]
    report(run)
    refused: dict[tuple[Any, ...], int] = {}
    for keys in places(whole):
        for value in VALUES:
            with changed(whole, keys, value):
                path.write_text(json.dumps(whole))
            try:
                report(run)
            except ConfigError as error:
                assert "\n" not in str(error) and str(run) in str(error), (keys, value)
                refused[keys] = refused.get(keys, 0) + 1
    for key in whole["otherData"]["measured"]:
        assert key in UNUSED or refused[(*ABOUT, key)] >= len(VALUES) - 2, key
    number = next(i for i, event in enumerate(whole["traceEvents"]) if event["args"].get("sends"))
    for keys in (("dur",), ("ts",), ("tid",), ("name",), ("args", "bytes"), ("args", "messages")):
        assert refused[("traceEvents", number, *keys)] >= len(VALUES) - 3, keys


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\x00\x01", b"\x89PNG\xff", b"[]", b"[" * 100_000, b'{"otherData": ' + b"9" * 5000 + b"}"),
        *(b'{"otherData": -Infinity}', b'{"otherData": {"measured": {"version": 1}}, "traceEvents": {}}'),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(run: Path, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    line = refusal(run)
    assert line.startswith(f"{path}: not a valid step trace: ") and line.endswith("; remove it, and trace again")


def test_wherever_a_file_ends_too_early_it_is_one_line(run: Path, path: Path) -> None:
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, 97):
        path.write_bytes(whole[:length])
        assert f"{path}: not a valid step trace: all of it: Invalid JSON" in refusal(run)


def test_a_file_that_cannot_be_read_is_one_line(run: Path, path: Path) -> None:
    text = path.read_text()
    path.unlink()
    path.mkdir()
    assert refusal(run) == f"{path}: cannot be read: Is a directory"
    path.rmdir()
    path.write_text(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": 4}, "ranks is 4, not 1 x 2"),
        ({"replicas": 2, "ranks": 4, "replica": 1}, "rank 0 of 4 is not in replica 1 of 2"),
        ({"rank": 1}, "its name has another step or rank"),
        ({"step": 4}, "its name has another step or rank"),
        ({"layers": [[1, 1e6, 64, 0, 0]]}, "list index out of range"),
        ({"layers": [[0, 1e6, 64]]}, "otherData.measured.layers.0.3: Field required"),
        ({"layers": [[0, 1e6, 64, 1e6, 1e5]]}, "LayerCost.qkv_flops + out_flops is 1100000.0"),
        ({"documents": [[60, 4]]}, "plans and micro-batches differ in number"),
        ({"plans": [["rings", {}], ["ring", {}]]}, "must be algorithms and their options"),
        ({"plans": [["ring", {"documents": 1}], ["ring", {}]]}, "must be algorithms and their options"),
        ({"attentions": [{"heads": 4, "size": 3}]}, "AttentionConfig"),
        ({"attentions": [{"heads": 0}]}, "attention.heads is 0; valid: a whole number"),
        ({"documents": [[60, -4]]}, "-4"),
        ({"settings": {"model": {"num_layers": "x"}}}, 'model.num_layers = "x"'),
        ({"settings": {"model": {"layers": 3}}}, "model.layers: unknown key"),
    ],
)
def test_a_step_of_which_nothing_can_be_made_is_one_line(
    run: Path, path: Path, changes: dict[str, Any], said: str
) -> None:
    path.write_text(trace_text(metadata(3, 0, settings()) | changes, events(0)))
    line = refusal(run)
    assert line.startswith(f"{path}: ") and said in line and "trace again" in line


def test_files_of_two_runs_are_not_put_together(run: Path, path: Path) -> None:
    path.write_text(trace_text(metadata(3, 0, settings(), gradient_bytes=1), events(0)))
    other = run / "trace" / trace_file_name(3, 1)
    assert refusal(run).startswith(f"{other}: gradient_bytes differs from what {path} has: they are of two runs")


def test_a_trace_without_the_whole_step_is_refused(run: Path, path: Path) -> None:
    path.write_text(trace_text(metadata(3, 0, settings()), events(0)[1:]))
    assert "no event is of category 'step', the whole step" in refusal(run)
