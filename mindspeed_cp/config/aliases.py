"""Keys and names of Megatron and MindSpeed in the section `context_parallel_suite`: `cp_comm_type`, their names of
algorithms, and `hierarchical_context_parallel_sizes`, which is the degree of the hybrid."""

from __future__ import annotations

from typing import Any

from mindspeed_cp.algorithms import ALGORITHMS, ALIASES, AUTO, algorithm_name, algorithm_name_error
from mindspeed_cp.schema.messages import bad_value, format_value
from mindspeed_cp.schema.numbers import divisors
from mindspeed_cp.schema.unsupported import SUITE_KEYS

HIERARCHICAL_SIZES_KEY = "hierarchical_context_parallel_sizes"
SUITE_ALIAS_KEYS = ("cp_comm_type", HIERARCHICAL_SIZES_KEY)


def translate_megatron_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the section with the project's keys and names in place of Megatron's and MindSpeed's.

    Raises:
        SettingError: a key is not supported, or keys contradict each other.
    """
    for key, instead in SUITE_KEYS.items():
        if values.get(key) is not None:
            raise bad_value(key, values[key], f"is Megatron's, and not in this version; {instead}; remove the key")
    values = {key: value for key, value in values.items() if key not in SUITE_KEYS}
    source = "algorithm", values.get("algorithm")
    if "cp_comm_type" in values:
        comm_type = values.pop("cp_comm_type")
        source = source if "algorithm" in values else ("cp_comm_type", comm_type)
        name = read_algorithm("cp_comm_type", comm_type)
        if "algorithm" in values and read_algorithm("algorithm", values["algorithm"]) != name:
            algorithm = values["algorithm"]
            fixes = {"algorithm": name, "cp_comm_type": read_algorithm("algorithm", algorithm)}
            rule = f"differs from algorithm = {algorithm}; give only one"
            raise bad_value("cp_comm_type", comm_type, rule, "algorithm", fixes)
        values["algorithm"] = name
    return _translate_hierarchical_sizes(values, source)


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
    return algorithm_name(value)


def _translate_hierarchical_sizes(values: dict[str, Any], source: tuple[str, Any]) -> dict[str, Any]:
    """Replace Megatron's [size of all-to-all groups, size of rings] by the degree of the hybrid.

    Args:
        values: of the section.
        source: key that names the algorithm, and its value.
    """
    sizes = values.pop(HIERARCHICAL_SIZES_KEY, None)
    if sizes is None:
        return values
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise bad_value(
            HIERARCHICAL_SIZES_KEY, sizes, "must be two whole numbers, [ranks of an all-to-all, ranks of a ring]"
        )
    key, name = source
    if name is None or read_algorithm("algorithm", values["algorithm"]) != "hybrid":
        problem = "no algorithm is given" if name is None else f"{key} = {name} does not use it"
        rule = f"{problem}; give algorithm: hybrid (Megatron's a2a+p2p), or remove the key"
        fixes = {key: "hybrid", HIERARCHICAL_SIZES_KEY: "null"}
        raise bad_value(HIERARCHICAL_SIZES_KEY, sizes, rule, key, fixes)
    ranks = values.get("context_parallel_size", 1)
    if type(ranks) is int and sizes[0] * sizes[1] != ranks:
        pairs = ", ".join(f"[{n}, {ranks // n}]" for n in divisors(ranks))
        rule = f"its product must be context_parallel_size = {ranks}; valid: {pairs}"
        raise bad_value(HIERARCHICAL_SIZES_KEY, sizes, rule)
    degree = values.get("ulysses_degree")
    if degree is not None and degree != sizes[0]:
        rule = f"differs from ulysses_degree = {format_value(degree)}; give only one"
        fixes = {"ulysses_degree": sizes[0], HIERARCHICAL_SIZES_KEY: "null"}
        raise bad_value(HIERARCHICAL_SIZES_KEY, sizes, rule, "ulysses_degree", fixes)
    return {**values, "ulysses_degree": sizes[0]}
