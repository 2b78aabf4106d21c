"""Triton kernels with one source for triton-ascend and CUDA, each beside the same in torch; imported as
`mindspeed_cp.ascend_kernels`, always.

The kernels are in `device`, which needs the package triton. The functions here do not: on a CPU they compute in torch,
and on a device without triton they say what is missing.
"""

from mindspeed_cp.ascend_kernels.launch import implementation_for
from mindspeed_cp.ascend_kernels.merge import merge_parts_, merge_statistics_
from mindspeed_cp.ascend_kernels.rope import rope_gather
from mindspeed_cp.ascend_kernels.spans import Runs, gather_spans, scatter_spans
from mindspeed_cp.ascend_kernels.tile_attention import TileSchedule, tile_attention_, tile_attention_backward_

__all__ = [
    "Runs", "TileSchedule", "gather_spans", "implementation_for", "merge_parts_", "merge_statistics_", "rope_gather",
    "scatter_spans", "tile_attention_", "tile_attention_backward_",
]  # fmt: skip
