"""Generated groups of trajectories: prompts with several answers, or traces that branch turn by turn.

Prompts and answers are runs of a corpus's documents, drawn at random, so that a model learns the corpus's language.
With several turns one answer of each turn, drawn at random, is what the next turn's answers continue::

    turns 1      prompt ─┬─ answer EOD         turns 2      prompt ─┬─ answer EOD
                         ├─ answer EOD                              └─ answer ─┬─ answer EOD
                         └─ answer EOD                                         └─ answer EOD

Only answers are learned. A group follows from the seed, its number and the corpus alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.data.byte_tokenizer import EOD
from mindspeed_cp.data.corpus import Corpus
from mindspeed_cp.data.trajectory_lines import TrajectoryGroup
from mindspeed_cp.errors import ConfigError

ROLLOUTS = "rollouts"  # as a corpus


@dataclass(frozen=True)
class RolloutShape:
    """Sizes of generated groups.

    Attributes:
        groups: number of groups.
        prompt_tokens: least and largest number of tokens of a prompt, between which all are equally frequent.
        answers: number of answers of a turn.
        answer_tokens: least and largest number of tokens of an answer, EOD included.
        turns: number of turns.
    """

    groups: int = 256
    prompt_tokens: tuple[int, int] = (64, 512)
    answers: int = 8
    answer_tokens: tuple[int, int] = (16, 128)
    turns: int = 1


class Rollouts:
    """Groups whose prompts and answers are runs of a corpus.

    Args:
        corpus: where the runs are taken from.
        shape: sizes of the groups.
        seed: seed of all draws.

    Raises:
        ConfigError: no document of the corpus is long enough for a run.
    """

    def __init__(self, corpus: Corpus, shape: RolloutShape, seed: int) -> None:
        longest = max(shape.prompt_tokens[1], shape.answer_tokens[1])
        self._corpus, self._shape, self._seed = corpus, shape, seed
        self._documents = np.flatnonzero(corpus.lengths > longest)
        if not len(self._documents):
            raise ConfigError(
                f"data.corpus = {ROLLOUTS}: no document that runs are taken from has more than {longest} tokens, the "
                f"longest run of data.rollout_prompt_tokens and data.rollout_answer_tokens; valid: at most "
                f"{int(corpus.lengths.max(initial=1)) - 1}"
            )

    def __len__(self) -> int:
        return self._shape.groups

    def name(self, group: int) -> str:
        """Return "group 3 of rollouts"."""
        return f"group {group} of {ROLLOUTS}"

    def read(self, group: int) -> TrajectoryGroup:
        """Make a group."""
        draws = _draws(self._seed, group)
        path = self._run(draws, self._shape.prompt_tokens)
        weight = np.zeros(len(path))
        trajectories, weights = [], []
        for turn in range(self._shape.turns):
            is_last = turn == self._shape.turns - 1
            goes_on = -1 if is_last else next(draws) % self._shape.answers
            answers = [self._run(draws, self._shape.answer_tokens) for _ in range(self._shape.answers)]
            for number, answer in enumerate(answers):
                if number != goes_on:
                    trajectories.append(np.concatenate([path, answer[:-1], [EOD]]))
                    weights.append(np.concatenate([weight, np.ones(len(answer))]))
            if not is_last:
                path = np.concatenate([path, answers[goes_on]])
                weight = np.concatenate([weight, np.ones(len(answers[goes_on]))])
        return TrajectoryGroup(trajectories, weights)

    def _run(self, draws: Iterator[int], bounds: tuple[int, int]) -> np.ndarray:
        """Draw consecutive tokens of a document without its end, int64 [tokens]."""
        length = bounds[0] + next(draws) % (bounds[1] - bounds[0] + 1)
        document = int(self._documents[next(draws) % len(self._documents)])
        start = next(draws) % (int(self._corpus.lengths[document]) - length)
        return self._corpus.tokens(document, start, start + length)


def _draws(seed: int, group: int) -> Iterator[int]:
    """Yield random numbers; NumPy guarantees these of PCG64 for all releases."""
    bits = np.random.PCG64([seed, group])
    while True:
        yield int(bits.random_raw())
