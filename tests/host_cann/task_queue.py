"""torch_npu's own queue (TASK_QUEUE_ENABLE), over operators that are Python here.

torch_npu hands its calls of CANN to a thread of its own, one per process and device, first in, first out. With 1 the second phase of
an operator's call is made there, with 2 both phases, with 0 none. Whoever asks for a raw stream first waits until that thread has made
all calls; it waits for no stream.

The thread calls Python here (the oracle), as on a device CANN's old compiler of operators does. Then no thread may wait for the queue with
Python's lock. torch_npu lets go of the lock in all these places as soon as the process has used an operator of the old way
(aclop): `release_lock_in_waits` uses one, once, on a stream that goes past the queue.
"""

from __future__ import annotations

import os
import threading
import time

import torch

MODES = ("0", "1", "2")
DEFAULT = "1"  # torch_npu's own
REFUSAL = 60  # seconds within which the queue's thread notes an error
SETTLED = 0.05  # seconds after which it has noted that of the queue that it has dropped

_lock = threading.RLock()
_begun = _done = _ended = False


def mode() -> int:
    """TASK_QUEUE_ENABLE of this process.

    Raises:
        ValueError: it is not 0, 1 or 2.
    """
    setting = os.environ.get("TASK_QUEUE_ENABLE", DEFAULT)
    if setting not in MODES:
        raise ValueError(f"TASK_QUEUE_ENABLE={setting}; valid: {', '.join(MODES)}")
    return int(setting)


def wait_for_refusal() -> None:
    """Wait until the queue or a stream reports the error of a call; for calls that must fail.

    First by recording an event until the queue has got past the call or refuses to take more. `torch.npu.synchronize` would
    do neither: when a call fails, the queue's thread drops what is left of the queue and notes the error after that
    (Ascend/pytorch, NPUQueue.cpp, `ReadQueue`), and what another thread puts into the queue just then stays there, so that
    who waits for an empty queue waits forever.
    """
    global _ended
    end = time.monotonic() + REFUSAL
    if mode():
        event = torch.npu.Event()
        try:
            event.record()
            while not event.query():
                assert time.monotonic() < end, "the queue stands still"
                time.sleep(0.001)
                event.record()
            time.sleep(
                SETTLED
            )  # when the queue was dropped nothing is to be recorded either, and the error is noted later
            event.record()
        except RuntimeError:
            _ended = True
            raise
    while True:
        torch.npu.synchronize()
        assert time.monotonic() < end, "no call was refused"
        time.sleep(0.001)


def has_ended() -> bool:
    """Whether the queue of this process has reported an error. It makes no more calls, and nothing may wait for it."""
    return _ended


def release_lock_in_waits() -> None:
    """Let torch_npu give Python's lock away while it waits for its queue. Needs a device; later calls do nothing."""
    global _begun, _done
    if _done:
        return
    with _lock:
        if _begun:  # by this thread: the operator below comes here again for its memory
            return
        _begun = True
        if mode():
            try:
                with torch.npu.stream(torch.npu.SyncLaunchStream()):
                    torch.ops.npu.fast_gelu(torch.empty(0, device="npu"))
            except RuntimeError as error:  # refused by the stand-in, as all of its kind
                if "has no implementation in the stand-in" not in str(error):
                    raise
        _done = True
