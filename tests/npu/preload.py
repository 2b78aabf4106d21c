"""What ranks are forked from: the stand-in and torch_npu loaded, no device touched, no thread started (tests/npu/ranks.py)."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # a forked child must not need threads that its parent had

from tests import host_cann

host_cann.load()
