"""Flags of Megatron and MindSpeed to settings and remaining flags, by the table of rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.config.candidates import SUITE_SECTION
from mindspeed_cp.config.settings import make_settings
from mindspeed_cp.config.suite import read_algorithm
from mindspeed_cp.convert.flag_table import (
    ADDED_FLAGS,
    ARITIES,
    LLM_FLAGS,
    MODEL_FLAGS,
    OTHER_FLAGS,
    REFUSED_SCRIPTS,
    RULES,
    SPEC,
    SUITE_FILE,
    Flag,
    FlagRule,
    Given,
    Outcome,
    flag_of,
    read_flags,
    read_number,
)
from mindspeed_cp.convert.launch import Launch, find_launch, other_work, record
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.messages import format_value
from mindspeed_cp.schema.yaml_file import SettingsFile, with_file_location

#: The algorithm that Megatron takes where no flag names one.
MEGATRON_ALGORITHM = "p2p"

#: Training script that builds its layers from --spec.
SCRIPT_WITH_SPEC = "pretrain_gpt.py"

#: Processes of a node, and nodes, for torchrun.
_PROCESS_FLAGS, _NODE_FLAGS = ("--nproc_per_node", "--nproc-per-node"), ("--nnodes",)

#: Kinds of parallelism whose ranks hold one replica.
REPLICA = ("tensor-model", "pipeline-model", "context")

_SCRIPT_LINES = "three to five lines of it: arguments, model provider and forward step (docs/megatron.md)"
_SCRIPT_REASON = "it takes --cp-plan and the plans from mindspeed_cp.megatron.pretrain"
_LLM_LINES = (
    "start Megatron's pretrain_gpt.py with `import mindspeed.megatron_adaptor`, or a script of yours, and these flags "
    "without MindSpeed-LLM's own; a get_batch of yours may read its data sets: planned_batch_from (docs/mindspeed.md)"
)
_LLM_REASON = "MindSpeed-LLM's adaptor brings model and rotary positions of its own, beside which plans are refused"


@dataclass(frozen=True)
class Change:
    """What became of a flag, and why.

    Attributes:
        flag: the flag and its values as given; of an added flag, as added; a setting that no flag gave is its key;
            the training script, where it needs lines.
        outcome: what became of it.
        became: settings, new words, the alternative, or what to do; empty if it stays or is left out.
        reason: why.
    """

    flag: str
    outcome: Outcome
    became: str
    reason: str


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        suite: the settings, checked; None if a flag is refused.
        sections: sizes of the launch for `plan` and `simulate`: sections model, train and data; empty without sizes.
        kept: words behind the training script that stay.
        added: words that come to them.
        changes: a row for each flag, in the order of the command line, and for each added flag.
        notes: remarks on what was recorded, and on sizes that no flag gives.
    """

    suite: SuiteSettings | None
    sections: dict[str, dict[str, Any]]
    kept: tuple[str, ...]
    added: tuple[str, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any] | None:
        """The given keys of context_parallel_suite, the ranks and the algorithm first; None without settings."""
        if self.suite is None:
            return None
        values, options = self.suite.model_dump(exclude_unset=True), self.suite.options
        first = [key for key in ("context_parallel_size", "nodes", "algorithm") if key in values]
        rest = {key: value for key, value in values.items() if key not in (*first, *options)}
        return {key: values[key] for key in first} | options | rest

    @property
    def flags(self) -> tuple[str, ...]:
        """The remaining command line behind the training script, with the added flags."""
        return (*self.kept, *self.added)

    @property
    def refused(self) -> tuple[Change, ...]:
        """The rows that are refused: no settings are written."""
        return tuple(change for change in self.changes if change.outcome is Outcome.REFUSED)

    @property
    def to_do(self) -> tuple[Change, ...]:
        """The rows without which the launch cannot be started as it is printed: by hand, or unknown."""
        return tuple(change for change in self.changes if change.outcome in (Outcome.BY_HAND, Outcome.UNKNOWN))

    @property
    def exit_code(self) -> int:
        """0: ready; 1: refused; 3: settings are made, and rows are to be looked at by hand."""
        return 1 if self.refused else 3 if self.to_do else 0

    def yaml(self) -> str:
        """Return the sections as a YAML file; only with settings."""
        sections = {SUITE_SECTION: self.settings, **self.sections}
        return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the conversion as JSON has it."""
        changes = [asdict(change) for change in self.changes]
        values = {"flags": list(self.flags), "changes": changes, "notes": list(self.notes)}
        return {SUITE_SECTION: self.settings, **self.sections, **values}


def convert_flags(words: Sequence[str], output: str = "suite.yaml") -> Conversion:
    """Convert flags as a training script takes them.

    Args:
        words: flags and their values, each a word.
        output: path of the settings, for the flag that names it.

    Raises:
        ConfigError: a flag lacks its value or has one that the settings do not take, or none is converted.
    """
    launch = Launch((), None, tuple(words))
    if not launch.is_megatrons:
        raise ConfigError(
            "no flag of context parallelism among the flags, such as --context-parallel-size; give them behind --"
        )
    if (work := other_work(launch)) is not None:
        raise ConfigError(f"the flags are of {work}; give those of a training with PyTorch")
    return convert_launch(launch, output)


def convert_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    output: str = "suite.yaml",
    environment: Mapping[str, str] | None = None,
) -> tuple[Launch, Conversion]:
    """Convert what a launch script starts: it is run with recorders in place of programs.

    Args:
        path: the script.
        arguments: its arguments.
        output: path of the settings, for the flag that names it.
        environment: variables of its environment, which is small without them.

    Raises:
        ConfigError: the script cannot be read, it starts no training or several, or as for flags.
    """
    launch = find_launch(record(path, arguments, environment), str(path))
    return launch, convert_launch(launch, output)


def convert_launch(launch: Launch, output: str = "suite.yaml") -> Conversion:
    """Convert the flags of a launch; see :func:`convert_flags`."""
    words, flags = read_flags(launch.words, ARITIES)
    given = Given({flag.name: flag.values for flag in flags})
    work = _Work(given)
    last = {flag.name: number for number, flag in enumerate(flags)}
    for number, flag in enumerate(flags):
        work.convert(flag, counts=last[flag.name] == number)
    work.add_unchanged(flags)
    work.add_defaults(launch)
    work.add_flags(output, launch.entry)
    result = Conversion(None, {}, (*words, *work.remaining), tuple(work.added), tuple(work.changes), launch.notes)
    if result.refused:
        return result
    result = replace(result, suite=work.suite(launch.name))
    sections, note = read_sizes(given, result.settings or {})
    return replace(result, sections=sections, notes=(*result.notes, note) if note else result.notes)


@dataclass
class _Work:
    """A conversion at work.

    Attributes:
        given: the flags as conditions read them.
        settings: keys of the settings, with value and the flag that gave it.
        remaining: words of the remaining command line.
        added: words that are added to it.
        changes: rows so far.
    """

    given: Given
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    remaining: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def convert(self, flag: Flag, counts: bool) -> None:
        """Convert a flag; `counts` is False if a later flag of the same name takes precedence.

        Raises:
            ConfigError: the training script would refuse the value.
        """
        rule = next((row for row in RULES if row.flag == flag.name and row.fits(flag.values, self.given)), None)
        if rule is None:
            self.remaining += flag.words
        elif not counts and rule.outcome is not Outcome.STAYS:
            outcome = Outcome.STAYS if rule.outcome.stays else Outcome.REMOVED
            self._row(flag, outcome, "", "a later one takes precedence")
        else:
            self._apply(rule, flag)

    def _apply(self, rule: FlagRule, flag: Flag) -> None:
        became = rule.becomes
        if rule.settings:
            settings = {key: _read_value(flag) if value is None else value for key, value in rule.settings}
            self.settings |= {key: (value, flag.text) for key, value in settings.items()}
            became = ", ".join(f"{key}: {format_value(value).strip(chr(34))}" for key, value in settings.items())
        if rule.outcome is Outcome.REPLACED:
            became = f"{flag.name} {rule.becomes}"
            self.remaining += [flag.name, rule.becomes]
        self._row(flag, rule.outcome, became, rule.reason)

    def _row(self, flag: Flag, outcome: Outcome, became: str, reason: str) -> None:
        self.changes.append(Change(flag.text, outcome, became, reason))
        self.remaining += flag.words if outcome.stays else ()

    def add_unchanged(self, flags: Sequence[Flag]) -> None:
        """Add rows for the flags that stay without a rule: one for each reason, and one for each unknown flag."""
        stay: dict[str, dict[str, None]] = {}
        for flag in flags:
            if flag.name in MODEL_FLAGS:
                stay.setdefault(MODEL_FLAGS[flag.name], {})[flag.text] = None
        self.changes += [Change(", ".join(texts), Outcome.STAYS, "", reason) for reason, texts in stay.items()]
        known = {*ARITIES, *MODEL_FLAGS, *OTHER_FLAGS, *(rule.flag for rule in ADDED_FLAGS)}
        reason = "no flag of the Megatron and MindSpeed that are known here"
        instead = "see that it changes neither attention, positions, documents nor the model"
        unknown = dict.fromkeys(flag.text for flag in flags if flag.name not in known)
        self.changes += [Change(text, Outcome.UNKNOWN, instead, reason) for text in unknown]

    def add_defaults(self, launch: Launch) -> None:
        """Add what the flags mean by being left out: the algorithm, and the nodes of the launcher."""
        if not self.given.has("--context-parallel-size"):
            reason = "--context-parallel-size is not given: Megatron's default is one rank"
            self.changes.append(Change("context_parallel_size", Outcome.SETTING, "context_parallel_size: 1", reason))
        named = self.given.has("--context-parallel-algo", "--cp-comm-type")
        if not named and "algorithm" not in self.settings:
            algorithm = read_algorithm("algorithm", MEGATRON_ALGORITHM)
            reason = (
                f"neither --context-parallel-algo nor --cp-comm-type is given: Megatron's default is the {algorithm}"
            )
            if not LLM_FLAGS.isdisjoint(self.given.values):
                reason += "; that of MindSpeed-LLM up to 2.3.0 was ulysses: give that in the settings there"
            self.settings["algorithm"] = (algorithm, "the default of --cp-comm-type")
            self.changes.append(Change("algorithm", Outcome.SETTING, f"algorithm: {algorithm}", reason))
        self._add_nodes(launch.launcher)

    def _add_nodes(self, launcher: Sequence[str]) -> None:
        """Set `nodes` if a group spans several: ranks are numbered tensor-parallel first, then context-parallel."""
        _, flags = read_flags(launcher, dict.fromkeys((*_PROCESS_FLAGS, *_NODE_FLAGS), 1))
        of_torchrun = Given({flag.name.replace("_", "-"): flag.values for flag in flags})
        started = [of_torchrun.number(name, 0) or 0 for name in ("--nnodes", "--nproc-per-node")]
        replica = [self.given.number(f"--{kind}-parallel-size", 1) or 0 for kind in REPLICA]
        if all(started) and all(replica) and prod(started) % prod(replica):
            product = " x ".join(f"{kind} {size}" for kind, size in zip(REPLICA, replica, strict=True))
            reason = f"{product} = {prod(replica)} ranks, which do not divide the {prod(started)} of the launch"
            became = "give sizes whose product divides the ranks of the launch; Megatron refuses these"
            self.changes.append(Change("torchrun", Outcome.BY_HAND, became, reason))
        flag = next((flag for flag in reversed(flags) if flag.name in _PROCESS_FLAGS), None)
        sizes = ("--context-parallel-size", "--tensor-model-parallel-size")
        ranks, tensor_ranks = (self.given.number(name, 1) for name in sizes)
        if flag is None or not ranks or not tensor_ranks or ranks == 1:
            return
        processes, together = read_number(flag.values[0]), ranks * tensor_ranks
        product, where = f"tensor- and context-parallel ranks are {together} in a row", "nodes that are not known here"
        if isinstance(processes, int) and processes > 0:
            nodes, where = together // processes, f"no whole nodes of {processes} processes"
            if together <= processes:
                return
            if not together % processes and not ranks % nodes:
                self.settings["nodes"] = (nodes, flag.text)
                reason = f"{product}, on nodes of {processes}"
                self.changes.append(Change(flag.text, Outcome.STAYS_AS_SETTING, f"nodes: {nodes}", reason))
                return
        reason = f"{product}, on {where}; give nodes in the settings if a group spans several"
        self.changes.append(Change(flag.text, Outcome.STAYS, "", reason))

    def add_flags(self, output: str, entry: str | None) -> None:
        """Add the flags that planned attention needs, and tell what the training script needs itself."""
        script = "the training script" if entry is None else entry
        name = PurePosixPath(script).name
        for rule in ADDED_FLAGS:
            if self.given.has(rule.flag) or not rule.holds(self.given):
                continue
            words = [rule.flag, *([output] if rule.value == SUITE_FILE else (rule.value or "").split())]
            by_hand = rule.becomes
            takes_spec = entry is None or name in (SCRIPT_WITH_SPEC, *REFUSED_SCRIPTS)
            if rule.value == SPEC and not by_hand and not takes_spec:
                by_hand = (
                    f"add it to the flags if {entry} builds its layers from args.spec, as pretrain_gpt.py does; if it "
                    "makes a spec of its own, call mindspeed_cp.megatron.install there (docs/megatron.md, A script "
                    "with a batch, loss and layers of your own)"
                )
            outcome = Outcome.BY_HAND if by_hand else Outcome.ADDED
            self.changes.append(Change(" ".join(words), outcome, by_hand, rule.reason))
            self.added += [] if by_hand else words
        if name in REFUSED_SCRIPTS:
            row = REFUSED_SCRIPTS[name]
            self.changes.append(Change(script, Outcome.REFUSED, row["instead"], row["refused"]))
        elif self.given.has(*LLM_FLAGS):
            self.changes.append(Change(script, Outcome.BY_HAND, _LLM_LINES, _LLM_REASON))
        else:
            self.changes.append(Change(script, Outcome.NEXT, _SCRIPT_LINES, _SCRIPT_REASON))

    def suite(self, name: str | None) -> SuiteSettings:
        """Return the settings, checked; an error names the flag that gave the value."""
        values = {"context_parallel_size": (1, "the default of --context-parallel-size")} | self.settings
        section = {key: value for key, (value, _) in values.items()}
        place = "" if name is None else f"{name}: "
        lines: dict[str, int | str] = {f"{SUITE_SECTION}.{key}": f"{place}{flag}" for key, (_, flag) in values.items()}
        file = SettingsFile(name or "flags", {SUITE_SECTION: section}, lines)
        return with_file_location(file, f"{SUITE_SECTION}.", lambda: SuiteSettings(**section))


def _read_value(flag: Flag) -> Any:
    """Return the value of a flag: a number, a list of these, or text."""
    values = [read_number(text) for text in flag.values]
    return values if ARITIES[flag.name] != 1 else values[0]


# The sizes of a launch's model, as sections of the settings that `plan` and `simulate` read.


_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
#: Keys that are valid only beside another one.
_LATENT = frozenset({"kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"})
_EXPERTS = frozenset({"moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size"})
#: Whole numbers: flag -> section and key.
_NUMBERS = {
    **{
        flag_of(key): ("model", key)
        for key in (*_NEEDED, "num_query_groups", "kv_channels", "ffn_hidden_size", *sorted(_LATENT | _EXPERTS))
    },
    "--qk-nope-head-dim": ("model", "qk_head_dim"),
    "--qk-rope-head-dim": ("model", "qk_pos_emb_head_dim"),
    "--moe-intermediate-size": ("model", "moe_ffn_hidden_size"),
    "--num-experts": ("model", "num_moe_experts"),
    "--tensor-model-parallel-size": ("train", "tensor_model_parallel_size"),
    "--seq-length": ("data", "seq_length"),
}
MAX_LAYERS = 10_000


def read_sizes(given: Given, suite: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the sections model, train and data, and a remark; without sections if the sizes cannot be known.

    Args:
        given: the flags of the launch.
        suite: section context_parallel_suite, with which the sections must be valid.
    """
    sections: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "data": {}}
    for flag, (section, key) in _NUMBERS.items():
        number = given.number(flag, 0)
        if number:
            sections[section][key] = number
    model, train = sections["model"], sections["train"]
    try:
        missing = [flag_of(key) for key in _NEEDED if key not in model]
        if missing:
            raise ConfigError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given")
        _complete(model, given)
        train["bf16"] = given.has("--bf16", "--fp16")
        if given.has("--sequence-parallel") and "tensor_model_parallel_size" in train:
            train["sequence_parallel"] = True
        sections = {name: keys for name, keys in sections.items() if keys}
        make_settings(SettingsFile("the flags", {SUITE_SECTION: suite, **sections}))
    except ConfigError as error:
        return {}, f"no sizes of the model are written for plan and simulate: {error}"
    return sections, "fp16 is modelled as bf16, which is as wide" if given.has("--fp16") else ""


