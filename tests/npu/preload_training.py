"""As preload.py, with all that a training imports, as a rank of `mindspeed-cp train` imports it."""

from __future__ import annotations

from mindspeed_cp.train.launch import uncompiled_megatron
from tests.npu import preload  # noqa: F401  (before torch_npu)

with uncompiled_megatron():
    import mindspeed_cp.train.loop  # noqa: F401
