"""Triton kernels with one source for triton-ascend and CUDA, each with a torch implementation beside it. Import them as
`mindspeed_cp.ascend_kernels`.

The kernels are in `device`, which needs the package triton. The functions exported here do not: on a CPU they compute
in torch, and on a device without triton they raise an error that names the missing package.
"""

from mindspeed_cp.ascend_kernels.launch import implementation_for
from mindspeed_cp.ascend_kernels.merge import MAX_PARTS, merge_parts, sum_parts
from mindspeed_cp.ascend_kernels.tile_attention import TileSchedule, tile_attention_, tile_attention_backward_

__all__ = [
    "MAX_PARTS",
    "TileSchedule",
    "implementation_for",
    "merge_parts",
    "sum_parts",
    "tile_attention_",
    "tile_attention_backward_",
]
