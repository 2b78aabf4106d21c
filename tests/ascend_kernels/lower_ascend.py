"""Lowers kernels by the real triton-ascend to linalg MLIR, without an NPU and without CANN.

    python tests/ascend_kernels/lower_ascend.py OUT VARIANTS ARCH...      in the environment of triton-ascend

VARIANTS is a file of `variants.py`. Prints a line of JSON for each kernel, type and architecture. What comes after,
bishengir's compiler, is CANN's and is not run: nothing here shows that it takes the MLIR, or that buffers fit.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "ascend_kernels")]  # neither package: torch is not needed

from triton._C.libtriton import ir  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from variants import Variant, read  # noqa: E402


def lower(variant: Variant, arch: str) -> dict[str, str]:
    """Text of the stages "ttir" and "ttadapter"."""
    target = GPUTarget("npu", arch, 0)
    backend = make_backend(target)
    kernel = getattr(importlib.import_module(f"device.{variant.module}"), variant.kernel)
    source = ASTSource(fn=kernel, signature=dict(variant.signature), constants=dict(variant.constants))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    stages: dict[str, object] = {}
    backend.add_stages(stages, options)
    text = {}
    metadata = {"hash": "0" * 64, "target": target, **options.__dict__}
    for name in ("ttir", "ttadapter"):
        module = stages[name](module, metadata)  # type: ignore[operator]
        text[name] = str(module)
    return text


def main() -> None:
    out = Path(sys.argv[1])
    for arch in sys.argv[3:]:
        for variant in read(Path(sys.argv[2])):
            file = out / arch / f"{variant.name}_{variant.dtype}.ttadapter"
            facts: dict[str, object] = {"arch": arch, "dtype": variant.dtype, "name": variant.name, "file": str(file)}
            try:
                text = lower(variant, arch)["ttadapter"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
                facts |= {
                    "operations": sorted(set(re.findall(r"linalg\.\w+", text))),
                    "mix": re.findall(r"mix_mode = \"(\w+)", text),
                }
            except Exception as error:
                facts["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
