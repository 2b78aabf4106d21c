"""Document lengths from the files in which data sets are kept.

=====================================  ==================================================
`PREFIX.idx` or `PREFIX.bin`           Megatron's index: the tokens of each document
`.parquet`, `.arrow`, folder of these  a column of a Hugging Face data set
`.jsonl`                               a key of every line
=====================================  ==================================================

A column holds lengths, lists of tokens, which are counted, or texts, which a tokenizer cuts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.errors import ConfigError, shortened
from mindspeed_cp.layout.documents import MAX_TOKENS

#: Most documents that are read.
MAX_DOCUMENTS = 2**26

_ARROW = (".parquet", ".arrow")
_INDEX_MAGIC, _INDEX_HEADER = b"MMIDIDX\x00\x00", 34  # bytes: magic, version, type, sequences, documents
_TEXTS_AT_ONCE = 1024

#: Counts the tokens of texts.
Tokenizer = Callable[[list[str]], list[int]]


def is_data_file(path: Path) -> bool:
    """Return True if the name is that of a file that this module reads."""
    return path.suffix in (".idx", ".bin", ".jsonl", *_ARROW)


def read_data_file(path: Path, column: str | None = None, tokenizer: Path | None = None) -> np.ndarray:
    """Return the length of each document, int64 [documents], each at least 0.

    Args:
        path: a file or folder of the table above.
        column: column, or key of a line; None: the only one. Megatron's index has none.
        tokenizer: `tokenizer.json` of Hugging Face's tokenizers, or its folder, for columns of texts. No token is added
            at the ends of a document.

    Raises:
        ConfigError: the file cannot be read, is damaged, or has no such column; one line.
    """
    try:
        files = [path] if path.is_file() else _files_of(path)
        modified = tuple(file.stat().st_mtime_ns for file in files)
        return _read(path, tuple(files), modified, column, tokenizer)
    except OSError as error:
        raise ConfigError(f"lengths {path}: cannot be read: {error.strerror or error}") from None


def _files_of(path: Path) -> list[Path]:
    """Return the files of a folder, or those that a prefix of Megatron's stands for."""
    if not path.is_dir():
        is_pair = path.suffix in (".idx", ".bin")
        return [path.with_suffix(".idx") if is_pair else path.with_name(f"{path.name}.idx")]
    files = sorted(file for file in path.rglob("*") if file.suffix in _ARROW)
    if not files:
        raise ConfigError(f"lengths {path}: the folder has no file of {' or '.join(_ARROW)}; give one that has")
    return files


@lru_cache(maxsize=4)
def _read(
    path: Path, files: tuple[Path, ...], modified: tuple[int, ...], column: str | None, tokenizer: Path | None
) -> np.ndarray:
    """Read the files; cached by their times of modification."""
    first = files[0]
    if first.suffix in (".idx", ".bin"):
        if column is not None:
            raise ConfigError(f"lengths {path}: is Megatron's index, which has no columns; leave out --column {column}")
        lengths = _megatron_lengths(first.with_suffix(".idx"))
    else:
        rows = _lines(first, column) if first.suffix == ".jsonl" else _arrow_columns(path, files, column)
        lengths = _counted(path, rows, tokenizer)
    if not lengths.any():
        raise ConfigError(f"lengths {path}: has no document with a token")
    lengths.setflags(write=False)
    return lengths


