"""One event loop for all gloo groups of a test process.

A gloo group has an event loop of its own, which wakes some hundred times a second as long as the group lives. Groups of
models with experts outlive their tests (autograd's graph holds them), and by the end of a long run the loops of hundreds
of them would take the machine's time: 70 % of two cores, seen in `make test-all`.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache, wraps
from typing import Any

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own


@cache
def share_event_loop() -> None:
    """Let the gloo groups that this process makes from now on share a loop, on the loopback interface."""
    from torch.distributed import ProcessGroupGloo

    options_of, device = ProcessGroupGloo._Options, ProcessGroupGloo.create_device(hostname="127.0.0.1")
    make = ProcessGroupGloo.__init__

    @wraps(make)
    def make_on_device(
        self: ProcessGroupGloo,
        store: Any,
        rank: int,
        size: int,
        options: Any = None,
        timeout: timedelta | None = None,
        **others: Any,  # enable_reconfigure from torch 2.15 on, which is an option too
    ) -> None:
        if not isinstance(options, options_of):
            timeout = timeout or options or _DEFAULT_TIMEOUT
            options = options_of()
            options._timeout, options._devices, options._threads = timeout, [device], 2
            for name, value in others.items():
                setattr(options, name, value)
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_on_device  # type: ignore[method-assign]
