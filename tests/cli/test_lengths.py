"""`mindspeed-cp lengths`: its figures are those of the file and of `simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_cp.cli.main import run
from tests.data.test_length_files import write_index

SMALL = ("--context", "4096", "--batches", "2", "--heads", "16", "--head-dim", "64")


def test_shares_and_gains_are_those_of_the_file_and_of_simulate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [300] * 30 + [0] + [1000] * 8 + [9000]
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, lengths)))
    assert run(["lengths", str(path), *SMALL, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["documents"], values["tokens"], values["longest"]) == (39, 26_000, 9000)
    bins = {row["last"]: (row["documents"], row["tokens"], row["attention"]) for row in values["bins"]}
    assert list(bins) == [256, 512, 1024, 2048, 4096] and bins[256] == bins[2048] == (0, 0, 0)
    cut = np.minimum([n for n in lengths if n], 4096)  # longer ones are cut
    pairs = cut * (cut + 1) / 2
    for last, chosen in ((512, cut == 300), (1024, cut == 1000), (4096, cut == 4096)):
        expected = chosen.mean(), cut[chosen].sum() / cut.sum(), pairs[chosen].sum() / pairs.sum()
        assert bins[last] == pytest.approx(expected)
    assert [row["ranks"] for row in values["ranks"]] == [2, 4, 8, 16]
    same = ("--tokens-per-rank", "512", "--batches", "2", "--heads", "16", "--kv-heads", "8", "--head-dim", "64")
    assert run(["simulate", "--lengths", str(path), "--cp", "8", *same, "--json"]) == 0
    algorithms = json.loads(capsys.readouterr().out)["algorithms"]
    simulated = {row["name"]: row["seconds"] for row in algorithms}
    seconds = {row["name"]: row["batch_seconds"] for row in algorithms}
    for name in ("ring", "ulysses", "hybrid"):
        ratio = values["ranks"][2]["times_as_fast_as"][name]
        assert ratio == pytest.approx(simulated[name] / simulated["hierarchical"])
        least, most = values["ranks"][2]["least_and_most_of_a_row"][name]
        rows = np.divide(seconds[name], seconds["hierarchical"])
        assert (least, most) == pytest.approx((rows.min(), rows.max())) and least < most


def test_tables_and_picture_of_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_index(tmp_path / "text_document.idx", [300, 5000, 41, 900] * 9, list(range(37)))
    picture = tmp_path / "lengths.png"
    assert run(["lengths", str(tmp_path / "text_document"), *SMALL, "--png", str(picture)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "36; 9 longer than the context of 4,096, which are cut" in text and "257 - 512 25.0 %" in text
    assert (
        "On 16 ranks a row takes" in text
        and "in 2 rows) as fast as" in text
        and "of ring, ulysses, hybrid (modelled)" in text
    )
    assert Image.open(picture).size == (1395, 1085)


def test_a_distribution_is_drawn_and_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lengths", "wikipedia", *SMALL]) == 0
    assert "65,536 drawn" in capsys.readouterr().out
    for arguments, error in (
        (["nothing.txt"], "'nothing.txt': no such set or file"),
        (["wikipedia", "--column", "a"], "has no columns; leave out --column and --tokenizer"),
        (["wikipedia", "--png", "a.svg"], "the suffix is '.svg'"),
        (["wikipedia", "--cluster", "b2"], "b2"),
    ):
        assert run(["lengths", *arguments]) == 2
        printed = capsys.readouterr().err
        assert error in printed and printed.count("\n") == 1


def test_a_file_too_long_for_a_batch_has_to_be_named_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("70000\n" * 16)
    command = ["simulate", "--lengths", str(path), "--cp", "2", "--algorithms", "ring"]
    assert run(command) == 2
    error = capsys.readouterr().err
    assert "has 1,120,000 tokens in 16 documents: a batch, or a data set? Give --one-batch, or --tokens-per" in error
    assert run([*command, "--one-batch"]) == 0
    assert run([*command, "--batches", "1"]) == 0
    assert run(["simulate", "--lengths", "70000," * 15 + "70000", *command[3:]]) == 0  # numbers are a batch


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_data_set_is_a_batch_or_is_drawn_from_as_an_option_says(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_index(tmp_path / "text_document.idx", [300, 5000, 41, 900], list(range(5)))
    given = [command, "--lengths", str(tmp_path / "text_document"), "--cp", "2", "--json"]
    given += ["--algorithms", "ring"] if command == "simulate" else []
    assert run(given) == 2
    assert "6,241 tokens in 4 documents: a batch, or a data set?" in capsys.readouterr().err
    tokens = {}
    for options in (("--one-batch",), ("--tokens-per-rank", "1000"), ("--tokens-per-rank", "1000", "--seed", "1")):
        assert run([*given, *options]) == 0
        values = json.loads(capsys.readouterr().out)
        tokens[options] = (values if command == "plan" else values["batches"][0])["tokens"]
    assert list(tokens.values()) == [6241, 2000, 2000]
    for lengths, options in ((given[2], ("--seed", "3")), ("wikipedia", ())):
        assert run([*given[:2], lengths, "--cp", "2", "--one-batch", *options]) == 2
        assert "--one-batch" in capsys.readouterr().err
