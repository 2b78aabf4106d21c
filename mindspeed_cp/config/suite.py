"""The section `context_parallel_suite`: the algorithm that splits attention over the context, and its options."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from mindspeed_cp.algorithms import (
    ALGORITHMS,
    ALIASES,
    AUTO,
    AlgorithmOption,
    algorithm_name_error,
)
from mindspeed_cp.cluster.cluster import cluster_of, load_cluster
from mindspeed_cp.device.npu_profile import DEFAULTS, Need, profile_of_process, profile_variants
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import RANK_LIMIT, AttentionConfig, Topology
from mindspeed_cp.plan.transfers import PAIR_STREAMS
from mindspeed_cp.schema.base import PositiveFloat, PositiveInt, Section
from mindspeed_cp.schema.messages import bad_value, format_value, list_keys, unknown_key
from mindspeed_cp.schema.numbers import divisors
from mindspeed_cp.schema.yaml_file import apply_overrides, read_settings_file, with_file_location

#: Option that `auto` takes too: a limit of the ranks' memory, not a choice.
TOKEN_CAP_OPTION = "max_seqlen_per_dp_cp_rank"

#: Megatron's [ranks of an all-to-all, ranks of a ring], of which the first is the degree of the hybrid.
SIZES_KEY = "hierarchical_context_parallel_sizes"

RankCount = Annotated[int, Field(ge=1, le=RANK_LIMIT)]


class SuiteSettings(Section):
    """How attention is split over the context: the section `context_parallel_suite`."""

    alias_keys: ClassVar[tuple[str, ...]] = ("cp_comm_type", SIZES_KEY)

    model_config = ConfigDict(extra="allow")  # options of the algorithm, which _check_keys checks

    context_parallel_size: RankCount = Field(default=1, description="ranks that share the context of a row")
    nodes: RankCount = Field(
        default=1, description="nodes of these ranks, with equally many ranks each; ranks are numbered node by node"
    )
    algorithm: str = Field(
        default="ring",
        description="ring (also p2p, megatron_cp_algo), double_ring, ulysses (a2a, ulysses_cp_algo), hybrid (a2a+p2p, "
        "hybrid_cp_algo), all_gather (allgather, kvallgather_cp_algo), direct, hierarchical, or a registered name; "
        "auto: the algorithm and options with the shortest simulated time for the first rows of the run; cp_comm_type "
        "is another name of the key",
    )
    algorithm_modules: list[str] | None = Field(
        default=None,
        description="Python modules to import first, which add algorithms with register_algorithm; null: none",
    )
    cluster: str | None = Field(
        default=None,
        description="preset (docs/simulate.md lists them) or YAML file with the speeds of devices and links, by which "
        "hierarchical and auto decide; null: a2",
    )
    backend: Literal["auto", "cpu", "npu", "cuda"] = Field(
        default="auto", description="implementation of the attention operator; auto: of the device"
    )
    npu_profile: str | None = Field(
        default=None,
        min_length=1,
        description="npu backend: file of `mindspeed-cp doctor --device npu --npu-profile FILE`, by which each null of "
        "npu_lowering, npu_alibi, npu_statistics and npu_key_gaps becomes the fastest variant that this device "
        "computes right; null: their first values",
    )
    npu_lowering: Literal["tnd", "masks"] | None = Field(
        default=None,
        description="npu backend: tnd: packed sequences and compressed masks; masks: one call per step with a mask of "
        "its rows and keys; use masks if `doctor` shows that your CANN fails on packed sequences; null: by "
        "npu_profile, without one tnd",
    )
    npu_alibi: Literal["split", "shared"] | None = Field(
        default=None,
        description="npu backend, ALiBi: split: one call per square; shared: squares beside the diagonal share a call, "
        "whose statistics are corrected, which takes far fewer calls; null: by npu_profile, without one split",
    )
    npu_merge: Literal["fp32", "ring_update", "triton"] = Field(
        default="fp32",
        description="npu backend, merge of partial results: fp32: in torch; ring_update: npu_ring_attention_update; "
        "triton: one kernel, needs triton-ascend; use the latter two to save kernel launches if `doctor` passes them",
    )
    npu_statistics: Literal["max_sum", "lse"] | None = Field(
        default=None,
        description="npu backend, statistics that the gradient gets: max_sum: largest score and sum of a row over all "
        "keys; lse: lse and 1, which keeps less for the backward; null: by npu_profile, without one max_sum",
    )
    npu_key_gaps: Literal["copied", "skipped"] | None = Field(
        default=None,
        description="npu backend, keys between those of a call: copied: the call gets a copy without them; skipped: "
        "they are sequences without queries, without a copy; null: by npu_profile, without one copied",
    )
    npu_precision: Literal["input", "fp16", "fp32"] = Field(
        default="input",
        description="npu backend, type that the operator computes in: input: that of q, k and v, to which each call "
        "rounds its result; fp16: rows in bf16 are converted and gradients scaled, so that each call rounds eight "
        "times finer; a number above 65,504 becomes infinite; fp32: rows are converted, and results are rounded once; "
        "slower, use it to tell rounding from other errors",
    )
    p2p_groups: Literal["auto", "batched", "directional"] = Field(
        default="auto",
        description="on devices: batched: one launch for all messages of a step that are due at once; directional: a "
        "group per direction, so that each neighbour has one stream for sending and one for receiving; auto: "
        "directional for rings (one cycle), else batched",
    )
    hccl_buffer_mb: PositiveInt | None = Field(
        default=None,
        description="MB of each of the two buffers of an HCCL communicator; null: HCCL_BUFFSIZE, and P2P_HCCL_BUFFSIZE "
        "for communicators of pairs (directional groups), where the variable takes precedence over this key",
    )
    timeout_seconds: PositiveFloat = Field(
        default=600.0, description="time that a rank waits for another before it fails"
    )
    verify_plans: bool = Field(
        default=False,
        description="prove every plan before it runs, in the thread that builds it, and compare the batches of all "
        "ranks before each step instead of in it",
    )

    @classmethod
    def key_names(cls) -> tuple[str, ...]:
        """Return the names of all keys that the section accepts."""
        return (*cls.model_fields, *options_by_name(), *cls.alias_keys)

    @property
    def topology(self) -> Topology:
        """The context-parallel ranks: the second input of build_plan."""
        return Topology(self.nodes, self.context_parallel_size // self.nodes, self.cluster)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the algorithm that were given, as build_plan takes them."""
        return dict(self.model_extra or {})

    def npu_options(self, attention: AttentionConfig, dtype: str, deterministic: bool) -> dict[str, str]:
        """Return the options of the npu backend for an attention.

        Args:
            attention: attention of a layer.
            dtype: "fp32", "fp16" or "bf16".
            deterministic: True under torch.use_deterministic_algorithms.

        Raises:
            SettingError: npu_profile cannot be read, or leaves no variant that is right.
        """
        variants = {option: getattr(self, f"npu_{option}") for option in DEFAULTS}
        variants = {option: variant for option, variant in variants.items() if variant is not None}
        given = {"merge": self.npu_merge, "precision": self.npu_precision, **variants}
        if self.npu_profile is None:
            return DEFAULTS | given
        computed = dtype if self.npu_precision == "input" else self.npu_precision
        need = Need.of_attention(attention, computed, deterministic)
        return given | profile_variants(self.npu_profile, need, tuple(variants.items()))

    @property
    def uses_directional_groups(self) -> bool:
        """True if transfers between devices use directional groups."""
        return self.p2p_groups == "directional" or (self.p2p_groups == "auto" and self.algorithm in PAIR_STREAMS)

    @property
    def hccl_options(self) -> dict[str, int]:
        """Options of HCCL's groups; see mindspeed_cp.comm.directional_groups.HCCL_GROUP_OPTIONS."""
        return {} if self.hccl_buffer_mb is None else {"buffer_mb": self.hccl_buffer_mb}

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        """Translate keys of other projects; check that the other keys are options of some algorithm."""
        if not isinstance(values, dict):
            return values
        import_modules(values.get("algorithm_modules"))
        values = _translate_megatron_keys(values)
        options = options_by_name()
        for key in values:
            if key not in cls.model_fields and key not in options:
                raise unknown_key(cls, key, key)
        if "algorithm" in values:
            values["algorithm"] = read_algorithm("algorithm", values["algorithm"])
        # null is the default of every option
        return {key: value for key, value in values.items() if key in cls.model_fields or value is not None}

    @model_validator(mode="after")
    def _check_options(self) -> SuiteSettings:
        check_divides("nodes", self.nodes, "context_parallel_size", self.context_parallel_size)
        table = options_by_name()
        for name, value in self.options.items():
            if self.algorithm == AUTO and name != TOKEN_CAP_OPTION:
                rule = "must be left out with algorithm: auto, which chooses options too; or name the algorithm"
                raise bad_value(name, value, rule)
            owners = table[name]
            option = owners.get(self.algorithm, next(iter(owners.values())))
            value = option.with_words(value)
            problem = option.problem(value, self.context_parallel_size)
            if problem is not None:
                raise bad_value(name, value, f"must be {problem} or null")
            assert self.model_extra is not None
            self.model_extra[name] = value
            if self.algorithm != AUTO and self.algorithm not in owners:
                rule = (
                    f"algorithm {self.algorithm} has no such option; algorithms that have it: {', '.join(owners)}; "
                    f"to leave it out: {name}: null, on the command line --set context_parallel_suite.{name}=null"
                )
                raise bad_value(name, value, rule)
        if self.npu_profile is not None:
            profile_of_process(self.npu_profile)
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Iterable[str] = (), ranks: int = 1) -> SuiteSettings:
        """Read the section from a YAML file that consists of it, or that has it as `context_parallel_suite:` (a
        settings file, or Megatron's own YAML).

        The context_parallel_size of Megatron's section `model_parallel` holds here too; two different sizes are an
        error. Where the file and the overrides give none, it is `ranks`. Raises ConfigError, one line.
        """
        file = apply_overrides(read_settings_file(path), overrides)
        name = "context_parallel_suite"
        if name not in file.data:
            import_modules(file.data.get("algorithm_modules"))
            unknown = [key for key in file.data if key not in cls.key_names()]
            if unknown:
                error = unknown_key(cls, unknown[0], unknown[0])
                raise ConfigError(f"{file.location(unknown[0])}: there is no section {name}, and {error}")
            values = {"context_parallel_size": ranks, **file.data}
            return with_file_location(file, "", lambda: cls._of_known_cluster(values))
        section = {} if file.data[name] is None else file.data[name]
        if not isinstance(section, dict):
            keys = list_keys(cls.key_names())
            raise ConfigError(f"{file.location(name)}: {name}: must be a section; {keys}")
        parallel = file.data.get("model_parallel")
        outer = parallel.get("context_parallel_size") if isinstance(parallel, dict) else None
        if section.setdefault("context_parallel_size", outer or ranks) != (outer or section["context_parallel_size"]):
            key = f"{name}.context_parallel_size"
            rule = f"differs from model_parallel.context_parallel_size = {outer}; give the same, or only one"
            raise ConfigError(f"{file.location(key)}: {bad_value(key, section['context_parallel_size'], rule)}")
        return with_file_location(file, f"{name}.", lambda: cls._of_known_cluster(section))

    @classmethod
    def _of_known_cluster(cls, values: dict[str, Any]) -> SuiteSettings:
        suite = cls(**values)
        check_cluster(suite.cluster, suite.topology)
        return suite


