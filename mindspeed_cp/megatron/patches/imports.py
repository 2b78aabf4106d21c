"""Import Megatron-core without its known warnings, and with one line if it is missing or too old."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_cp.errors import ConfigError, missing_package

RECOMMENDED = "0.16.1"

# Warnings of Megatron-core on import without Transformer Engine and Apex; neither is needed here.
_KNOWN_NOISE = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "absl.logging is not installed",  # 0.17
    "The following imports from `dynamic_context.py` will be removed",
    "`torch.jit.script_method` is deprecated",
    "The 'megatron.core.transformer.custom_layers.transformer_engine'",
)


@contextmanager
def megatron_imports() -> Iterator[None]:
    """Import Megatron-core modules inside this block.

    Silences only the warnings that Megatron-core is known to give on import without Transformer Engine and Apex; all
    others, and these ones outside the block, come through::

        with megatron_imports():
            from megatron.core.models.gpt.gpt_model import GPTModel

    Raises:
        ImportError: megatron-core is not installed.
        ConfigError: its version is not supported.
    """
    with warnings.catch_warnings():
        for text in _KNOWN_NOISE:
            warnings.filterwarnings("ignore", message=text)
        try:
            import megatron.core

            check_version(megatron.core.__version__)
            yield
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != "megatron":
                raise (ConfigError(missing_package(error) or "") if missing_package(error) else error) from None
            raise ImportError(
                f"mindspeed_cp.megatron needs megatron-core ({error.name} is missing): pip install "
                f"megatron-core=={RECOMMENDED}"
            ) from error


def parse_version(text: str) -> tuple[int, int]:
    """Return (0, 16) for "0.16.1" or "0.16.0rc0.dev1"."""
    major, minor = text.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def check_version(text: str) -> None:
    """Raise ConfigError for a Megatron-core that is not supported; docs/versions.md says which were tested."""
    version = parse_version(text)
    if version != (0, 12) and version < (0, 16):
        raise ConfigError(
            f"megatron-core is {text}; valid: 0.12 (of MindSpeed), or 0.16 or later, as others are not tested; use "
            f"{RECOMMENDED} (or 0.17 and later on Python 3.12)"
        )
