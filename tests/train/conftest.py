"""Fixtures of the training tests: a corpus of documents of many lengths, settings of a tiny model, ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import preload
from tests.train.fresh_ranks import FreshRanks
from tests.train.runs import Run

preload("mindspeed_cp.train.loop")


@pytest.fixture(scope="session")
def fresh_ranks() -> FreshRanks:
    """New ranks for every run."""
    return FreshRanks()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents of 0 to 700 bytes, most of them short; the lengths divide by nothing."""
    generator = random.Random(5)
    words = ["plan", "ring", "rank", "tile", "token", "layout", "of", "the", "a", "sends", "holds", "key", "value"]
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    with open(path, "w") as file:
        for _ in range(300):
            length = int(700 * generator.random() ** 6)
            text = " ".join(generator.choice(words) for _ in range(length // 3 + 1))[:length]
            file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Start a run that is certain to end with the test."""
    runs: list[Run] = []

    def begin(*command: object, **environment: str) -> Run:
        runs.append(Run(*command, **environment))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()
