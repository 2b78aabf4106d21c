"""Documents, packed rows, and their assignment to data-parallel replicas.  NumPy only."""

from mindspeed_cp.data.balance import DocumentCost, assign
from mindspeed_cp.data.corpus import (
    EOD,
    VOCAB_SIZE,
    Corpus,
    FileCorpus,
    check_learnable,
    corpus_digest,
    open_corpus,
    tokenize,
)
from mindspeed_cp.data.dispatch import Dispatcher
from mindspeed_cp.data.packing import Packer
from mindspeed_cp.data.pool import PoolModel
from mindspeed_cp.data.stream import PackedRow, PackedStream, ReplicaBatch

__all__ = [
    "EOD",
    "VOCAB_SIZE",
    "Corpus",
    "Dispatcher",
    "DocumentCost",
    "FileCorpus",
    "PackedRow",
    "PackedStream",
    "Packer",
    "PoolModel",
    "ReplicaBatch",
    "assign",
    "check_learnable",
    "corpus_digest",
    "open_corpus",
    "tokenize",
]
