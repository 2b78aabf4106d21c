"""The section `data` of the settings: the corpus, and how it is packed and balanced."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

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
        "with trajectories: true, a .jsonl file, or a folder of these",
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

    @model_validator(mode="after")
    def _check_trajectories(self) -> DataSettings:
        if self.trajectories and self.corpus == STDLIB:
            raise bad_value(
                "corpus", self.corpus, "has documents, no trajectories; use a .jsonl file, or trajectories: false"
            )
        if not self.trajectories and self.min_shared_tokens != 1:
            rule = "has an effect only with trajectories: true; remove it"
            raise bad_value("min_shared_tokens", self.min_shared_tokens, rule)
        if self.balance != POOL and self.pool_ranks != POOL_RANKS:
            raise bad_value("pool_ranks", self.pool_ranks, "has an effect only with balance: pool; remove it")
        return self
