"""SPAN: what differs between versions of Megatron-core, as the module for the installed one.

=============  =======================================================
module         versions
=============  =======================================================
``v0_12``      0.12
``v0_13``      0.13, 0.14
``v0_15``      0.15 and later
=============  =======================================================

Each has the same names. What is patched in Megatron itself is in :mod:`mindspeed_cp.megatron.patches.compat`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import megatron.core

from mindspeed_cp.megatron.patches.imports import parse_version

#: First version of each module, in order.
_MODULES = (((0, 12), "v0_12"), ((0, 13), "v0_13"), ((0, 15), "v0_15"))


def module_for(version: tuple[int, int]) -> str:
    """Return the name of the module for a version (major, minor)."""
    return [name for first, name in _MODULES if first <= version][-1]


SPAN: Any = import_module(f"mindspeed_cp.megatron.patches.{module_for(parse_version(megatron.core.__version__))}")
