"""Compiles every kernel ahead of time for GPUs that are not here: PTX, and by the bundled ptxas a cubin.

    python tests/ascend_kernels/compile_cuda.py SM...             in the environment of triton, without TRITON_INTERPRET

Prints a line of JSON for each kernel, type and SM: versions, registers, spilled bytes, shared memory, and which matrix
instructions are used.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "ascend_kernels"), str(HERE.parent.parent)]

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from variants import Variant, variants  # noqa: E402

from mindspeed_cp.ascend_kernels.tile_attention import STAGES, WARPS, blocks_for  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDE = (256, 512)  # channels beside the usual 128: attention with ALiBi only, for what fits


def compiled(variant: Variant, sm: int) -> dict[str, object]:
    """Facts of a kernel."""
    kernel = getattr(importlib.import_module(f"device.{variant.module}"), variant.kernel)
    signature = dict(variant.signature) | dict.fromkeys((name for name, _ in variant.constants), "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(variant.constants))
    how = {"num_warps": WARPS, "num_stages": STAGES} if variant.constants_of("BM") else {}  # as they are launched
    made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=how)
    ptx, cubin = made.asm["ptx"], made.asm["cubin"]
    return {
        "ptx": re.findall(r"\.version (\S+)", ptx)[0],
        "target": re.findall(r"\.target (\S+)", ptx)[0],
        "cubin": len(cubin) if cubin[:4] == b"\x7fELF" else 0,
        "shared": made.metadata.shared,
        "matrix": "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else None,
        **_usage(ptx, sm),
    }


def _usage(ptx: str, sm: int) -> dict[str, int]:
    """Registers and spilled bytes, as ptxas tells."""
    ptxas = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas"))
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = f"sm_{sm}a" if sm >= 90 else f"sm_{sm}"
        said = subprocess.run(
            [str(ptxas), "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", said)), default=0),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said))),
    }


def chosen(dtype: str, dim: int) -> list[Variant]:
    """All kernels at the usual width; wide ones are attention alone."""
    forward, backward = (variants(dtype, blocks_for(DTYPES[dtype], side, dim), dim) for side in (False, True))
    attention = [x for x in forward if x.name.startswith("forward")]
    attention += [x for x in backward if x.name.startswith(("queries", "keys"))]
    if dtype == "fp32" or dim in WIDE:  # the same without one line; each takes seconds
        attention = [x for x in attention if "alibi" in x.name]
    return attention if dim in WIDE else [x for x in forward if not x.constants_of("BM")] + attention


def main() -> None:
    for sm in map(int, sys.argv[1:]):
        for dtype in DTYPES:
            for dim in (128, *WIDE):
                for variant in chosen(dtype, dim):
                    found: dict[str, object] = {"sm": sm, "dtype": dtype, "dim": dim, "name": variant.name}
                    try:
                        found |= compiled(variant, sm)
                    except Exception as error:
                        found["error"] = f"{type(error).__name__}: {error}"
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
