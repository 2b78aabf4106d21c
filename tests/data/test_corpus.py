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

from mindspeed_cp.data.corpus import EOD, FileCorpus, VOCAB_SIZE, open_corpus
from mindspeed_cp.data.corpus import NOT_STDLIB
from mindspeed_cp.errors import ConfigError
from tests.data.corpora import law


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    return path


def contents(corpus: FileCorpus) -> list[bytes]:
    return [corpus.tokens(i)[:-1].astype(np.uint8).tobytes() for i in range(len(corpus.lengths))]


def raise_permission_error(path: Path, mode: str = "r") -> None:
    """The superuser, who may run these tests, may read every file."""
    raise PermissionError(13, "Permission denied", str(path))


def refusal(source: str | Path) -> str:
    with pytest.raises(ConfigError) as error:
        open_corpus(source)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- the standard library ---------------------------------------------------------------------------------------------


def test_stdlib_is_every_py_file_of_the_standard_library_as_bytes() -> None:
    corpus, root = open_corpus("stdlib"), Path(sysconfig.get_path("stdlib"))
    assert len(corpus.lengths) > 500 and corpus.lengths.sum() > 5_000_000
    paths = {path for path in root.rglob("*.py") if path.is_file() and not NOT_STDLIB & {*path.parts}}
    assert {root / "json" / "decoder.py", root / "os.py"} <= paths and len(corpus.lengths) == len(paths)
    assert sorted(corpus.lengths.tolist()) == sorted(path.stat().st_size + 1 for path in paths)


# --- text files -------------------------------------------------------------------------------------------------------


@given(names=st.sets(st.text("abcXYZ012", min_size=1, max_size=4), min_size=1, max_size=8), data=st.data())
@settings(law, max_examples=25)
def test_a_folder_is_its_files_sorted_by_path_whatever_they_hold(
    names: set[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("corpus")
    expected = {}
    for name in names:
        inside = data.draw(st.sampled_from(["", "b/", "b/c/"])) + name + ".txt"
        expected[inside] = data.draw(st.binary(max_size=40))
        (root / inside).parent.mkdir(parents=True, exist_ok=True)
        (root / inside).write_bytes(expected[inside])
    corpus = open_corpus(root)
    assert contents(corpus) == [expected[inside] for inside in sorted(expected)]
    assert corpus.lengths.tolist() == [len(expected[inside]) + 1 for inside in sorted(expected)]


def test_hidden_and_other_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a.txt", ".hidden.txt", "b.md", "c.TXT", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert contents(open_corpus(tmp_path)) == [b"a.txt", b"c.TXT"]
    assert contents(open_corpus(tmp_path / "a.txt")) == [b"a.txt"]


def test_links_are_followed_and_a_folder_that_holds_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.txt").write_text("x")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    assert contents(open_corpus(tmp_path / "data")) == [b"x"]


# --- JSON lines -------------------------------------------------------------------------------------------------------


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=12),
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
    assert message.startswith(f"{path}:3: ") and says in message and '"text"' in message


# --- parts of a document ----------------------------------------------------------------------------------------------


@given(text=st.text("aé\n", max_size=12), a=st.integers(0, 30), b=st.integers(0, 30))
@settings(law, max_examples=100)
def test_a_part_is_a_slice_of_the_whole(text: str, a: int, b: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("corpus")
    (root / "t.txt").write_bytes(text.encode())
    write_lines(root / "u.jsonl", ["other", text])
    corpus = open_corpus(root)
    for document in (0, 2):
        whole = corpus.tokens(document)
        start, stop = sorted((a % (len(whole) + 1), b % (len(whole) + 1)))
        assert corpus.tokens(document, start, stop).tolist() == whole[start:stop].tolist()


# --- bad input --------------------------------------------------------------------------------------------------------


def test_the_error_of_a_missing_source_has_its_path_and_what_is_valid(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message and "no such file or folder" in message and "'stdlib'" in message
    assert "no such file or folder" in refusal(" ")


def test_the_error_of_an_empty_corpus_has_its_folder(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("x")
    message = refusal(tmp_path)
    assert str(tmp_path) in message and ".txt or .jsonl" in message
    (tmp_path / "empty.jsonl").write_text("\n\n")
    message = refusal(tmp_path)
    assert str(tmp_path) in message and "no document" in message


def test_a_file_of_another_suffix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("x")
    message = refusal(tmp_path / "x.parquet")
    assert "x.parquet" in message and "'.parquet'" in message and ".txt or .jsonl" in message


def test_the_error_of_a_link_to_nothing_has_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    assert "gone.txt: is a link to nothing" in refusal(tmp_path)


def test_the_error_of_a_folder_that_may_not_be_listed_has_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "scandir", raise_permission_error)
    assert refusal(tmp_path) == f"corpus {tmp_path}: cannot be listed (Permission denied)"


def test_a_corpus_that_memory_cannot_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with (tmp_path / "b.txt").open("wb") as file:
        file.truncate(2**31)  # takes no room on the disk
    assert f"{tmp_path / 'b.txt'}: the corpus has more than 2,147,483,648 bytes with this file" in refusal(tmp_path)


def test_a_file_that_may_not_be_read_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr(Path, "open", raise_permission_error)
    assert refusal(tmp_path) == f"{tmp_path / 'a.txt'}: cannot be read (Permission denied)"


def test_a_corpus_of_empty_documents_is_refused_where_something_is_to_be_learned(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match="all of its 1 documents are empty"):
        check_learnable(open_corpus(str(tmp_path)), str(tmp_path))
    (tmp_path / "one.txt").write_bytes(b"a")
    check_learnable(open_corpus(str(tmp_path)), str(tmp_path))


def test_a_pipe_is_refused_before_it_can_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ConfigError, match="is no regular file"):
        open_corpus(str(tmp_path / "pipe.txt"))


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_every_byte_and_eod_have_their_own_token_below_the_vocabulary_size() -> None:
    tokens = tokenize(bytes(range(256)))
    assert sorted(tokens.tolist()) == list(range(VOCAB_SIZE))


def test_without_end_there_is_no_eod() -> None:
    assert tokenize(b"if", end=False).tolist() == [105, 102]
    assert tokenize(b"", end=False).tolist() == []
    assert tokenize(b"").tolist() == [EOD]
