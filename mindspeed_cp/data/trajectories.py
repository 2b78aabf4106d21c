"""A corpus of groups of trajectories, each of which is packed as prefix trees and stays whole.

As a document, a group has its tree tokens: packing and dispatch take it as one. A corpus is read when it is opened, and
each rank holds it in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.data.corpus import (
    JSON_LINES,
    VOCAB_SIZE,
    encode,
    find_files,
    json_object,
    printable_path,
    read_entries,
    tokenize,
)
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, PackedTrajectories
from mindspeed_cp.schema.messages import short_repr


class TrajectoryCorpus:
    """Groups of trajectories as documents of a corpus.

    Args:
        groups: name, for messages, and content of each.
        min_shared: least number of first tokens that trajectories must have in common to be one tree.
        context: largest number of tree tokens of a group; None: any.

    Attributes:
        lengths: tree tokens of each group, int64 [groups], read-only.
        flat_lengths: tokens of all trajectories of each group, int64 [groups].
        learned_tokens: number of trajectory tokens to predict that have a weight.
        group_digests: digest of all that each group is: trees, tokens, trajectories, weights; 8 bytes each.

    Raises:
        ConfigError: a group is not valid, or has more tree tokens than the context; names it.
    """

    def __init__(
        self, groups: Iterable[tuple[str, TrajectoryGroup]], min_shared: int = 1, context: int | None = None
    ) -> None:
        self._groups: list[tuple[PackedTrajectories, Sequence[np.ndarray]]] = []
        for name, group in groups:
            packed = Documents.from_trajectories(group.trajectories, min_shared, must_share=False)
            if context is not None and packed.documents.tokens > context:
                raise ConfigError(
                    f"{name}: has {packed.documents.tokens} tree tokens ({packed.flat_tokens} of its "
                    f"{len(packed.tree_tokens)} trajectories), and data.seq_length = {context}; a group is not cut: "
                    "valid: data.seq_length of so many or more, or fewer or shorter trajectories"
                )
            self._groups.append((packed, group.weights))
        self.group_digests = [_digest(packed, weights) for packed, weights in self._groups]
        self.learned_tokens = sum(
            int(np.count_nonzero(weight[1:])) for _, weights in self._groups for weight in weights
        )
        self.lengths = np.array([packed.documents.tokens for packed, _ in self._groups], np.int64)
        self.lengths.setflags(write=False)
        self.flat_lengths = np.array([packed.flat_tokens for packed, _ in self._groups], np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def most_repeated(self) -> int:
        """Upper bound of the trajectory tokens for which a tree token stands, on average over any group."""
        return int((-(-self.flat_lengths // np.maximum(self.lengths, 1))).max(initial=1))

    def group(self, group: int) -> tuple[PackedTrajectories, Sequence[np.ndarray]]:
        """Return the trees of a group, and the loss weights of each trajectory's tokens, fp64 [length] each."""
        return self._groups[group]

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return tree tokens start .. stop-1 of a group, int64 [stop - start]; by default all."""
        return self.group(document)[0].tokens[start:stop]

    def documents(self, groups: np.ndarray) -> Documents:
        """Return the documents of some groups one after the other, with parents.

        Args:
            groups: numbers of groups, int64 [n].
        """
        shapes = [self._groups[number][0].documents for number in groups.tolist()]
        before = np.repeat(np.cumsum([0, *map(len, shapes)])[:-1], [len(shape) for shape in shapes])
        lengths, parents = (
            np.concatenate([np.zeros(0, np.int64), *(getattr(shape, name) for shape in shapes)])
            for name in ("lengths", "parents")
        )
        return Documents(lengths, np.where(parents < 0, -1, parents + before))

    def sum_of_groups(self, groups: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Sum values of the documents of some groups, [documents], over each group, [n]."""
        counts = [len(self._groups[number][0].documents) for number in groups.tolist()]
        return np.bincount(np.repeat(np.arange(len(groups)), counts), values, len(groups))


def open_trajectories(source: str, min_shared: int = 1, context: int | None = None) -> TrajectoryCorpus:
    """Open a corpus of groups of trajectories.

    Args:
        source: a .jsonl file with a group on each line, or a folder, which is searched with its subfolders.
        min_shared, context: as for TrajectoryCorpus.

    Raises:
        ConfigError: the source does not exist or has no group, or a group is not valid; names it.
    """
    lines = read_entries(find_files(source, (JSON_LINES,)))
    corpus = TrajectoryCorpus(((name, parse_group(line, name)) for name, line, _ in lines), min_shared, context)
    if not len(corpus):
        raise ConfigError(f"corpus {printable_path(Path(source))}: has no group; its {JSON_LINES} files have no lines")
    return corpus