def _megatron_lengths(path: Path) -> np.ndarray:
    """Return the tokens of each document of an index: Megatron's files have documents of one or more sequences."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_INDEX_HEADER)
        sequences, borders = map(int, np.frombuffer(header[18:], "<u8")) if len(header) == _INDEX_HEADER else (0, 0)
        version = header[len(_INDEX_MAGIC) : 17]
        bytes_of_arrays = 12 * sequences + 8 * borders
        if (
            not header.startswith(_INDEX_MAGIC)
            or int.from_bytes(version, "little") != 1
            or not 0 < borders <= sequences + 1
            or size - _INDEX_HEADER not in (bytes_of_arrays, bytes_of_arrays + sequences)  # the latter with modes
        ):
            raise ConfigError(f"lengths {path}: is no index of Megatron's data sets, or damaged")
        _check_number(path, borders)
        lengths = np.frombuffer(file.read(4 * sequences), "<i4")
        file.seek(8 * sequences, 1)  # pointers
        border = np.frombuffer(file.read(8 * borders), "<i8")
    if border[0] or border[-1] != sequences or (np.diff(border) < 0).any() or (lengths < 0).any():
        raise ConfigError(f"lengths {path}: is damaged: its documents are no runs of its {sequences:,} sequences")
    return np.diff(np.append(0, np.cumsum(lengths, dtype=np.int64))[border])


def _lines(path: Path, column: str | None) -> Iterator[list[Any]]:
    """Yield the values of a key of all lines, some lines at a time."""
    values: list[Any] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"lengths {path}: line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                text = shortened(line.decode(errors="replace").strip(), 40)
                raise ConfigError(f"{where} is no JSON: {text}") from None
            if isinstance(row, dict):
                row = row[_chosen(where, {key: type(value).__name__ for key, value in row.items()}, column)]
            if not (isinstance(row, (str, list)) or (type(row) is int and 0 <= row < MAX_TOKENS)):
                raise ConfigError(f"{where}: {shortened(repr(row), 40)} is no length, no list of tokens and no text")
            values.append(row)
            if len(values) == _TEXTS_AT_ONCE:
                yield values
                values = []
    yield values


def _arrow_columns(path: Path, files: Iterable[Path], column: str | None) -> Iterator[np.ndarray | list[Any]]:
    """Yield a column in pieces: lengths as an array, texts as a list."""
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise ConfigError(
            f"lengths {path}: needs the package pyarrow; install it, or write the lengths to a text file, one on a line"
        ) from None
    for file in files:
        try:
            if file.suffix == ".parquet":
                source = ParquetFile(file)
                schema = source.schema_arrow
                batches = source.iter_batches(columns=None if column is None else [column])
            else:  # Hugging Face writes streams, pyarrow itself also files
                try:
                    batches = source = pa.ipc.open_stream(pa.memory_map(str(file)))
                except pa.ArrowInvalid:
                    source = pa.ipc.open_file(pa.memory_map(str(file)))
                    batches = map(source.get_batch, range(source.num_record_batches))
                schema = source.schema
            name = _chosen(f"lengths {file}", dict(zip(schema.names, map(str, schema.types), strict=True)), column)
            for batch in batches:
                values = batch.column(batch.schema.get_field_index(name))
                if values.null_count:
                    raise ConfigError(f"lengths {file}: column {name} has rows without a value")
                if pa.types.is_integer(values.type):
                    yield values.to_numpy(zero_copy_only=False)
                elif pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
                    yield pc.list_value_length(values).to_numpy(zero_copy_only=False)
                elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
                    yield values.to_pylist()
                else:
                    raise ConfigError(
                        f"lengths {file}: column {name} holds {values.type}; valid: whole numbers, lists, texts"
                    )
        except pa.ArrowException as error:
            text = shortened(" ".join(str(error).split()), 100)
            raise ConfigError(f"lengths {file}: is damaged, or no such file ({text})") from None


def _chosen(where: str, kinds: dict[str, str], column: str | None) -> str:
    """Return the name of the column that is read."""
    if column is None and len(kinds) == 1:
        return next(iter(kinds))
    if column in kinds:
        return column
    listed = ", ".join(f"{name} ({kind})" for name, kind in list(kinds.items())[:20])
    wanted = "several columns" if column is None else f"no column {column}"
    raise ConfigError(f"{where}: has {wanted}; give --column, valid: {listed or 'none'}")


def _counted(path: Path, pieces: Iterable[np.ndarray | list[Any]], tokenizer: Path | None) -> np.ndarray:
    """Return the lengths of all pieces, of texts by the tokenizer."""
    count: Tokenizer | None = None
    lengths, total = [np.zeros(0, np.int64)], 0
    for piece in pieces:
        total += len(piece)
        _check_number(path, total)
        values = list(piece) if isinstance(piece, list) else piece
        texts = [i for i, value in enumerate(values) if isinstance(value, str)] if isinstance(values, list) else []
        if texts:
            count = count or _tokenizer(path, tokenizer)
            for i, tokens in zip(texts, count([values[i] for i in texts]), strict=True):
                values[i] = tokens
        if isinstance(values, list):
            values = np.array([len(value) if isinstance(value, list) else value for value in values], np.int64)
        lengths.append(values.astype(np.int64))
    joined = np.concatenate(lengths)
    if len(joined) and (joined.min() < 0 or joined.max() > MAX_TOKENS):
        raise ConfigError(f"lengths {path}: has a length below 0 or above {MAX_TOKENS:,}")
    return joined


def _check_number(path: Path, documents: int) -> None:
    if documents > MAX_DOCUMENTS:
        raise ConfigError(f"lengths {path}: has more than {MAX_DOCUMENTS:,} documents; give a part of it")


def _tokenizer(path: Path, tokenizer: Path | None) -> Tokenizer:
    """Load a tokenizer that counts tokens."""
    if tokenizer is None:
        raise ConfigError(
            f"lengths {path}: holds texts; give --tokenizer with your model's tokenizer.json, or a column of lengths"
        )
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        raise ConfigError(f"--tokenizer {tokenizer}: there is no file {file}")
    try:
        from tokenizers import Tokenizer as HuggingFaceTokenizer
    except ModuleNotFoundError:
        raise ConfigError(f"--tokenizer {tokenizer}: needs the package tokenizers; install it") from None
    try:
        loaded = HuggingFaceTokenizer.from_file(str(file))
    except Exception as error:  # the library raises this class itself
        raise ConfigError(f"--tokenizer {file}: is none of Hugging Face's tokenizers ({error})") from None
    return lambda texts: [len(row.ids) for row in loaded.encode_batch(texts, add_special_tokens=False)]