def _complete(model: dict[str, Any], given: Given) -> None:
    """Add what is no single number, and leave out what only other models read."""
    latent = given.has("--multi-latent-attention", "--multi-head-latent-attention")
    absent = (frozenset() if latent else _LATENT) | (frozenset() if "num_moe_experts" in model else _EXPERTS)
    if not given.has("--group-query-attention") or latent:  # Megatron reads the groups only with this flag
        absent |= {"num_query_groups"}
    if latent:
        model["multi_latent_attention"] = True
        absent |= {"kv_channels"}
    for key in absent & model.keys():
        del model[key]
    model["swiglu"] = given.has("--swiglu")
    if "ffn_hidden_size" not in model and model["swiglu"]:
        model["ffn_hidden_size"] = int(4 * model["hidden_size"] * 2 / 3 / 64) * 64  # as Megatron's arguments
    if re.fullmatch(r"\d{1,9},0", text := given.value("--window-size").replace(" ", ",")):
        model["window_size"] = [int(text.split(",")[0]), 0]
        if given.has("--window-attn-skip-freq"):
            model["window_attn_skip_freq"] = _pattern("--window-attn-skip-freq", given)
    if "num_moe_experts" in model and given.has("--moe-layer-freq"):
        model["moe_layer_freq"] = _pattern("--moe-layer-freq", given)
    if given.value("--softmax-type") in ("off-by-one", "learnable"):
        model["softmax_type"] = given.value("--softmax-type")
    kind = given.value("--position-embedding-type")
    model["position_embedding_type"] = "alibi" if kind == "alibi" else "rope" if kind in ("rope", "mrope") else "none"


def _pattern(flag: str, given: Given) -> int | list[int]:
    """Return a frequency of layers: N, or a list as Megatron's scripts write it: ([0]*1+[1]*3)*2.

    Raises:
        ConfigError: it is no such text.
    """
    text = given.value(flag).replace(" ", "")
    if re.fullmatch("[0-9]{1,5}", text):
        return int(text)
    whole = re.fullmatch(r"\((.*)\)(?:\*([0-9]{1,5}))?", text)
    inner, times = (whole[1], int(whole[2] or 1)) if whole else (text, 1)
    layers: list[int] = []
    for term in inner.split("+"):
        part = re.fullmatch(r"\[([0-9]{1,5}(?:,[0-9]{1,5})*)\](?:\*([0-9]{1,5}))?", term)
        numbers = [int(number) for number in part[1].split(",")] if part else []
        repeats = int(part[2] or 1) if part else 1
        if not 0 < len(numbers) * repeats * times <= MAX_LAYERS or len(text) > 200:
            raise ConfigError(f"{flag} {given.value(flag)}: is not understood here")
        layers += numbers * repeats
    return layers * times
