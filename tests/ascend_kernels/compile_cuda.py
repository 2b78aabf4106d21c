"""Compiles every kernel ahead of time for GPUs that are not here: PTX, and by the bundled ptxas a cubin.

    python -m tests.ascend_kernels.compile_cuda [--table | --all] SM...   in the environment of triton, without TRITON_INTERPRET

Prints a line of JSON for each kernel, type, width of heads and SM: versions, registers, spilled bytes, shared memory, and which
matrix instructions are used; or, with --table, registers, spilled bytes and shared memory as a table. What is compiled is
what the package launches (`launches.py`), as Triton's JIT specialises it: torch's memory begins at a multiple of 16 bytes.
bf16 is compiled once more for tensors that do not, as views may.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.ascend_kernels.launches import DTYPES, variants
from tests.ascend_kernels.variants import NAMES, Variant, is_default

WIDE = (256, 512)  # channels beside the usual 128: attention with ALiBi only, for what fits


@dataclass(frozen=True)
class Job:
    """A kernel to compile."""

    variant: Variant
    dim: int
    sm: int
    aligned: bool = True


def compiled(job: Job) -> dict[str, object]:
    """Facts of a kernel; "error" where it does not compile."""
    variant = job.variant
    facts: dict[str, object] = {"sm": job.sm, "dtype": variant.dtype, "dim": job.dim, "name": variant.name, "aligned": job.aligned}  # fmt: skip
    try:
        return facts | _facts(job)
    except Exception as error:
        return facts | {"error": f"{type(error).__name__}: {error}"}


def _facts(job: Job) -> dict[str, object]:
    variant = job.variant
    kernel = getattr(importlib.import_module(f"mindspeed_cp.ascend_kernels.device.{variant.module}"), variant.kernel)
    signature = variant.signature | dict.fromkeys(variant.constants, "constexpr")
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible}
    source = ASTSource(fn=kernel, signature=signature, constexprs=variant.constants, attrs=attributes)
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = (
        True  # ptxas -v, also where it was compiled before
    )
    with contextlib.redirect_stdout(io.StringIO()) as said:
        made = triton.compile(source, target=GPUTarget("cuda", job.sm, 32), options=variant.options)
    ptx, cubin = made.asm["ptx"], made.asm["cubin"]
    (registers,) = re.findall(r"Used (\d+) registers", said.getvalue())
    return {
        "ptx": re.findall(r"\.version (\S+)", ptx)[0],
        "target": re.findall(r"\.target (\S+)", ptx)[0],
        "cubin": len(cubin) if cubin[:4] == b"\x7fELF" else 0,
        "shared": made.metadata.shared,
        "matrix": "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else None,
        "registers": int(registers),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said.getvalue()))),
    }


def jobs(sms: list[int]) -> list[Job]:
    """All kernels at the usual width; wide ones are attention alone."""
    out = []
    for dtype in DTYPES:
        for dim in (128, *WIDE):
            for variant in variants(dtype, dim):
                attention = "BM" in variant.constants
                alibi = bool(variant.constants.get("ALIBI"))
                if (dim in WIDE and not alibi) or (dtype == "fp32" and attention and not alibi):
                    continue  # the same without one line; each takes seconds
                out += [Job(variant, dim, sm) for sm in sms]
                if dtype == "bf16" and dim == 128:
                    out += [Job(replace(variant, divisible=[]), dim, sm, aligned=False) for sm in sms]
    return out


def table(facts: list[dict[str, object]]) -> str:
    """Registers, spilled bytes and shared memory in Markdown: a row for each kernel, width and SM, a column for types."""
    columns = [(dtype, True) for dtype in DTYPES] + [("bf16", False)]
    cells: dict[tuple[str, object, object], dict[tuple[object, object], str]] = {}
    for fact in facts:
        cell = fact.get("error") or f"{fact['registers']} / {fact['spilled']} / {fact['shared']:,}"
        cells.setdefault((str(fact["name"]), fact["dim"], fact["sm"]), {})[fact["dtype"], fact["aligned"]] = str(cell)
    head = ["kernel, channels", "target", *(f"{dtype}{'' if aligned else ', unaligned'}" for dtype, aligned in columns)]
    rows = [
        [f"{name}, {dim}", f"sm_{sm}", *(row.get(column, "") for column in columns)]
        for (name, dim, sm), row in sorted(cells.items(), key=lambda x: (x[0][1], NAMES.index(x[0][0]), x[0][2]))
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles every kernel ahead of time for GPUs that are not here.")
    parser.add_argument("sm", type=int, nargs="+", help="80 or 90")
    parser.add_argument("--table", action="store_true", help="a table instead of JSON")
    parser.add_argument("--all", action="store_true", help="what the tests compile with --thorough only, too")
    given = parser.parse_args()
    chosen = [
        j for j in jobs(given.sm) if given.all or given.table or is_default(j.variant.dtype, j.dim, j.sm, j.aligned)
    ]
    facts = []
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for fact in pool.map(compiled, chosen):
            facts.append(fact)
            if not given.table:
                print(json.dumps(fact), flush=True)
    if given.table:
        print(table(facts))


if __name__ == "__main__":
    main()
