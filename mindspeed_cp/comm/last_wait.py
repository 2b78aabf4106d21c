"""The message that this process waits for, or waited for last: what a dump of a hanging rank tells."""

from __future__ import annotations

from mindspeed_cp.comm.transport import Transfer

#: True to send, global rank of the peer (None: an exchange of all ranks), label, True while the host waits.
_last: tuple[bool, int | None, str, bool] | None = None


def note_wait(transfer: Transfer, peer: int) -> None:
    """Note that the host begins to wait for a transfer.

    Args:
        transfer: the transfer.
        peer: global rank of its other end.
    """
    global _last
    _last = transfer.sends, peer, transfer.label, True  # not the transfer, which keeps its tensor alive


def note_exchange(label: str) -> None:
    """Note that the host begins to wait for an exchange of all ranks."""
    global _last
    _last = False, None, label, True


def note_arrival() -> None:
    """Note that the wait is over; on a device, the stream may still wait."""
    global _last
    if _last is not None:
        _last = *_last[:3], False


def describe_last_wait() -> str:
    """Return one clause about the latest wait of the engine."""
    if _last is None:
        return "it has not waited for a message of the engine yet"
    sends, peer, label, waits = _last
    action = (
        "the exchange of all ranks" if peer is None else f"{'sending to' if sends else 'receiving from'} rank {peer}"
    )
    when = "it waits for" if waits else "the last message of the engine that it waited for is"
    return f"{when} {action}, {label}"
