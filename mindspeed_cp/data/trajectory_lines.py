"""Groups of trajectories in .jsonl files: one group a line, such as the answers sampled for one prompt.

::

    {"prompt": "2 + 2 =", "trajectories": [" 4", " four"], "weights": [1, 0.5]}
    {"trajectories": [[1, 2, 3, 4], [1, 2, 5]], "weights": [[0, 0, 1, 1], [0, 0, 1]]}

Texts become their bytes, and a trajectory that is a text ends with EOD. Lists are token numbers, taken as they are. The
prompt stands before every trajectory of its line, and nothing of it is learned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.data.byte_tokenizer import VOCAB_SIZE, tokenize
from mindspeed_cp.data.file_corpus import SourceFile, index_lines, printable_path, read_range
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.messages import short_repr

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


class TrajectoryFiles:
    """Groups of .jsonl files, in the order of `paths`; lines are read on demand, and blank ones skipped.

    Raises:
        ConfigError: a file cannot be read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._lines: list[tuple[SourceFile, int, int, int]] = []
        for path in paths:
            file, lines = index_lines(path)
            self._lines += [(file, *line) for line in lines]

    def __len__(self) -> int:
        return len(self._lines)

    def name(self, group: int) -> str:
        """Return `path:line` of a group."""
        file, _, _, number = self._lines[group]
        return f"{printable_path(file.path)}:{number}"

    def read(self, group: int) -> TrajectoryGroup:
        """Read a group.

        Raises:
            ConfigError: the line is no group, or the file has been removed or changed since it was opened.
        """
        file, start, size, _ = self._lines[group]
        return parse_group(read_range(file, start, start + size), self.name(group))


def parse_group(line: bytes, where: str) -> TrajectoryGroup:
    """Return the group of a JSON line; `where` names it in errors.

    Raises:
        ConfigError: it is no JSON object, has other keys, or a value that is not valid; names it.
    """
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is no JSON ({error}); each line must be an object such as {_EXAMPLE}") from None
    if not isinstance(value, dict) or "trajectories" not in value:
        what = f"has the keys {sorted(value)}" if isinstance(value, dict) else f"is a JSON {type(value).__name__}"
        raise ConfigError(f"{where}: {what}; each line must be an object such as {_EXAMPLE}")
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
        try:
            return tokenize(value.encode("utf-8"), end=is_end)
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where} has half a surrogate pair at character {error.start}; mend the line") from None
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
