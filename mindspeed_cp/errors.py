"""Errors that users catch.  Each message is one line: the fault, its value, the valid values, and the alternative."""

from __future__ import annotations


class ConfigError(ValueError):
    """Invalid setting, argument or batch; raised when it is read, before anything runs."""


class PlanError(ValueError):
    """Wrong plan: it would not compute exact attention, or would not run.  Names the rank, step and tile or message."""


class PeerError(RuntimeError):
    """A peer died or did not answer in time.  Names the peer, the step and the operation that waited for it."""


class DivergenceError(RuntimeError):
    """The loss or the gradient of a step is not finite, or the loss is a spike, and the run's policy is to stop.  Names
    the step, the rank and the layer."""


class OperatorError(RuntimeError):
    """The attention operator of a device refused a call, for example because a library is too old.  Names the call, the
    cause and the remedy."""


class CorruptionError(RuntimeError):
    """A rank holds or computed wrong numbers: replicas differ, or attention is not what the reference computes.  Names
    the rank and the place."""
