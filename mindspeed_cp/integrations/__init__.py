"""Entries beside Megatron; nothing in this package imports megatron-core."""

from __future__ import annotations

from mindspeed_cp.errors import ConfigError, missing_package

try:
    import torch  # noqa: F401  (every entry needs it)
except ModuleNotFoundError as error:
    raise ConfigError(missing_package(error) or str(error)) from None