def _digest(packed: PackedTrajectories, weights: Sequence[np.ndarray]) -> bytes:
    digest = blake2b(digest_size=8)
    arrays = [packed.documents.lengths, packed.documents.parents, packed.tokens, *packed.tree_tokens]
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
    for array in weights:
        digest.update(array.astype("<f8").tobytes())
    return digest.digest()


def concatenate(groups: Sequence[PackedTrajectories], documents: Documents) -> PackedTrajectories:
    """Return the trajectories of some groups as one batch.

    Args:
        groups: the groups.
        documents: their documents, one group after the other; documents of no token between them are allowed.
    """
    offsets = np.cumsum([0, *(len(group.tokens) for group in groups)])
    return PackedTrajectories(
        documents,
        np.concatenate([np.zeros(0, np.int64), *(group.tokens for group in groups)]),
        tuple(path + offset for group, offset in zip(groups, offsets[:-1], strict=True) for path in group.tree_tokens),
    )


# Groups of trajectories in .jsonl files: one group a line, such as the answers sampled for one prompt.
#
# ::
#
#     {"prompt": "2 + 2 =", "trajectories": [" 4", " four"], "weights": [1, 0.5]}
#     {"trajectories": [[1, 2, 3, 4], [1, 2, 5]], "weights": [[0, 0, 1, 1], [0, 0, 1]]}
#
# Texts become their bytes, and a trajectory that is a text ends with EOD. Lists are token numbers, taken as they are.
# The prompt stands before every trajectory of its line, and nothing of it is learned.


KEYS = ("prompt", "trajectories", "weights")
_EXAMPLE = '{"prompt": "...", "trajectories": ["...", "..."], "weights": [1, 0.5]}'


@dataclass(frozen=True, eq=False)
class TrajectoryGroup:
    """Trajectories that are packed together.

    Attributes:
        trajectories: token numbers of each, int64 [length], one or more of one token or more.
        weights: loss weight of each of their tokens as one to predict, fp64 [length]; that of a first token is not
            used.
    """

    trajectories: Sequence[np.ndarray]
    weights: Sequence[np.ndarray]


def parse_group(line: bytes, where: str) -> TrajectoryGroup:
    """Return the group of a JSON line; `where` names it in errors.

    Raises:
        ConfigError: it is no JSON object, has other keys, or a value that is not valid; names it.
    """
    value = json_object(line, where, "trajectories", _EXAMPLE)
    unknown = sorted(value.keys() - set(KEYS))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; valid: {', '.join(KEYS)}")
    listed = value["trajectories"]
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{where}: trajectories is {short_repr(listed)}; valid: a list of one trajectory or more")
    prompt = _tokens(value.get("prompt", []), f"{where}: prompt", is_end=False)
    answers = [_tokens(text, f"{where}: trajectories[{i}]", is_end=True) for i, text in enumerate(listed)]
    weights = value.get("weights", [1.0] * len(answers))
    if not isinstance(weights, list) or len(weights) != len(answers):
        raise ConfigError(
            f"{where}: weights is {short_repr(weights)}; valid: a list of {len(answers)}, one entry for each trajectory"
        )
    empty = next((i for i, tokens in enumerate(answers) if not len(prompt) + len(tokens)), None)
    if empty is not None:
        raise ConfigError(f"{where}: trajectories[{empty}] has no tokens; valid: 1 token or more; leave it out")
    return TrajectoryGroup(
        [np.concatenate([prompt, tokens]) for tokens in answers],
        [
            np.concatenate([np.zeros(len(prompt)), _weights(given, len(tokens), f"{where}: weights[{i}]")])
            for i, (given, tokens) in enumerate(zip(weights, answers, strict=True))
        ],
    )


def _tokens(value: Any, where: str, is_end: bool) -> np.ndarray:
    """Return the token numbers of a text or a list, int64 [tokens]; a text with `is_end` ends with EOD."""
    if isinstance(value, str):
        return tokenize(encode(value, where), end=is_end)
    valid = f"a text, or a list of token numbers from 0 to {VOCAB_SIZE - 1}"
    if not isinstance(value, list):
        raise ConfigError(f"{where} is {short_repr(value)}; valid: {valid}")
    for token in value:
        if type(token) is not int or not 0 <= token < VOCAB_SIZE:
            raise ConfigError(f"{where} has {short_repr(token)}; valid: {valid}")
    return np.array(value, np.int64)


def _weights(value: Any, tokens: int, where: str) -> np.ndarray:
    """Return the loss weights of a trajectory's own tokens, fp64 [tokens]."""
    numbers = value if isinstance(value, list) else [value] * tokens
    for number in numbers if isinstance(value, list) else [value]:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ConfigError(f"{where} is {short_repr(number)}; valid: a finite number, or one for each token")
    if len(numbers) != tokens:
        raise ConfigError(
            f"{where} has {len(numbers)} numbers; valid: one number, or {tokens}, one for each token of the trajectory"
            " (of a text, one for each byte and one for its end)"
        )
    return np.array(numbers, np.float64)
