"""check_beside_mindspeed: refuse what MindSpeed replaced if planned attention would contradict it."""

from __future__ import annotations

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.beside_mindspeed import origin
from mindspeed_cp.megatron.beside_mindspeed.replacements import REPLACEMENTS


def check_beside_mindspeed() -> None:
    """Raise ConfigError if MindSpeed was imported too late, or replaced what plans need as Megatron has it.

    `install`, `install_model` and the hooks of :mod:`mindspeed_cp.megatron.pretrain` call it. Without MindSpeed it does
    nothing.
    """
    if not origin.is_active():
        return
    if not origin.MINDSPEED_WAS_FIRST:
        raise ConfigError(
            "mindspeed was imported after mindspeed_cp.megatron, whose classes derive from what MindSpeed replaces; "
            "valid: `import mindspeed.megatron_adaptor` as the first import of the training script"
        )
    for row in REPLACEMENTS:
        if row.verdict != "refused":
            continue
        for name in row.names:
            contrary = [module for module in origin.replaced_by(name) if module not in row.kept]
            if contrary:
                raise ConfigError(
                    f"{name} is replaced by {contrary[0]}; valid with planned attention: Megatron's own "
                    f"({row.reason}); leave out {row.flag}"
                )
