"""The table of what is not supported, and why: of attention here, of Megatron's settings in unsupported.yaml.

Who asks: the settings (:mod:`mindspeed_cp.config.rules`), `build_plan` and `verify_plan`
(:mod:`mindspeed_cp.plan.problem`), Megatron's start and the building of a model
(:mod:`mindspeed_cp.megatron.adaptors.settings`), and `mindspeed-cp convert`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mindspeed_cp.errors import ConfigError

#: Alternatives to documents that continue others, and to blocks of tokens that see each other both ways.
TREES_NEED = "mask 'causal' and self-attention, or documents without parents"
BLOCKS_NEED = "mask 'causal' and self-attention without ALiBi, or documents without blocks"


@dataclass(frozen=True)
class UnsupportedAttention:
    """A kind of attention that is not computed.

    Attributes:
        features: its features: mask, documents, window, bias, dropout, keys, backend.
        reason: the setting, its value, and the cause.
        alternative: valid values, or what to use instead.
    """

    features: Mapping[str, str]
    reason: str
    alternative: str

    def __str__(self) -> str:
        return f"{self.reason}; valid: {self.alternative}"


CAUSAL_CROSS_ATTENTION = UnsupportedAttention(
    {"mask": "causal", "keys": "other"},
    "attention.mask is 'causal' with keys of other lengths than queries, which leaves open where among the keys a "
    "query stands",
    "mask 'full', or kv_documents with the lengths of documents",
)

#: Everything else is computed, in any combination.
ATTENTION = (
    CAUSAL_CROSS_ATTENTION,
    UnsupportedAttention(
        {"documents": "trees", "mask": "full"}, "documents have parents, with attention.mask 'full'", TREES_NEED
    ),
    UnsupportedAttention(
        {"documents": "blocks", "mask": "full"}, "documents have blocks, with attention.mask 'full'", BLOCKS_NEED
    ),
    UnsupportedAttention(
        {"documents": "blocks", "bias": "alibi"}, "documents have blocks, with attention.alibi", BLOCKS_NEED
    ),
    UnsupportedAttention(
        {"backend": "cuda", "bias": "alibi", "dropout": "some"},
        "attention.alibi is given together with attention.dropout, which no kernel of the cuda backend computes",
        "one of the two, or backend cpu or npu",
    ),
)

#: Keys of Megatron's that are not keys of context_parallel_suite, and the alternative.
SUITE_KEYS = {"hybrid_context_parallel": "algorithm: hierarchical places every document by its cost"}


def unsupported_attention(features: Mapping[str, str]) -> UnsupportedAttention | None:
    """Return the first row of the table of which these are the features, None if the attention is computed."""
    return next((row for row in ATTENTION if row.features.items() <= features.items()), None)


Condition = Callable[[Any], bool]


@dataclass(frozen=True)
class Unsupported:
    """Values of a setting of Megatron that planned attention does not support; a row of unsupported.yaml.

    Attributes:
        setting: name of a field of TransformerConfig, or of an argument.
        valid: the valid values, as text.
        reason: why the others do not work.
        alternative: what to use instead; empty if `valid` says it.
        when: name of a condition on the other settings; empty: none.
        only: the valid values; None: see `never` and `must_be_on`.
        never: the values that are not valid; if there are none and `only` is None, what is off is valid.
        must_be_on: True if the setting must be true.
        another_model: True if the setting changes what the model computes.
    """

    setting: str
    valid: str = "False"
    reason: str = ""
    alternative: str = ""
    when: str = ""
    only: tuple[Any, ...] | None = None
    never: tuple[Any, ...] = ()
    must_be_on: bool = False
    another_model: bool = False

    @property
    def instead(self) -> str:
        """The reason and the alternative."""
        return "; ".join(filter(None, (self.reason, self.alternative)))

    def problem(self, config: Any, conditions: Mapping[str, Condition] | None = None) -> str | None:
        """Return what is wrong with the setting, or None; a setting that this Megatron lacks is valid.

        Args:
            config: TransformerConfig, or arguments.
            conditions: conditions by name that only the caller can decide, beside those of `CONDITIONS`.
        """
        if not hasattr(config, self.setting):
            return None
        if self.when and not {**CONDITIONS, **(conditions or {})}[self.when](config):
            return None
        value = getattr(config, self.setting)
        if self._is_valid(value):
            return None
        return f"{self.setting} is {value!r}; valid with planned attention: {self.valid} ({self.instead})"

    def check(self, config: Any, conditions: Mapping[str, Condition] | None = None) -> None:
        """Raise ConfigError if the setting has an invalid value; see `problem` for the arguments."""
        problem = self.problem(config, conditions)
        if problem is not None:
            raise ConfigError(problem)

    def _is_valid(self, value: Any) -> bool:
        values = value if isinstance(value, (list, tuple)) else (getattr(value, "name", value),)
        if self.only is not None:
            return all(entry in self.only for entry in values)
        if self.never:
            return not any(entry in self.never for entry in values)
        return bool(value) == self.must_be_on


@cache
def unsupported(group: str) -> tuple[Unsupported, ...]:
    """Return the rows of a group of unsupported.yaml: "model", "this_megatron", "arguments" or "mindspeed"."""
    rows = []
    for row in map(dict, _read_table()[group]):
        lists: dict[str, Any] = {name: tuple(row.pop(name)) for name in ("only", "never") if name in row}
        names = row.pop("setting").split()
        rows += [Unsupported(name, **row, **lists) for name in names]
    return tuple(rows)


@cache
def _read_table() -> dict[str, list[dict[str, Any]]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table: dict[str, list[dict[str, Any]]] = yaml.load(
        Path(__file__).with_name("unsupported.yaml").read_text("utf-8"), loader
    )
    return table


def is_latent(config: Any) -> bool:
    """Return True for multi-latent attention."""
    return bool(config.multi_latent_attention)


def is_split(config: Any) -> bool:
    """Return True if a micro-batch's tokens are on several ranks."""
    return config.context_parallel_size > 1 or bool(config.sequence_parallel)


