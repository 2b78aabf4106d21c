"""A double of MindSpeed: a package `mindspeed` that replaces the same attributes of Megatron, in the same manner.

It computes on a CPU what MindSpeed's operators compute on an NPU, counts their calls, and fails wherever MindSpeed's own
attention, batches or positions would be used. Its modules have the names of those of MindSpeed that do the same.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mindspeed_cp.megatron import mindspeed_compat
from mindspeed_cp.megatron.patches.compat import replaced

FOLDER = Path(__file__).parent


@contextmanager
def beside_mindspeed(*flags: str, first: bool = True) -> Iterator[Counter[str]]:
    """Import the double's adaptor with these flags on the command line; all is undone on exit.

    Args:
        flags: of MindSpeed, and ``--context-parallel-size``.
        first: let it pass for imported before mindspeed_cp.megatron, which it was not.

    Yields:
        How often what of MindSpeed was called.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(sys, "argv", ["pretrain_gpt.py", *flags]))
        stack.enter_context(replaced(sys, "path", [str(FOLDER), *sys.path]))
        if first:
            stack.enter_context(replaced(mindspeed_compat, "MINDSPEED_WAS_FIRST", True))
        stack.callback(_forget)
        importlib.import_module("mindspeed.megatron_adaptor")
        yield sys.modules["mindspeed.calls"].CALLS


def _forget() -> None:
    """Undo the patches, and forget the package."""
    patcher = sys.modules.get("mindspeed.patch_utils")
    if patcher is not None:
        patcher.undo()
    for name in [name for name in sys.modules if name.split(".")[0] == "mindspeed"]:
        del sys.modules[name]
