"""The flags of a launch, and what becomes of each flag of Megatron and MindSpeed, read from flags.yaml.

Rows of the table of what is not supported (:mod:`mindspeed_cp.schema.unsupported`) come first, so that a conversion
refuses what Megatron's start would refuse.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.unsupported import CONDITIONS as CONFIG_CONDITIONS
from mindspeed_cp.schema.unsupported import Unsupported, unsupported

_SAMPLES = ("--is-instruction-dataset", "--pack", "--neat-pack")  # MindSpeed-LLM's trainer makes the batches
_SCHEDULERS = ("--hybrid-context-parallel", "--dynamic-context-parallel")  # of samples over ranks of all replicas

MANY = -1  # arity of a flag that takes all words up to the next flag
ANY = -2  # the same, or no word at all


class Flag(NamedTuple):
    """A flag with its values.

    Attributes:
        name: with its dashes.
        values: words behind it, or the text behind `=`.
        words: the flag as it stands; the first word is the name or begins with it.
    """

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The flag and its values, as on the command line."""
        return " ".join(self.words)


def read_number(text: str) -> int | float | str:
    """Return a word as Megatron's parser reads it: numbers as such."""
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    is_number = re.fullmatch(r"-?([0-9]{1,18}\.?[0-9]{0,18}|\.[0-9]{1,18})([eE][-+]?[0-9]{1,3})?", text)
    return float(text) if is_number else text


def read_flags(words: Sequence[str], arities: Mapping[str, int]) -> tuple[list[str], list[Flag]]:
    """Return the words that are of no flag, and the flags.

    Args:
        words: words behind the name of the training script.
        arities: number of values of each flag that is converted; other flags take all words up to the next flag.

    Raises:
        ConfigError: a flag that is converted lacks a value.
    """
    others: list[str] = []
    flags: list[Flag] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--") or word == "--":
            others.append(word)
            continue
        name, equals, value = word.partition("=")
        arity = 0 if equals else arities.get(name, ANY)
        end = position
        limit = len(words) if arity < 0 else min(len(words), position + arity)
        while end < limit and not words[end].startswith("--"):
            end += 1
        values = tuple(words[position:end])
        if len(values) < (1 if arity == MANY else arity):
            raise ConfigError(f"{name}: has no value; give one, or leave the flag out")
        flags.append(Flag(name, (value,) if equals else values, (word, *values)))
        position = end
    return others, flags


class Outcome(str, Enum):
    """What becomes of a flag."""

    SETTING = "setting"  # a key of context_parallel_suite; the flag is left out
    STAYS_AS_SETTING = "setting, stays"  # a key of context_parallel_suite; the flag stays
    STAYS = "stays"
    REMOVED = "left out"
    REPLACED = "replaced"
    BY_HAND = "by hand"  # it stays, and the user has to do something that no flag does
    REFUSED = "refused"
    ADDED = "added"
    UNKNOWN = "unknown"  # it stays; no table has it
    NEXT = "next"  # what every training script needs

    @property
    def stays(self) -> bool:
        """True if the flag is among the remaining flags as it was."""
        return self in (Outcome.STAYS_AS_SETTING, Outcome.STAYS, Outcome.BY_HAND, Outcome.UNKNOWN)


#: The alternative to a flag that changes what the model computes, where none is at hand.
ANOTHER_MODEL = "none: without the flag it is another model; train this one without the suite"
#: Value of an added flag in place of which the path of the settings stands.
SUITE_FILE = "SUITE_FILE"
#: Value of --spec by which Megatron's scripts take this package's spec.
SPEC = "mindspeed_cp.megatron.pretrain spec"


