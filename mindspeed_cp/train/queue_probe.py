"""Notices that torch-npu makes no calls any more, although it has raised nothing.

A thread of torch-npu makes the calls of CANN and HCCL (TASK_QUEUE_ENABLE 1 and 2). After a call that fails there it
drops all later ones, and raises once, at the next call that enqueues or waits. If the destructor of an event is that
call, the error is lost, by torch-npu's source: operators, messages and copies do nothing, and the host reads what lay
in the memory before. So every step copies another number to the device without a wait, which goes through that thread,
and reads it.
"""

from __future__ import annotations

import os

import torch

from mindspeed_cp.errors import OperatorError

#: Numbers that are copied in turn: what memory holds by chance is hardly ever the one that is due.
_COUNT = 4096


class QueueProbe:
    """Checks that copies to an NPU take place; on other devices, which have no such thread, it does nothing.

    Args:
        device: device of this rank.
        rank: number of this rank, for the error.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._rank, self._checks = rank, 0
        self._numbers = torch.arange(1, _COUNT + 1).pin_memory() if device.type == "npu" else None
        self._copy = torch.zeros(1, dtype=torch.int64, device=device)

    def check(self, step: int) -> None:
        """Copy a number of 8 bytes and wait for it.

        Raises:
            OperatorError: it did not arrive; names the step and the rank.
        """
        if self._numbers is None:
            return
        place = self._checks % _COUNT
        self._checks += 1
        self._copy.copy_(self._numbers[place : place + 1], non_blocking=True)
        if int(self._copy) == place + 1:
            return
        raise OperatorError(
            f"step {step}, rank {self._rank}: torch-npu makes no calls any more (a copy to the NPU was dropped): an "
            "earlier call failed in its queue, and the error was lost; its log on standard error says which, and "
            f"TASK_QUEUE_ENABLE=0 (now {os.environ.get('TASK_QUEUE_ENABLE', 'not set')}) raises at the call; the step "
            "is void, the same command goes on from the newest checkpoint"
        )
