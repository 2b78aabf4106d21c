"""Choice of the operator of linear attention."""

from __future__ import annotations

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.linear_attention.chunked import ChunkedOperator
from mindspeed_cp.ops.linear_attention.contract import StateOperator
from mindspeed_cp.ops.linear_attention.fla import FlaOperator
from mindspeed_cp.schema.messages import short_repr

OPERATORS: dict[str, StateOperator] = {"torch": ChunkedOperator(), "fla": FlaOperator()}


def operator_for_device(device_type: str, backend: str | StateOperator | None) -> StateOperator:
    """Return an operator by name, or the one of a device: fla-core's on GPUs, else the chunked form in torch.

    Raises:
        ConfigError: there is no such operator.
    """
    if backend is None:
        return OPERATORS["fla" if device_type == "cuda" else "torch"]
    if isinstance(backend, str) or not callable(getattr(backend, "check", None)):
        if backend not in OPERATORS:
            raise ConfigError(f"backend is {short_repr(backend)}; valid: {', '.join(OPERATORS)}, an operator, or None")
        return OPERATORS[backend]
    return backend