@dataclass(frozen=True)
class Given:
    """The flags of a launch, as conditions read them.

    Attributes:
        values: values of each flag as it counts (the last one of a name).
    """

    values: Mapping[str, tuple[str, ...]]

    def has(self, *flags: str) -> bool:
        """Return True if one of these flags is given."""
        return any(flag in self.values for flag in flags)

    def value(self, flag: str, default: str = "") -> str:
        """Return the values of a flag with blanks between them."""
        return " ".join(self.values[flag]) if flag in self.values else default

    def number(self, flag: str, default: int) -> int | None:
        """Return the value of a flag as a number of ranks, rows or the like, None if it is none; the default without
        the flag."""
        text = self.value(flag, str(default))
        return int(text) if re.fullmatch("[0-9]{1,9}", text) else None

    @property
    def algorithm(self) -> str:
        """Name of the algorithm as the flags give it: schedulers of samples first, then MindSpeed's flag."""
        if self.has(*_SCHEDULERS):
            return "hierarchical"
        names = self.values.get("--context-parallel-algo") or self.values.get("--cp-comm-type") or ("p2p",)
        return names[0] if len(set(names)) == 1 else "several"

    @property
    def positions(self) -> str:
        """Kind of positions; Megatron's default without the flag."""
        return self.value("--position-embedding-type", "learned_absolute")

    @property
    def config(self) -> Namespace:
        """Settings of Megatron that conditions read; a number that is not known is Megatron's default."""
        numbers = {
            **{f"{name}_model_parallel_size": f"--{name}-model-parallel-size" for name in ("tensor", "expert")},
            "context_parallel_size": "--context-parallel-size",
        }
        counts = {"num_moe_experts": "--num-experts", "mtp_num_layers": "--mtp-num-layers"}
        switches = ("sequence_parallel", "multi_latent_attention", "moe_hybridep_pad_uneven_dispatch_inputs")
        return Namespace(
            **{name: self.number(flag, 1) or 1 for name, flag in numbers.items()},
            **{name: self.number(flag, 0) or 0 for name, flag in counts.items()},
            **{name: self.has(flag_of(name)) for name in switches},
            moe_aux_loss_coeff=[read_number(text) for text in self.value("--moe-aux-loss-coeff", "0").split()],
            moe_router_load_balancing_type=self.value("--moe-router-load-balancing-type", "aux_loss").split(),
            q_lora_rank=self.value("--q-lora-rank") or None,
            moe_token_dispatcher_type=self.value("--moe-token-dispatcher-type", "allgather"),
            attention_dropout=read_number(self.value("--attention-dropout", "0.1")),
        )


def _always(given: Given) -> bool:
    return True


@dataclass(frozen=True)
class FlagRule:
    """What becomes of a flag.

    Attributes:
        flag: with its dashes.
        arity: number of values; MANY: all words up to the next flag.
        outcome: what becomes of it.
        reason: why, as a sentence without a point.
        value: value for which the rule is, None: any; ADDED: the value, None: none.
        settings: keys of context_parallel_suite with their values; None: the value of the flag.
        becomes: REPLACED: new value; REFUSED: the alternative; ADDED, by hand: what to do.
        when: condition on the other flags in words; empty: always.
        holds: tests it.
    """

    flag: str
    arity: int
    outcome: Outcome
    reason: str
    value: str | None = None
    settings: tuple[tuple[str, str | int | None], ...] = ()
    becomes: str = ""
    when: str = ""
    holds: Callable[[Given], bool] = _always

    def fits(self, values: tuple[str, ...], given: Given) -> bool:
        """Return True if the rule is for these values of the flag beside the other flags."""
        return self.value in (None, " ".join(dict.fromkeys(values))) and self.holds(given)


def _is_double_ring(given: Given) -> bool:
    return given.algorithm in ("megatron_cp_algo", "p2p") and given.value("--cp-window-size", "1") not in ("0", "1")


def _has_experts(given: Given) -> bool:
    return given.value("--num-experts", "0") not in ("0", "None")


def _has_own_spec(given: Given) -> bool:
    return not given.has("--spec") and given.positions != "alibi"


def _schedules_samples(given: Given) -> bool:
    hinders = any(CONFIG_CONDITIONS[name](given.config) for name in ("multi-token prediction", "losses of experts"))
    return given.has(*_SCHEDULERS) and not hinders


def _shows_fewer_keys(given: Given) -> bool:
    left, tokens = given.number("--pre-tockens", 0), given.number("--seq-length", 65536)
    return left is None or tokens is None or left < tokens


def _exchanges_rows(given: Given) -> bool:
    sizes = (given.number(f"--{name}-model-parallel-size", 0) for name in ("expert", "pipeline"))
    return any(size is not None and size > 1 for size in sizes)


