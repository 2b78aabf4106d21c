"""What of the kernels is compiled ahead of time: types of arguments and compile-time values, as recorded from launches
(`launches.py`) and handed on as JSON. Needs neither torch nor triton, as triton-ascend compiles by it in an environment of its
own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ATTENTION = ("forward", "dq", "dkdv")
NAMES = (
    "merge", "sum", "delta",
    *ATTENTION, *(f"{name}_alibi" for name in ATTENTION),
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kernel as it is launched for given types and sizes.

    Attributes:
        name: of NAMES.
        dtype: "fp32", "bf16" or "fp16": of the tensors that have no type of their own.
        module: of `ascend_kernels.device`.
        kernel: of the module.
        signature: the type of each argument that is no compile-time value.
        constants: those that are.
        divisible: arguments that Triton's JIT specialises: pointers to 16 bytes, and integers that 16 divides.
        options: of the launch, such as num_warps.
    """

    name: str
    dtype: str
    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, object]
    divisible: list[str]
    options: dict[str, int]


def is_default(dtype: str, dim: int, sm: int, aligned: bool) -> bool:
    """Whether a kernel is compiled for a GPU without --thorough: fp16 and 256 channels are much like bf16 and 512."""
    return dtype != "fp16" and dim != 256 and (sm == 90 or (dtype == "bf16" and aligned))


def written(variants: Iterable[Variant], file: Path) -> Path:
    """The file, for :func:`read`."""
    file.write_text(json.dumps([asdict(variant) for variant in variants]))
    return file


def read(file: Path) -> list[Variant]:
    """What :func:`written` wrote."""
    return [Variant(**fields) for fields in json.loads(file.read_text())]
