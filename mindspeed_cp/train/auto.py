"""`algorithm: auto`: the algorithm, with its options, that is simulated fastest for rows like the run's."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import islice

from mindspeed_cp.config import Settings
from mindspeed_cp.config_checks import attention_of, layer_of
from mindspeed_cp.cost.choose import Candidate, Decision, candidates, choose_algorithm
from mindspeed_cp.data import PackedStream, open_corpus
from mindspeed_cp.plan import AUTO

#: Rows by which to choose: the first ones of the training.
SAMPLE = 4


def resolved(settings: Settings) -> tuple[Settings, Decision | None]:
    """The settings with an algorithm in the place of auto, and why it; the same on every rank, for the same corpus.

    Raises:
        ConfigError: the corpus cannot be read, or no algorithm does it.
    """
    suite, train = settings.context_parallel_suite, settings.train
    if suite.algorithm != AUTO:
        return settings, None
    stream = PackedStream(open_corpus(settings.data.corpus), settings.data.seq_length, train.seed, 0, 1)
    rows = [row.documents for row in islice(stream, SAMPLE)]
    whole, model, tensor = attention_of(settings), settings.model, train.tensor_model_parallel_size
    attention = replace(whole, heads=max(1, whole.heads // tensor), kv_heads=max(1, whole.kv_heads // tensor))
    if 0 < model.window_layers * 2 < model.num_layers:  # most layers are without the window
        attention = replace(attention, window=None)
    possible = {}
    for one in candidates(suite.topology, attention):
        with suppress(ValueError):  # what the settings refuse with this algorithm
            possible[one] = _with(settings, one)
    decision = choose_algorithm(
        rows, suite.topology, attention, layer=layer_of(settings), among=list(possible), options=settings.plan_options
    )
    return possible[decision.candidate], decision


def _with(settings: Settings, candidate: Candidate) -> Settings:
    """The settings with an algorithm and its options; pydantic's ValidationError, or ConfigError, if they do not go
    with it."""
    given = settings.model_dump(exclude_unset=True)
    given["context_parallel_suite"] |= {"algorithm": candidate.algorithm, **dict(candidate.options)}
    return Settings(**given)
