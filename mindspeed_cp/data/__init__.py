"""Documents and the rows packed from them.  NumPy only."""

from mindspeed_cp.data.balance import Assignment, assign
from mindspeed_cp.data.bytes import EOD, VOCAB_SIZE, detokenize, tokenize
from mindspeed_cp.data.corpus import Corpus, check_learnable, open_corpus
from mindspeed_cp.data.dealing import Dealer, Dealt
from mindspeed_cp.data.document_cost import DocumentCost
from mindspeed_cp.data.files import FileCorpus
from mindspeed_cp.data.packing import Packer
from mindspeed_cp.data.stream import GlobalBatch, PackedRow, PackedStream

__all__ = [
    "EOD",
    "VOCAB_SIZE",
    "Assignment",
    "Corpus",
    "Dealer",
    "Dealt",
    "DocumentCost",
    "FileCorpus",
    "GlobalBatch",
    "PackedRow",
    "PackedStream",
    "Packer",
    "assign",
    "check_learnable",
    "detokenize",
    "open_corpus",
    "tokenize",
]
