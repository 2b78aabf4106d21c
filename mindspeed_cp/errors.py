"""The errors that users meet.  Each carries one clear line: what is wrong, its value, what is valid, what to use
instead."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting, an argument or a batch cannot be used; raised when it is read, before anything runs."""


class PlanError(ValueError):
    """A plan is wrong: it would not compute exact attention, or would not run.  Names the rank, the step and the tile
    or message."""


class PeerError(RuntimeError):
    """A peer died or did not answer in time.  Names the peer, the step and what was waited for."""


class OperatorError(RuntimeError):
    """A device's attention operator refused a call, as it may where a library is too old.  Names call, cause and
    remedy."""
