"""`mindspeed-cp calibrate`: the numbers of a cluster, fitted to kernels and links that are measured here.

What is fitted stands in `mindspeed_cp/cost`; this package measures, and imports torch.
"""

from mindspeed_cp.calibrate.kernels import Shapes, measure_kernels
from mindspeed_cp.calibrate.links import measure_links, measure_local_links

__all__ = ["Shapes", "measure_kernels", "measure_links", "measure_local_links"]
