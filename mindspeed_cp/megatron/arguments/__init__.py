"""What becomes of Megatron's arguments: every one that touches attention, positions, loss or batches.

:data:`ENTRIES` has a row for each argument of the training scripts, and each field of TransformerConfig, of Megatron
0.12, 0.14, 0.16 and 0.19: used, harmless or refused, and why. A test compares it with the parser of the Megatron at
hand, so that an argument of a new version is missed by name. :func:`check_arguments` refuses.
"""

from __future__ import annotations

from mindspeed_cp.megatron.arguments.check import check_arguments
from mindspeed_cp.megatron.arguments.entry import VERSIONS, Entry
from mindspeed_cp.megatron.arguments.groups import UNCONCERNED_GROUPS
from mindspeed_cp.megatron.arguments.table import ENTRIES, entry_of

__all__ = ["ENTRIES", "UNCONCERNED_GROUPS", "VERSIONS", "Entry", "check_arguments", "entry_of"]
