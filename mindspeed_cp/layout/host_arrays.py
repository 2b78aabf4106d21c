"""Integers on the host, from anything that NumPy can read."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_cp.errors import ConfigError


def as_integers(name: str, values: Any, dims: int, shape: str = "") -> np.ndarray:
    """Convert to int64 with 1 to `dims` dimensions, or raise ConfigError, which names the valid shape."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name} is a {type(values).__name__} that NumPy cannot read ({' '.join(str(error).split())}); valid: "
            "integers on the host: an array, a list, or tensor.cpu()"
        ) from None
    is_integer = np.issubdtype(array.dtype, np.integer) or array.size == 0
    if not is_integer or not 1 <= array.ndim <= dims:
        valid = shape or ("one dimension" if dims == 1 else "shape [tokens] or [rows, tokens]")
        raise ConfigError(f"{name} is {array.dtype} of shape {list(array.shape)}; valid: integers of {valid}")
    return array.astype(np.int64)
