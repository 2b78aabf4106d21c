"""Byte tokenizer: the 256 byte values, and one token that ends a document.

It takes files in any encoding, and the number of tokens follows from the size of the file::

    b"if"  ->  [105, 102, 256]
"""

from __future__ import annotations

import numpy as np

EOD = 256  #: end of a document
VOCAB_SIZE = 257


def tokenize(content: bytes, end: bool = True) -> np.ndarray:
    """Return the tokens of `content` and, if `end`, a final EOD; int64 [bytes + end]."""
    tokens = np.full(len(content) + end, EOD, np.int64)
    tokens[: len(content)] = np.frombuffer(content, np.uint8)
    return tokens


def detokenize(tokens: np.ndarray) -> bytes:
    """Return the bytes of `tokens` (int [tokens]) without EOD."""
    return tokens[tokens != EOD].astype(np.uint8).tobytes()