def _is_mindspeeds(given: Given) -> bool:
    return given.has(*MINDSPEED_FLAGS, *LLM_FLAGS)


def _restarts(given: Given) -> bool:
    return given.has("--reset-attention-mask") and not given.has(*_SAMPLES)


def _is_llama3_of_megatron(given: Given) -> bool:
    """Return True if Megatron's --use-rope-scaling has the same frequencies, whose other numbers are fixed there."""
    fixed = {"--low-freq-factor": 1, "--high-freq-factor": 4, "--original-max-position-embeddings": 8192}
    equal = all(read_number(given.value(flag)) == value for flag, value in fixed.items())
    return equal and given.value("--rope-scaling-type") == "llama3"


#: Conditions of rows on the other flags, by their words in the table; "above N" is of the row's own flag.
CONDITIONS: Mapping[str, Callable[[Given], bool]] = {
    "beside `--context-parallel-algo`": lambda given: given.has("--context-parallel-algo"),
    "ring, `--cp-window-size` above 1": _is_double_ring,
    "hybrid": lambda given: given.algorithm in ("hybrid_cp_algo", "a2a+p2p"),
    "beside `--hybrid-context-parallel` or `--dynamic-context-parallel`": lambda given: given.has(*_SCHEDULERS),
    "`--hybrid-context-parallel` or `--dynamic-context-parallel`, neither `--mtp-num-layers` nor losses of experts": (
        _schedules_samples
    ),
    "learned positions without `--reset-position-ids`": lambda given: (
        given.positions == "learned_absolute"
        and not given.has("--use-rotary-position-embeddings", "--reset-position-ids")
    ),
    "beside `--is-instruction-dataset`, `--pack`, `--neat-pack`": lambda given: given.has(*_SAMPLES),
    "beside MindSpeed": _is_mindspeeds,
    "without `--reset-attention-mask`": lambda given: (
        not given.has("--reset-attention-mask", "--dataloader-inter-document-masking", "--cp-plan-documents")
    ),
    "beside `--reset-attention-mask`": lambda given: given.has("--reset-attention-mask"),
    "less than `--seq-length`": _shows_fewer_keys,
    "other than `--kv-channels`": lambda given: (
        given.value("--query-pre-attn-scalar") != given.value("--kv-channels", "none")
    ),
    "`llama3` with factors 1 and 4 and 8192 positions": _is_llama3_of_megatron,
    "beside `--rope-scaling-type`": lambda given: given.has("--rope-scaling-type"),
    "ALiBi": lambda given: given.positions == "alibi",
    "not 0": lambda given: given.value("--mtp-num-layers") != "0",
    "expert or pipeline parallelism": _exchanges_rows,
    "rotary positions": lambda given: (
        given.positions == "rope" or given.has("--use-rotary-position-embeddings", "--multi-latent-attention")
    ),
    "`--reset-attention-mask`, unless `--is-instruction-dataset`, `--pack` or `--neat-pack`": _restarts,
    "`--reset-attention-mask` beside MindSpeed": lambda given: (
        _is_mindspeeds(given)
        and (_restarts(given) or (given.has("--reset-attention-mask") and given.has("--reset-position-ids")))
    ),
    "no other `--spec`, no ALiBi, no experts": lambda given: _has_own_spec(given) and not _has_experts(given),
    "experts, no other `--spec`, no ALiBi": lambda given: _has_own_spec(given) and _has_experts(given),
}


def _condition(text: str, flag: str) -> Callable[[Given], bool]:
    """Return the test of a condition in words, as it stands in a row of a flag."""
    above = re.fullmatch("above ([0-9]+)", text)
    if above is None:
        return CONDITIONS[text] if text else _always
    bound = int(above[1])

    def is_above(given: Given) -> bool:
        number = read_number(given.value(flag, above[1]))
        return isinstance(number, str) or number > bound  # the value of another word is not known

    return is_above


