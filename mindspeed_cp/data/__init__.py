"""Documents and the rows packed from them.  NumPy only."""

from mindspeed_cp.data.bytes import EOD, VOCAB_SIZE, detokenize, tokenize
from mindspeed_cp.data.corpus import Corpus, check_learnable, open_corpus
from mindspeed_cp.data.files import FileCorpus
from mindspeed_cp.data.packing import Packer
from mindspeed_cp.data.stream import PackedRow, PackedStream

__all__ = [
    "EOD",
    "VOCAB_SIZE",
    "Corpus",
    "FileCorpus",
    "PackedRow",
    "PackedStream",
    "Packer",
    "check_learnable",
    "detokenize",
    "open_corpus",
    "tokenize",
]
