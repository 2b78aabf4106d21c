"""The section `context_parallel_suite`: the algorithm that splits attention over the context, and its options.

Megatron's and MindSpeed's names are read too, and become ours: `cp_comm_type`, the names of algorithms in both, and
`hierarchical_context_parallel_sizes`, which is the hybrid's degree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mindspeed_cp.config_errors import bad_value, show
from mindspeed_cp.config_file import in_file, override, read_settings_file
from mindspeed_cp.config_sections import Count, Natural, Positive, Section
from mindspeed_cp.config_variants import check_choice
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import (
    ALGORITHMS,
    ALIASES,
    AUTO,
    LATER_ALGORITHMS,
    MOST_RANKS,
    Topology,
    algorithm_name,
    algorithm_options,
    no_algorithm,
)

__all__ = ["ALSO_READ", "LATER_ALGORITHMS", "LATER_KEYS", "SuiteSettings"]

#: Keys of Megatron that nothing uses yet, and what comes nearest.
LATER_KEYS = {
    "hybrid_context_parallel": "algorithm: hierarchical places every document by its cost",
}

#: Options of HCCL's groups that lanes cannot have, and the variable of HCCL that says the same for every communicator.
NETWORK = {"hccl_traffic_class": "HCCL_RDMA_TC", "hccl_service_level": "HCCL_RDMA_SL"}

SIZES = "hierarchical_context_parallel_sizes"

#: The option that `auto` takes too: it is no choice, but what the ranks' memory allows.
BOUND = "max_seqlen_per_dp_cp_rank"
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
ALSO_READ = ("cp_comm_type", SIZES, *LATER_KEYS)


class SuiteSettings(Section):
    """How attention is split over the context: the section `context_parallel_suite`."""

    also_read: ClassVar[tuple[str, ...]] = ("cp_comm_type", SIZES)

    context_parallel_size: Ranks = Field(default=1, description="ranks that share the context of one row")
    nodes: Ranks = Field(
        default=1, description="nodes that these ranks are on, equally many on each, numbered node by node"
    )
    algorithm: str = Field(
        default="ring",
        description="ring (also p2p, megatron_cp_algo), double_ring, ulysses (a2a, ulysses_cp_algo), hybrid (a2a+p2p, "
        "hybrid_cp_algo), all_gather (allgather, kvallgather_cp_algo), direct or hierarchical; auto: the one, with "
        "its options, that is simulated fastest for rows like the run's; the key may also be cp_comm_type",
    )
    per_batch: bool = Field(
        default=False,
        description="algorithm: auto: not one for the whole run, but up to four, of which every row takes the one that "
        "is estimated fastest for it",
    )
    also: list[str] | None = Field(
        default=None,
        description="other algorithms, each with its options after colons, such as hybrid:ulysses_degree=4: every row "
        "takes the one, of these and the algorithm above, that is estimated fastest for it; null: all take that",
    )
    layout: Literal["zigzag", "contiguous", "balanced"] | None = Field(
        default=None,
        description="how documents are cut over ranks, for all but ulysses and hierarchical; balanced: short ones stay "
        "whole; null: zigzag",
    )
    cp_window_size: Count | None = Field(
        default=None, description="double_ring: ranks of an inner ring; null: the ranks of a node"
    )
    ulysses_degree: Count | None = Field(
        default=None,
        description="hybrid: ranks that split heads among them; null: the largest divisor of the ranks of a node that "
        "is neither all ranks nor more than the heads; hierarchical_context_parallel_sizes: [degree, rest] says "
        "the same",
    )
    prefetch: Count | None = Field(
        default=None,
        description="direct: rounds under way while one is computed; null: 1; hierarchical: nodes whose keys are; "
        "null: 3",
    )
    cluster: str | None = Field(
        default=None,
        description="preset (a2, a3, a800, h800, h200) or YAML file with the speeds of devices and links, by which "
        "hierarchical decides; null: a2",
    )
    routing: bool | None = Field(
        default=None,
        description="hierarchical: keys cross to a node once, over all its NICs, and are passed on inside it; null: "
        "true",
    )
    head_split: bool | None = Field(
        default=None, description="hierarchical: heads of long documents may be split inside nodes; null: true"
    )
    remap: Literal["off", "auto", "qkv", "hidden"] | None = Field(
        default=None,
        description="hierarchical: linear layers on a layout of their own, with equal tokens: off, auto (where that is "
        "faster), or always: qkv (q, k, v and out move) or hidden (hidden states move); null: auto",
    )
    simulated_placements: Count | None = Field(
        default=None,
        description="hierarchical: of so many of the placements that look fastest, plans are built and simulated, and "
        "the fastest is taken; each costs about as much planning as one does without; null: 1, no simulation",
    )
    max_seqlen_per_dp_cp_rank: Count | None = Field(
        default=None,
        description="hierarchical, and auto, which then chooses among its options: most tokens of a row that a rank "
        "may hold; null: no bound",
    )
    hidden_size: Count | None = Field(
        default=None, description="hierarchical: of the model, for the cost of linear layers; null: the model's"
    )
    ffn_hidden_size: Count | None = Field(default=None, description="hierarchical: the same; null: the model's")
    tensor_model_parallel_size: Count | None = Field(
        default=None, description="hierarchical: the same; null: that of the training"
    )
    sequence_parallel: bool | None = Field(
        default=None,
        description="hierarchical: whether tensor-parallel ranks share the rows of hidden states, for remap: auto; "
        "null: that of the training",
    )
    backend: Literal["auto", "cpu", "npu"] = Field(
        default="auto", description="implementation of the attention operator; auto: the device's"
    )
    npu_lowering: Literal["tnd", "masks"] = Field(
        default="tnd",
        description="npu backend: tnd: packed sequences and compressed masks; masks: one call a step with a mask of "
        "that step's rows and keys, for layouts without packed sequences",
    )
    npu_alibi: Literal["shared", "split"] = Field(
        default="shared",
        description="npu backend: shared: squares beside the diagonal share a call, whose statistics are corrected; "
        "split: a call for each square",
    )
    npu_merge: Literal["fp32", "ring_update", "triton"] = Field(
        default="fp32",
        description="npu backend: fp32: ours, in torch; ring_update: npu_ring_attention_update; triton: ours, a kernel "
        "that needs triton-ascend",
    )
    p2p: Literal["auto", "batched", "lanes"] = Field(
        default="auto",
        description="on devices: batched: what a rank sends and receives in a step is one launch; lanes: groups by "
        "direction, so that each neighbour has a stream for sending and one for receiving; auto: lanes for rings, else "
        "batched",
    )
    hccl_buffer_mb: Count | None = Field(
        default=None,
        description="buffer of each HCCL communicator of the run, twice; null: HCCL_BUFFSIZE, and "
        "P2P_HCCL_BUFFSIZE for those of pairs, which lanes use and for which the variable goes before this",
    )
    hccl_traffic_class: Natural | None = Field(
        default=None,
        description="network traffic class of HCCL's communicators, not with lanes; null: HCCL_RDMA_TC",
    )
    hccl_service_level: Natural | None = Field(
        default=None,
        description="network service level of HCCL's communicators, not with lanes; null: HCCL_RDMA_SL",
    )
    timeout_seconds: Positive = Field(default=600.0, description="how long a rank waits for another before it gives up")
    verify_plans: bool = Field(
        default=False,
        description="prove every plan before it runs, in the thread that makes it, and compare it over the ranks that "
        "run it, which must have the same",
    )

    @property
    def topology(self) -> Topology:
        """The context-parallel ranks: the second input of build_plan."""
        return Topology(self.nodes, self.context_parallel_size // self.nodes, self.cluster)

    @property
    def options(self) -> dict[str, Any]:
        """The algorithm's options that were given, as build_plan takes them."""
        return {name: value for name, value in self._all_options() if value is not None}

    @property
    def npu_options(self) -> dict[str, str]:
        """Options of the npu backend."""
        return {"lowering": self.npu_lowering, "alibi": self.npu_alibi, "merge": self.npu_merge}

    @property
    def uses_lanes(self) -> bool:
        """Whether transfers between devices go over lanes."""
        names = (self.algorithm, *(word.partition(":")[0] for word in self.also or ()))
        rings = all(ALIASES.get(name, name) in ("ring", "double_ring") for name in names)
        return self.p2p == "lanes" or (self.p2p == "auto" and rings)

    @property
    def group_options(self) -> dict[str, int]:
        """What HCCL is told about the groups of a run; see mindspeed_cp.comm.lanes.GROUP_OPTIONS."""
        names = ("buffer_mb", "traffic_class", "service_level")
        given = {name: getattr(self, f"hccl_{name}") for name in names}
        return {name: value for name, value in given.items() if value is not None}

    def _all_options(self) -> Iterator[tuple[str, Any]]:
        names = {name for algorithm in ALGORITHMS for name in algorithm_options(algorithm)}
        return ((name, getattr(self, name)) for name in type(self).model_fields if name in names)

    @model_validator(mode="before")
    @classmethod
    def _names_of_megatron(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key, instead in LATER_KEYS.items():
            if values.get(key) is not None:
                raise bad_value(key, values[key], f"is Megatron's, and not in this version; {instead}; remove the key")
        values = {key: value for key, value in values.items() if key not in LATER_KEYS}
        source = "algorithm", values.get("algorithm")
        if "cp_comm_type" in values:
            other = values.pop("cp_comm_type")
            source = source if "algorithm" in values else ("cp_comm_type", other)
            name = _algorithm("cp_comm_type", other)
            if "algorithm" in values and _algorithm("algorithm", values["algorithm"]) != name:
                own = values["algorithm"]
                agreeing = {"algorithm": name, "cp_comm_type": _algorithm("algorithm", own)}
                rule = f"differs from algorithm = {own}; give only one"
                raise bad_value("cp_comm_type", other, rule, "algorithm", agreeing)
            values["algorithm"] = name
        return _with_degree(values, source)

    @field_validator("remap", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false

    @field_validator("algorithm", mode="before")
    @classmethod
    def _known_algorithm(cls, value: Any) -> str:
        return _algorithm("algorithm", value)

    @model_validator(mode="after")
    def _fits_together(self) -> SuiteSettings:
        ranks = self.context_parallel_size
        _divides("nodes", self.nodes, ranks)
        check_choice(self)
        own = {} if self.algorithm == AUTO else algorithm_options(self.algorithm)
        for name, value in self.options.items():
            if self.algorithm == AUTO and name != BOUND:
                rule = "must be left out with algorithm: auto, which chooses options too; or name the algorithm"
                raise bad_value(name, value, rule)
            if self.algorithm != AUTO and name not in own:
                others = ", ".join(other for other in ALGORITHMS if name in algorithm_options(other))
                rule = (
                    f"is no option of algorithm {self.algorithm}; algorithms that have it: {others}; "
                    f"to leave it out: {name}: null, on the command line --set context_parallel_suite.{name}=null"
                )
                raise bad_value(name, value, rule)
        for name in ("cp_window_size", "ulysses_degree"):
            if getattr(self, name) is not None:
                _divides(name, getattr(self, name), ranks)
        for name, variable in NETWORK.items():
            if getattr(self, name) is not None and self.uses_lanes and ranks > 1:
                rule = (
                    f"does not reach the communicators of pairs, over which lanes send (p2p: {self.p2p}, algorithm "
                    f"{self.algorithm}); give p2p: batched, or leave it out and set {variable}, which all of HCCL reads"
                )
                raise bad_value(name, getattr(self, name), rule)
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Iterable[str] = ()) -> SuiteSettings:
        """From a YAML file that is this section, or that has it as `context_parallel_suite:` (ours, or Megatron's own).

        Where Megatron's section `model_parallel` gives context_parallel_size, it holds here too; two different sizes
        are an error.  Raises ConfigError, one line.
        """
        file = override(read_settings_file(path), overrides)
        name = "context_parallel_suite"
        if name not in file.data:
            also = (*cls.model_fields, *ALSO_READ)
            strange = [key for key in file.data if key not in also]
            if strange:
                where = file.where(strange[0])
                raise ConfigError(f"{where}: no section {name}, and {strange[0]} is not one of its keys")
            return in_file(file, "", lambda: cls(**file.data))
        section = {} if file.data[name] is None else file.data[name]
        if not isinstance(section, dict):
            keys = ", ".join(cls.model_fields)
            raise ConfigError(f"{file.where(name)}: {name}: must be a section with the keys {keys}")
        parallel = file.data.get("model_parallel")
        outer = parallel.get("context_parallel_size") if isinstance(parallel, dict) else None
        if section.setdefault("context_parallel_size", outer or 1) != (outer or section["context_parallel_size"]):
            key = f"{name}.context_parallel_size"
            rule = f"differs from model_parallel.context_parallel_size = {outer}; give the same, or only one"
            raise ConfigError(f"{file.where(key)}: {bad_value(key, section['context_parallel_size'], rule)}")
        return in_file(file, f"{name}.", lambda: cls(**section))


def _algorithm(key: str, value: Any) -> str:
    """The project's name of an algorithm of this version, given under any of its names."""
    if isinstance(value, list):
        valid = ", ".join([*ALGORITHMS, *ALIASES])
        raise bad_value(key, value, f"one algorithm per layer is not in this version; give one of {valid}")
    if value == AUTO:
        return AUTO
    problem = no_algorithm(value)
    if problem is not None:
        raise bad_value(key, value, problem.replace("valid: ", f"valid: {AUTO}, ", 1))
    return algorithm_name(value)


def _with_degree(values: dict[str, Any], source: tuple[str, Any]) -> dict[str, Any]:
    """Megatron's [size of all-to-all groups, size of rings] as the hybrid's degree; `source` is the key that named the
    algorithm, and what it said."""
    sizes = values.pop(SIZES, None)
    if sizes is None:
        return values
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise bad_value(SIZES, sizes, "must be two whole numbers, [ranks of an all-to-all, ranks of a ring]")
    given, (key, said) = values.get("algorithm"), source
    if given is None or _algorithm("algorithm", given) != "hybrid":
        has = "no algorithm is given" if given is None else f"{key} = {said} does not use it"
        raise bad_value(
            SIZES,
            sizes,
            f"{has}; give algorithm: hybrid (Megatron's a2a+p2p), or remove the key",
            key,
            {key: "hybrid", SIZES: "null"},
        )
    ranks = values.get("context_parallel_size", 1)
    if type(ranks) is int and sizes[0] * sizes[1] != ranks:
        pairs = ", ".join(f"[{n}, {ranks // n}]" for n in divisors(ranks))
        rule = f"its product must be context_parallel_size = {ranks}; valid: {pairs}"
        raise bad_value(SIZES, sizes, rule)
    degree = values.get("ulysses_degree")
    if degree is not None and degree != sizes[0]:
        rule = f"differs from ulysses_degree = {show(degree)}; give only one"
        raise bad_value(SIZES, sizes, rule, "ulysses_degree", {"ulysses_degree": sizes[0], SIZES: "null"})
    return {**values, "ulysses_degree": sizes[0]}


def _divides(key: str, value: int, ranks: int) -> None:
    if ranks % value:
        valid = ", ".join(map(str, divisors(ranks)))
        raise bad_value(key, value, f"must divide context_parallel_size = {ranks}; valid: {valid}")


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
