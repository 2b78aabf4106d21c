"""The section `data` of the settings: the corpus, and how it is packed and balanced."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_cp.schema.base import SETTING_LIMIT, Section

POOL = "pool"  #: the value of `balance` that plans replicas together


class DataSettings(Section):
    """The corpus and how it is packed."""

    corpus: str = Field(
        default="stdlib",
        min_length=1,
        description="stdlib: sources of Python's standard library; or a .txt or .jsonl file, or a folder of these",
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