def _flag_rules(row: dict[str, Any]) -> list[FlagRule]:
    """Return the rules of a row of flags.yaml."""
    (outcome,) = (outcome for outcome in Outcome if outcome.value in row)
    becomes = next((row[key] for key in ("instead", "to do", "value") if key in row), "")
    when = row.get("when", "")
    return [
        FlagRule(
            flag=flag,
            arity=_GIVEN_ARITIES.get(flag, 0),
            outcome=outcome,
            reason=row[outcome.value],
            value=value,
            settings=tuple(row.get("settings", {}).items()),
            becomes=ANOTHER_MODEL if row.get("instead") == "none" else becomes,
            when=when,
            holds=_condition(when, flag),
        )
        for flag in row["flag"].split()
        for value in row.get("is", [None])
    ]


def flag_of(setting: str) -> str:
    """Return the flag of a setting of Megatron."""
    return "--" + setting.replace("_", "-")


def _refused_rule(row: Unsupported) -> FlagRule:
    """Return the rule of a flag whose setting is not supported."""
    is_switch = row.valid in ("False", "True")
    valid = row.valid.replace("'", "")
    other = "" if is_switch or valid == "None" else f"other than {valid}"
    words = ", ".join(filter(None, (other, row.when)))
    # A flag that is left out has one of these values.
    instead = "leave the flag out" if valid in ("False", "None", "0", "0.0", "1") else valid
    return FlagRule(
        flag_of(row.setting),
        0 if is_switch else MANY if row.setting == "moe_router_load_balancing_type" else 1,
        Outcome.REFUSED,
        row.instead,
        becomes=ANOTHER_MODEL if row.another_model else instead,
        when=words,
        holds=partial(_is_refused, row) if words or not is_switch else _always,
    )


def _is_refused(row: Unsupported, given: Given) -> bool:
    """Return True if a start with these flags would refuse a setting."""
    if not given.has(flag_of(row.setting)):
        return False
    words = [read_number(text) for text in given.values[flag_of(row.setting)]]
    config = given.config
    setattr(config, row.setting, words[0] if len(words) == 1 else words or True)
    return row.problem(config) is not None


def _read_table() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table: dict[str, Any] = yaml.load(Path(__file__).with_name("flags.yaml").read_text("utf-8"), loader)
    return table


def names(text: str) -> frozenset[str]:
    """Return flags by their names without dashes."""
    return frozenset(f"--{name}" for name in text.split())


_TABLE = _read_table()

#: Flags by which a launch is known as one of MindSpeed, or of MindSpeed-LLM: Megatron has none of them.
MINDSPEED_FLAGS, LLM_FLAGS = names(_TABLE["mindspeed"]), names(_TABLE["mindspeed_llm"])
#: Flags without a row that change what the model computes -> why planned attention computes it, too.
MODEL_FLAGS = {f"--{name}": group["why"] for group in _TABLE["model"] for name in group["flags"].split()}
#: Flags without a row that change neither the model nor its batches.
OTHER_FLAGS = names(_TABLE["other"]) | MINDSPEED_FLAGS | LLM_FLAGS
#: What a launch does in place of a training: {"work", "words" in the name of its script, "flags"}.
OTHER_WORK: list[dict[str, str]] = _TABLE["other_work"]
#: Training scripts that have no place for the lines that plans need -> {"refused", "instead"}.
REFUSED_SCRIPTS: dict[str, dict[str, str]] = {row["script"]: row for row in _TABLE["scripts"]}
#: Settings whose flags have rows of their own in place of a refusal.
OWN_ROWS = tuple(_TABLE["own"].split())

_GIVEN_ARITIES = {
    flag: arity for name, arity in (("one", 1), ("many", MANY), ("any", ANY)) for flag in _TABLE["values"][name].split()
}

#: All rules. The first that fits a flag, its value and the other flags is applied.
RULES: tuple[FlagRule, ...] = (
    *(
        _refused_rule(row)
        for group in ("model", "arguments", "mindspeed")
        for row in unsupported(group)
        if row.setting not in OWN_ROWS and (not row.when or row.when in CONFIG_CONDITIONS)
    ),
    *(rule for row in _TABLE["rows"] for rule in _flag_rules(row)),
)

#: Number of values of each flag of the table.
ARITIES = {rule.flag: rule.arity for rule in RULES}

#: Flags that a conversion adds if they are not given; by hand where `becomes` says what to do.
ADDED_FLAGS = tuple(rule for row in _TABLE["added"] for rule in _flag_rules(row))
