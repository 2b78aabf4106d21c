"""Lengths from the files of data sets: right for every kind of column, and one line for what is none."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_cp.data.length_files import read_data_file
from mindspeed_cp.errors import ConfigError

NEEDS_ARROW = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="the package pyarrow is missing")
NEEDS_TOKENIZERS = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="the package tokenizers is missing"
)
LENGTHS = [3, 0, 40_000, 7]
TEXTS = ["a b c", "", "d", "a a a a"]


def write_index(path: Path, sequences: Sequence[int], documents: Sequence[int], modes: bytes = b"") -> None:
    """Megatron's IndexedDataset: header, lengths and pointers of sequences, the first sequence of each document."""
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(sequences), len(documents))
    arrays = np.array(sequences, "<i4"), np.zeros(len(sequences), "<i8"), np.array(documents, "<i8")
    path.write_bytes(header + b"".join(array.tobytes() for array in arrays) + modes)


def write_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["?", "a", "b", "c", "d"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("modes", [b"", b"\0\0\0\0"])
def test_documents_of_an_index_are_sums_of_their_sequences(tmp_path: Path, modes: bytes) -> None:
    write_index(tmp_path / "text.idx", [5, 6, 0, 2**31 - 1], [0, 2, 3, 4], modes)
    write_index(tmp_path / "a.b.idx", [7], [0, 1])
    assert read_data_file(tmp_path / "a.b").tolist() == [7]  # a prefix with a point
    for name in ("text.idx", "text.bin", "text"):  # as --data-path has it
        assert read_data_file(tmp_path / name).tolist() == [11, 0, 2**31 - 1]
    with pytest.raises(ConfigError, match="has no columns; leave out --column a"):
        read_data_file(tmp_path / "text.idx", "a")


def test_a_damaged_index_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "text.idx"
    write_index(path, [5, 6, 7], [0, 2, 3])
    whole = path.read_bytes()
    for content in (b"", whole[:20], whole[:-1], whole + b"\0", b"X" + whole[1:], whole[:9] + b"\2" + whole[10:]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is no index of Megatron's data sets, or damaged"):
            read_data_file(path)
    for documents in ([0, 2], [1, 2, 3], [0, 3, 2, 3]):
        write_index(path, [5, 6, 7], documents)
        with pytest.raises(ConfigError, match="is damaged: its documents are no runs of its 3 sequences"):
            read_data_file(path)
    write_index(path, [5, -6, 7], [0, 2, 3])
    with pytest.raises(ConfigError, match="is damaged"):
        read_data_file(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_data_file(tmp_path / "other.idx")


ROWS = [{"n": n, "ids": [1] * min(n, 9), "text": text} for n, text in zip(LENGTHS, TEXTS, strict=True)]


@NEEDS_TOKENIZERS
def test_lines_have_lengths_lists_or_texts(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    assert read_data_file(path, "n").tolist() == LENGTHS
    assert read_data_file(path, "ids").tolist() == [3, 0, 9, 7]
    tokenizer = write_tokenizer(tmp_path)
    for given in (tokenizer, tokenizer / "tokenizer.json"):
        assert read_data_file(path, "text", given).tolist() == [3, 0, 1, 4]
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS * 1000))
    assert read_data_file(path, None, tokenizer).tolist() == [3, 0, 1, 4] * 1000


@pytest.mark.parametrize(
    ("content", "column", "error"),
    [
        ("", None, "has no document with a token"),
        ('{"n": 0}', "n", "has no document with a token"),
        ("{", "n", "line 1 is no JSON: {"),
        ('\n{"n": 1, "m": 2}', None, r"line 2: has several columns; give --column, valid: n \(int\), m \(int\)"),
        ('{"n": 1}\n{"m": 2}', "n", r"line 2: has no column n; give --column, valid: m \(int\)"),
        ("{}", "n", "has no column n; give --column, valid: none"),
        *((f'{{"n": {value}}}', "n", "is no length, no list of tokens and no text") for value in ("-1", "1.5", "true", "null", "{}")),
        ('{"n": "a"}', "n", "holds texts; give --tokenizer with your model's tokenizer.json, or a column of lengths"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, content: str, column: str | None, error: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=error):
        read_data_file(path, column)


@NEEDS_TOKENIZERS
def test_what_is_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match=r"there is no file .*tokenizer\.json"):
        read_data_file(path, None, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is none of Hugging Face's tokenizers"):
        read_data_file(path, None, tmp_path)


def write_tables(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Path]:
    """The rows as Parquet, as the stream that Hugging Face writes, as a file of Arrow, and as a folder of two parts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows)
    paths = {name: folder / name for name in ("a.parquet", "stream.arrow", "file.arrow")}
    pq.write_table(table, paths["a.parquet"])
    for name, writer in (("stream.arrow", pa.ipc.new_stream), ("file.arrow", pa.ipc.new_file)):
        with writer(str(paths[name]), table.schema) as sink:
            sink.write_table(table)
    parts = folder / "data set" / "train"
    parts.mkdir(parents=True)
    pq.write_table(table.slice(0, 1), parts / "0.parquet")
    pq.write_table(table.slice(1), parts / "1.parquet")
    return {**paths, "folder": folder / "data set"}


@NEEDS_ARROW
@NEEDS_TOKENIZERS
def test_columns_of_arrow_have_lengths_lists_or_texts(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    for path in write_tables(tmp_path, [row | {"real": 1.5, "none": None} for row in ROWS]).values():
        assert read_data_file(path, "n").tolist() == LENGTHS
        assert read_data_file(path, "ids").tolist() == [3, 0, 9, 7]
        assert read_data_file(path, "text", tokenizer).tolist() == [3, 0, 1, 4]
        for column, error in (
            (None, r"several columns; give --column, valid: n \(int64\), ids \(list"),
            ("m", "has no column m"),
            ("real", "holds double; valid: whole numbers, lists, texts"),
            ("none", "has rows without a value"),
        ):
            with pytest.raises(ConfigError, match=error):
                read_data_file(path, column)


@NEEDS_ARROW
def test_damaged_tables_and_empty_folders_are_one_line(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 this is none")
        with pytest.raises(ConfigError, match=f"{name}: is damaged, or no such file"):
            read_data_file(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the folder has no file of \.parquet or \.arrow"):
        read_data_file(tmp_path / "empty")


def test_an_index_of_megatrons_builder_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    from mindspeed_cp.megatron import megatron_imports

    with megatron_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.uint16)
    for sentences in ([5], [3, 9], [40_000]):
        for count in sentences:
            builder.add_item(torch.ones(count, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "text.idx"))
    assert read_data_file(tmp_path / "text.bin").tolist() == [5, 12, 40_000]