def has_experts(config: Any) -> bool:
    """Return True for a model with experts."""
    return bool(config.num_moe_experts)


def _has_losses_of_experts(config: Any) -> bool:
    """Return True for a model with experts that a loss balances."""
    kinds, weights = (getattr(config, f"moe_{name}", None) for name in ("router_load_balancing_type", "aux_loss_coeff"))
    weighted = any(weight != 0 for weight in (weights if isinstance(weights, list) else [weights or 0]))
    return has_experts(config) and weighted and kinds not in ("none", ["none"])


def _sums_twice(config: Any) -> bool:
    """Return True where Megatron adds up a gradient that every tensor-parallel rank has as a whole."""
    whole = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
    return is_latent(config) and whole and config.q_lora_rank is not None


def _needs_equal_rows(config: Any) -> bool:
    """Return True where the flex dispatcher sends tokens of experts, and does not pad them to the most of a rank."""
    flex = getattr(config, "moe_token_dispatcher_type", None) == "flex"
    return has_experts(config) and flex and not getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False)


def _has_documents(args: Namespace) -> bool:
    """Return True if something beside the two flags of resets says that rows have documents."""
    names = ("dataloader_inter_document_masking", "cp_plan_documents")
    return any(getattr(args, name, False) for name in names)


def _null_eod_moved(args: Namespace) -> bool:
    """Return True if documents end at a token whose default number this Megatron moved."""
    own_data = not getattr(args, "mock_data", False)
    moved = hasattr(args, "null_tokenizer_eod_id") and args.null_tokenizer_eod_id is None
    return bool(args.reset_position_ids) and own_data and moved


def _hides_keys(config: Any) -> bool:
    """Return True if MindSpeed's attention would hide keys further back than pre_tockens in some row."""
    rows = getattr(config, "seq_length", None)
    return config.pre_tockens is not None and rows is not None and int(config.pre_tockens) < int(rows)


def _scales_otherwise(config: Any) -> bool:
    """Return True if MindSpeed-LLM's attention would scale scores by another number than the width of a head."""
    scale = config.query_pre_attn_scalar
    return bool(scale) and scale != getattr(config, "kv_channels", None)


#: Conditions of rows by the name that messages and tables show.
CONDITIONS: Mapping[str, Condition] = {
    "multi-latent attention": is_latent,
    "multi-latent attention with q_lora_rank and tensor without sequence parallelism": _sums_twice,
    "sequence parallelism": lambda config: bool(config.sequence_parallel),
    "tokens on several ranks": is_split,
    "experts": has_experts,
    "experts, tokens on several ranks": lambda config: has_experts(config) and is_split(config),
    "losses of experts": _has_losses_of_experts,
    "expert parallelism": lambda config: has_experts(config) and config.expert_model_parallel_size > 1,
    "the flex dispatcher, without moe_hybridep_pad_uneven_dispatch_inputs": _needs_equal_rows,
    "attention dropout and several layers of multi-token prediction": lambda config: (
        bool(config.attention_dropout) and (config.mtp_num_layers or 0) > 1
    ),
    "multi-token prediction": lambda config: bool(getattr(config, "mtp_num_layers", None)),
    "two interleaved stages": lambda config: (
        config.pipeline_model_parallel_size == 2 and (config.virtual_pipeline_model_parallel_size or 1) > 1
    ),
    "documents by no other flag": lambda args: not args.reset_position_ids and not _has_documents(args),
    "positions that restart, documents by no other flag": lambda args: (
        bool(args.reset_position_ids) and not _has_documents(args)
    ),
    "positions that do not restart": lambda args: not args.reset_position_ids,
    "an end of document that this Megatron moved": _null_eod_moved,
    "parts of a length": lambda config: config.fix_sub_seq_length is not None and int(config.fix_sub_seq_length) > 0,
    "pre_tockens below seq_length": _hides_keys,
    "another scale than of kv_channels": _scales_otherwise,
}