def _translate_megatron_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the section with the project's keys and names in place of Megatron's and MindSpeed's.

    Raises:
        SettingError: keys contradict each other.
    """
    values = dict(values)
    if "cp_comm_type" in values:
        comm_type = values.pop("cp_comm_type")
        name = read_algorithm("cp_comm_type", comm_type)
        if "algorithm" in values and read_algorithm("algorithm", values["algorithm"]) != name:
            raise bad_value("cp_comm_type", comm_type, f"differs from algorithm = {values['algorithm']}; give only one")
        values["algorithm"] = name
    sizes = values.pop(SIZES_KEY, None)
    if sizes is None:
        return values
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise bad_value(SIZES_KEY, sizes, "must be two whole numbers, [ranks of an all-to-all, ranks of a ring]")
    given = values.get("algorithm")
    if given is None or read_algorithm("algorithm", given) != "hybrid":
        problem = "no algorithm is given" if given is None else f"algorithm = {given} does not use it"
        raise bad_value(SIZES_KEY, sizes, f"{problem}; give algorithm: hybrid (Megatron's a2a+p2p), or remove the key")
    ranks = values.get("context_parallel_size", 1)
    if type(ranks) is int and sizes[0] * sizes[1] != ranks:
        pairs = ", ".join(f"[{n}, {ranks // n}]" for n in divisors(ranks))
        raise bad_value(SIZES_KEY, sizes, f"its product must be context_parallel_size = {ranks}; valid: {pairs}")
    degree = values.get("ulysses_degree")
    if degree is not None and degree != sizes[0]:
        raise bad_value(SIZES_KEY, sizes, f"differs from ulysses_degree = {format_value(degree)}; give only one")
    return {**values, "ulysses_degree": sizes[0]}


def read_algorithm(key: str, value: Any) -> str:
    """Return the project's name of an algorithm that is given under any of its names."""
    if isinstance(value, list):
        valid = ", ".join([*ALGORITHMS, *ALIASES])
        raise bad_value(key, value, f"one algorithm per layer is not in this version; give one of {valid}")
    if value == AUTO:
        return AUTO
    problem = algorithm_name_error(value)
    if problem is not None:
        raise bad_value(key, value, problem.replace("valid: ", f"valid: {AUTO}, ", 1))
    return ALIASES.get(value, value)


