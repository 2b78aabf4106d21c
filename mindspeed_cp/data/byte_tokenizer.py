"""The tokens: the 256 byte values and one token that ends a document.

Every file is text to this tokeniser, whatever its encoding, and the number of tokens is known from the file's size::

    b"if"  ->  [105, 102, 256]
"""

from __future__ import annotations

import numpy as np

EOD = 256  #: ends every document
VOCAB_SIZE = 257


def tokenize(content: bytes, end: bool = True) -> np.ndarray:
    """Token numbers of `content`, int64 [bytes + 1]; without the final EOD, int64 [bytes], where `end` is False."""
    tokens = np.full(len(content) + end, EOD, np.int64)
    tokens[: len(content)] = np.frombuffer(content, np.uint8)
    return tokens


def detokenize(tokens: np.ndarray) -> bytes:
    """The bytes among `tokens` (int [tokens]); EOD is left out."""
    return tokens[tokens != EOD].astype(np.uint8).tobytes()
