"""What planned attention keeps, leaves unused and refuses of MindSpeed's patches of Megatron (docs/mindspeed.md).

MindSpeed replaces attributes of Megatron when ``mindspeed.megatron_adaptor`` is imported, by the flags on the command
line. :data:`REPLACEMENTS` says of each attribute that concerns attention, positions, batches, losses or groups what
becomes of it; :data:`MINDSPEED_RULES` refuses the flags whose patches would contradict a plan.
:func:`check_beside_mindspeed` looks at what is really replaced.
"""

from __future__ import annotations

from mindspeed_cp.megatron.beside_mindspeed.check import check_beside_mindspeed
from mindspeed_cp.megatron.beside_mindspeed.flags import MINDSPEED_RULES
from mindspeed_cp.megatron.beside_mindspeed.replacements import REPLACEMENTS, Replacement

__all__ = ["MINDSPEED_RULES", "REPLACEMENTS", "Replacement", "check_beside_mindspeed"]
