"""The corpus and the ranks of the training tests."""

from tests.train.conftest import corpus, fresh_ranks

__all__ = ["corpus", "fresh_ranks"]
