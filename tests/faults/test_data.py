"""Data that change between two starts, or differ between ranks: documents of the same lengths with other contents."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings
from tests.processes import RankError
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, tiny, train_here


@pytest.fixture
def own_corpus(corpus: Path, tmp_path: Path) -> Path:
    """A copy of the corpus that a test may change."""
    copy = tmp_path / "documents.jsonl"
    copy.write_bytes(corpus.read_bytes())
    return copy


def with_other_words(content: bytes) -> bytes:
    """The same lengths; the last documents tell of something else."""
    half = len(content) // 2
    return content[:half] + content[half:].replace(b"token", b"chips")


def steps(corpus: Path, folder: Path, last: int, **more: Any) -> Settings:
    more = {"train__lr_decay_iters": 4, "checkpoint__save_interval": 2, "train__train_iters": last} | more
    return tiny(corpus, folder, **more)


@pytest.mark.fault(
    fault="the corpus has other contents at a resume, of the same lengths",
    happens="the start is refused",
    lost="nothing",
    printed="data.corpus: has other documents than the saved run had",
)
def test_a_corpus_with_other_contents_is_not_resumed(fresh_ranks: FreshRanks, own_corpus: Path, tmp_path: Path) -> None:
    first = curve(fresh_ranks, steps(own_corpus, tmp_path / "run", 2), 1)
    before = own_corpus.read_bytes()
    own_corpus.write_bytes(with_other_words(before))
    with pytest.raises(RankError, match=r"data\.corpus: has other documents than the saved run had"):
        curve(fresh_ranks, steps(own_corpus, tmp_path / "run", 4), 1)
    moved = tmp_path / "moved.jsonl"  # another path, and another time of change
    moved.write_bytes(before)
    assert curve(fresh_ranks, steps(moved, tmp_path / "run", 4), 1)[:2] == first


def start_otherwise(settings: str, rank_1: str) -> None:
    """In a rank: train; rank 1 with settings of its own."""
    train_here(rank_1 if os.environ["RANK"] == "1" else settings)


@pytest.mark.fault(
    fault="one rank has other files in data.corpus, or other settings",
    happens="the run ends before its first step",
    lost="nothing",
    printed="the ranks, and the setting that differs or data.corpus",
)
@pytest.mark.parametrize("kind", ["corpus", "setting"])
def test_rank_with_other_settings_or_corpus_is_named(
    fresh_ranks: FreshRanks, corpus: Path, own_corpus: Path, tmp_path: Path, kind: str
) -> None:
    own_corpus.write_bytes(with_other_words(corpus.read_bytes()))
    common = {"context_parallel_suite__context_parallel_size": 2}
    settings = steps(corpus, tmp_path / "run", 2, **common)
    other = steps(own_corpus, tmp_path / "run", 2, **common)
    says = r"data.corpus has other documents on rank 1 of 2"
    if kind == "setting":
        other = steps(corpus, tmp_path / "run", 2, **common, train__lr=0.5)
        says = r"train.lr = 0.5 on rank 1, 0.003 on the others of 2; give all ranks the same settings"
    with pytest.raises(RankError) as caught:
        fresh_ranks.run(2, start_otherwise, settings.model_dump_json(), other.model_dump_json())
    assert len(re.findall(says, str(caught.value))) == 2, "both are told"


def read_otherwise(settings: str) -> str:
    """In a rank: rank 1 has other bytes, as from memory that fails, after its start."""
    from mindspeed_cp.data.corpus import FileCorpus

    if os.environ["RANK"] == "1":
        read = FileCorpus.tokens
        FileCorpus.tokens = lambda self, *where: read(self, *where) ^ 1  # type: ignore[method-assign]
    with pytest.raises(Exception) as caught:
        train_here(settings)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.fault(
    fault="a context-parallel rank has other bytes of a document than the others",
    happens="the step ends without an update",
    lost="the steps since the newest checkpoint",
    printed="batch_digest, and which rank has which",
)
def test_a_rank_that_reads_other_bytes_is_named_in_the_same_step(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    settings = steps(corpus, tmp_path, 2, context_parallel_suite__context_parallel_size=2)
    for text in fresh_ranks.run(2, read_otherwise, settings.model_dump_json()):
        assert text.startswith("ConfigError: rank ") and "batch_digest: rank 0 has " in text and "rank 1 has " in text
    assert not list((tmp_path / "checkpoints").glob("iter*"))
