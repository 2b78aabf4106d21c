"""Every call of HcclBatchSendRecv passes the rules, before anything of it is put on a stream."""

from __future__ import annotations

import ctypes
import json
import sys

from tests.host_cann import cann_rules
from tests.host_cann.cann_calls import BatchCall, Item

_kept: list[object] = []  # callbacks must outlive the library that calls them


def virtual_stages() -> int:
    """Model chunks of each pipeline stage of the program, by Megatron; 1 where Megatron is not imported."""
    megatron = sys.modules.get("megatron.core.parallel_state")
    return 1 if megatron is None else megatron.get_virtual_pipeline_model_parallel_world_size() or 1


def call_of(text: str) -> BatchCall:
    """The call that libhccl has written down."""
    told = json.loads(text)
    return BatchCall([Item(*item) for item in told["items"]], told["rank"], told["ranks"], virtual_stages())


def connect(hccl: ctypes.CDLL) -> None:
    """Let libhccl ask the rules."""

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char), ctypes.c_uint32)
    def answer(call: bytes, text: ctypes.Array[ctypes.c_char], size: int) -> int:
        try:
            cann_rules.check(call_of(call.decode()))
        except Exception as error:  # also one of the stand-in itself: nothing may pass unchecked
            reason = str(error) if isinstance(error, cann_rules.Refused) else f"an error in the stand-in: {error!r}"
            ctypes.memmove(text, reason.encode()[: size - 1] + b"\0", min(len(reason.encode()), size - 1) + 1)
            return 1
        return 0

    _kept.append(answer)
    hccl.host_hccl_set_rules(answer)
