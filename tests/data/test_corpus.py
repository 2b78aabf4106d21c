"""Corpora: found, measured, read, and every bad input told in one line."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp.data.corpus import EOD, NOT_STDLIB, VOCAB_SIZE, FileCorpus, open_corpus
from mindspeed_cp.errors import ConfigError
from tests.data.corpora import law


def contents(corpus: FileCorpus) -> list[bytes]:
    return [corpus.tokens(i)[:-1].astype(np.uint8).tobytes() for i in range(len(corpus.lengths))]


def refusal(source: str | Path) -> str:
    with pytest.raises(ConfigError) as error:
        open_corpus(source)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_stdlib_is_every_py_file_of_the_standard_library_as_bytes() -> None:
    corpus, root = open_corpus("stdlib"), Path(sysconfig.get_path("stdlib"))
    assert len(corpus.lengths) > 500 and corpus.lengths.sum() > 5_000_000
    paths = {path for path in root.rglob("*.py") if path.is_file() and not NOT_STDLIB & {*path.parts}}
    assert {root / "json" / "decoder.py", root / "os.py"} <= paths and len(corpus.lengths) == len(paths)
    assert sorted(corpus.lengths.tolist()) == sorted(path.stat().st_size + 1 for path in paths)


def test_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.TXT"
    path.write_bytes(b"if\n\xff\x00")
    assert contents(open_corpus(path)) == [b"if\n\xff\x00"]


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=12).filter(any),
    ascii_only=st.booleans(),
)
@settings(law, max_examples=50)
def test_a_jsonl_file_has_one_document_per_line(
    texts: list[str], ascii_only: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "lines.jsonl"
    path.write_text("\n".join(json.dumps({"id": 1, "text": text}, ensure_ascii=ascii_only) for text in texts), "utf-8")
    corpus = open_corpus(path)
    assert contents(corpus) == [text.encode() for text in texts]
    assert corpus.lengths.tolist() == [len(text.encode()) + 1 for text in texts]


def test_blank_lines_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": ""}\n\n')
    assert contents(open_corpus(path)) == [b"a", b""]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "cut', "is no JSON"),
        (b"{'text': 'quotes'}", "is no JSON"),
        (b'{"text": "\xff"}', "is no JSON"),
        (b'{"body": "x"}', "has the keys ['body']"),
        (b'{"text": 3}', '"text" is 3, which is no text'),
        (b'{"text": null, "id": 4}', '"text" is null, which is no text'),
        (b'["text"]', "is a JSON list"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
        (b"[" * 100_000, "is no JSON"),
    ],
)
def test_the_error_of_a_broken_line_has_file_and_line(line: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    message = refusal(path)
    assert message.startswith(f"corpus {path}:3: ") and says in message and '"text"' in message


@given(text=st.binary(max_size=12), a=st.integers(0, 30), b=st.integers(0, 30))
def test_a_part_is_a_slice_of_the_whole(text: bytes, a: int, b: int) -> None:
    corpus = FileCorpus([b"other", text])
    whole = corpus.tokens(1)
    assert whole.tolist() == [*text, EOD]
    start, stop = sorted((a % (len(whole) + 1), b % (len(whole) + 1)))
    assert corpus.tokens(1, start, stop).tolist() == whole[start:stop].tolist()


def test_every_byte_and_eod_have_their_own_token_below_the_vocabulary_size() -> None:
    assert sorted(FileCorpus([bytes(range(256))]).tokens(0).tolist()) == list(range(VOCAB_SIZE))


def test_digest_covers_every_byte_and_every_border() -> None:
    texts = [b"a" * 40_000, b"bc", b"d", b""]
    digest = FileCorpus(texts).digest
    assert digest == FileCorpus([*texts]).digest
    for other in ([b"a" * 39_999 + b"b", *texts[1:]], [texts[0], b"b", b"cd", b""], [*texts[:2], b"", b"d"]):
        assert FileCorpus(other).digest != digest


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.txt", "no such regular file"),
        ("pipe.txt", "no such regular file"),  # which would hang
        ("x.parquet", "suffix '.parquet' is not read"),
        (" ", "suffix '' is not read"),
        ("huge.txt", "has more than 2,147,483,648 bytes, and each rank holds it in memory"),
        ("closed.txt", "cannot be read (Permission denied)"),
        ("empty.txt", "none of its 1 documents has text; nothing can be learned"),
        ("empty.jsonl", "none of its 0 documents has text; nothing can be learned"),
    ],
)
def test_source_that_cannot_be_used_is_one_line(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for other in ("x.parquet", "empty.txt", "empty.jsonl", "closed.txt"):
        (tmp_path / other).touch()
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(2**31 + 1)  # takes no room on the disk

    def read_unless_closed(path: Path) -> bytes:
        """The superuser, who may run these tests, may read every file."""
        if path.name == "closed.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_unless_closed)
    message = refusal(tmp_path / name)
    assert says in message and str(tmp_path) in message
    assert "none of its" in message or message.endswith("valid: 'stdlib', a .txt file, or a .jsonl file")