def options_by_name() -> dict[str, dict[str, AlgorithmOption]]:
    """Return for each option name the options of that name, by algorithm."""
    table: dict[str, dict[str, AlgorithmOption]] = {}
    for algorithm in ALGORITHMS.values():
        for name, option in algorithm.options.items():
            table.setdefault(name, {})[algorithm.name] = option
    return table


def check_divides(key: str, value: int, number_key: str, number: int) -> None:
    """Raise SettingError unless a value divides the number of another key."""
    if number % value:
        valid = ", ".join(map(str, divisors(number)))
        raise bad_value(key, value, f"must divide {number_key} = {number}; valid: {valid}")


def check_cluster(cluster: str | None, topology: Topology, key: str = "cluster") -> None:
    """Raise SettingError if there is no such cluster, or it has no such nodes.

    Args:
        cluster: preset or file; None: the default, which nodes of any size fit.
        topology: the context-parallel ranks.
        key: name of the setting, for the error.
    """
    if cluster is None:
        return
    try:
        if cluster == "":  # a topology takes it for none
            load_cluster(cluster)
        cluster_of(topology)
    except ConfigError as error:
        raise bad_value(key, cluster, f"cannot be used: {error}") from None


def import_modules(names: Any) -> None:
    """Import the modules that register algorithms; other types of the value are reported as an invalid field."""
    for name in names if isinstance(names, list) else ():
        try:
            importlib.import_module(name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            rule = f"{name!r} cannot be imported: {error}; give modules that Python finds, for example by PYTHONPATH"
            raise bad_value("algorithm_modules", names, rule) from None
