"""The section `data` of the settings: the corpus, and how it is packed and balanced."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mindspeed_cp.data import ROLLOUTS, RolloutShape
from mindspeed_cp.data.corpus import STDLIB
from mindspeed_cp.schema.base import SETTING_LIMIT, PositiveInt, Section
from mindspeed_cp.schema.messages import bad_value

#: The value of `balance` that plans replicas together, and the ranks up to which one pool is as good as two: plans of
#: more are not simulated, and several pools are 6 to 15 % faster (modelled).
POOL, POOL_RANKS = "pool", 1024


class DataSettings(Section):
    """The corpus and how it is packed."""

    corpus: str = Field(
        default="stdlib",
        min_length=1,
        description="stdlib: sources of Python's standard library; or a .txt or .jsonl file, or a folder of these; "
        "with trajectories: true, rollouts: groups generated from these sources; or a .jsonl file, or a folder of "
        "these",
    )
    trajectories: bool = Field(
        default=False,
        description="each line of the corpus is a group of trajectories, packed as prefix trees: "
        '{"prompt": "...", "trajectories": ["...", "..."], "weights": [1, 0.5]}, prompt and weights optional, token '
        "numbers in place of texts allowed; a group has at most seq_length tree tokens; false: documents",
    )
    min_shared_tokens: PositiveInt = Field(
        default=1, description="trajectories: first tokens that trajectories must have in common to be one tree"
    )
    rollout_groups: PositiveInt = Field(default=256, description="corpus rollouts: number of groups")
    rollout_prompt_tokens: list[int] = Field(
        default=[64, 512], description="corpus rollouts: [least, most] tokens of a prompt"
    )
    rollout_answers: PositiveInt = Field(default=8, description="corpus rollouts: answers of a turn")
    rollout_answer_tokens: list[int] = Field(
        default=[16, 128], description="corpus rollouts: [least, most] tokens of an answer"
    )
    rollout_turns: PositiveInt = Field(
        default=1, description="corpus rollouts: turns, of which each continues one answer of the one before"
    )
    seq_length: Annotated[int, Field(ge=2, le=SETTING_LIMIT)] = Field(
        default=4096, description="context: tokens of a packed row; longer documents are cut and counted"
    )
    balance: Literal["none", "time", "pool"] = Field(
        default="none",
        description="time: dispatch the documents of each step over replicas and micro-batches, so that all replicas "
        "end at the same modelled time, with different numbers of micro-batches; pool: as time, or all ranks of all "
        "replicas as one pool in the steps where that is modelled to be faster, with algorithm: hierarchical; none: "
        "rows in order",
    )
    pool_ranks: PositiveInt = Field(
        default=POOL_RANKS,
        description="balance pool: ranks (context- times data-parallel) up to which all are one pool; more are divided "
        "into as few equal pools of whole replicas as have at most so many, of which each rank plans its own; where a "
        "document keeps one of them longer than the others, one pool of all is compared too",
    )

    @property
    def rollout_shape(self) -> RolloutShape:
        """Sizes of generated groups."""
        prompts, answers = self.rollout_prompt_tokens, self.rollout_answer_tokens
        return RolloutShape(
            groups=self.rollout_groups,
            prompt_tokens=(prompts[0], prompts[1]),
            answers=self.rollout_answers,
            answer_tokens=(answers[0], answers[1]),
            turns=self.rollout_turns,
        )

    @model_validator(mode="after")
    def _check_trajectories(self) -> DataSettings:
        names, generated = type(self).model_fields, self.corpus == ROLLOUTS
        if generated and not self.trajectories:
            raise bad_value("trajectories", False, f"must be true with corpus: {ROLLOUTS}, which are trajectories")
        if self.trajectories and self.corpus == STDLIB:
            rule = f"has documents, no trajectories; use {ROLLOUTS}, a .jsonl file, or trajectories: false"
            raise bad_value("corpus", self.corpus, rule)
        without_effect = [] if self.trajectories else ["min_shared_tokens"]
        without_effect += [] if generated else [name for name in names if name.startswith("rollout_")]
        for name in without_effect:
            if getattr(self, name) != names[name].default:
                needed = f"corpus: {ROLLOUTS}" if name.startswith("rollout_") else "trajectories: true"
                raise bad_value(name, getattr(self, name), f"has an effect only with {needed}; remove it")
        for name in ("rollout_prompt_tokens", "rollout_answer_tokens"):
            bounds = getattr(self, name)
            if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1] <= SETTING_LIMIT:
                raise bad_value(name, bounds, "must be [least, most], two numbers of tokens from 1 on")
        if self.balance != POOL and self.pool_ranks != POOL_RANKS:
            raise bad_value("pool_ranks", self.pool_ranks, "has an effect only with balance: pool; remove it")
        return self
