"""`algorithm: auto`: the algorithm, with its options, that is simulated fastest for rows like the run's; with
`per_batch` a few of which every row takes one (:mod:`.choosing`)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import islice

from mindspeed_cp.config import Settings
from mindspeed_cp.config_checks import attention_of, layer_of
from mindspeed_cp.config_suite import BOUND
from mindspeed_cp.config_variants import with_algorithm
from mindspeed_cp.cost.candidates import candidates
from mindspeed_cp.cost.choose import Decision, choose_algorithm
from mindspeed_cp.cost.per_batch import BatchChooser, shortlist
from mindspeed_cp.data import PackedStream, open_corpus
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AUTO, AttentionConfig

#: Rows by which to choose: the first ones of the training.
SAMPLE = 4


def resolved(settings: Settings) -> tuple[Settings, Decision | None]:
    """The settings with an algorithm in the place of auto, and why it; the same on every rank, for the same corpus.

    Raises:
        ConfigError: the corpus cannot be read, or no algorithm does it.
    """
    suite = settings.context_parallel_suite
    if suite.algorithm != AUTO:
        return settings, None
    attention = typical_attention(settings)
    possible = []
    for one in candidates(suite.topology, attention):
        if BOUND in suite.options and suite.topology.ranks > 1:  # one rank holds the row; it was checked
            one = replace(one, options=(*one.options, (BOUND, suite.options[BOUND])))
        with suppress(ConfigError):  # what the settings refuse with this algorithm
            with_algorithm(settings, one)
            possible.append(one)
    rows, layer, options = sample_rows(settings), layer_of(settings), settings.plan_options
    decision = choose_algorithm(rows, suite.topology, attention, layer=layer, among=possible, options=options)
    also = []
    if suite.per_batch:  # of those that are near, those that fit into memory
        near = shortlist(decision)
        chooser = BatchChooser(near, rows, suite.topology, attention, layer=layer, options=options, drop=True)
        also = [one.word for one in chooser.candidates[1:]]
    return with_algorithm(settings, decision.candidate, also), decision


def sample_rows(settings: Settings) -> list[Documents]:
    """The first rows of a training."""
    stream = PackedStream(open_corpus(settings.data.corpus), settings.data.seq_length, settings.train.seed, 0, 1)
    return [row.documents for row in islice(stream, SAMPLE)]


def typical_attention(settings: Settings) -> AttentionConfig:
    """What most layers compute on a tensor-parallel rank."""
    whole, model, tensor = attention_of(settings), settings.model, settings.train.tensor_model_parallel_size
    attention = replace(whole, heads=max(1, whole.heads // tensor), kv_heads=max(1, whole.kv_heads // tensor))
    if 0 < model.window_layers * 2 < model.num_layers:
        attention = replace(attention, window=None)
    return attention
