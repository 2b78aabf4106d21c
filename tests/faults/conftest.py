"""The corpus, the ranks and the runs of the training tests."""

from tests.train.conftest import corpus, fresh_ranks, start

__all__ = ["corpus", "fresh_ranks", "start"]
