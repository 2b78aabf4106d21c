"""Document lengths and attention heads of the benchmarks."""

from __future__ import annotations

from pathlib import Path

from mindspeed_cp import AttentionConfig

#: Folder of real document lengths, which not every checkout has.
REAL_LENGTHS = Path(__file__).parents[2] / "shared" / "data" / "lengths"

HEADS = {"mha": AttentionConfig(heads=32, head_dim=128), "gqa8": AttentionConfig(heads=32, kv_heads=8, head_dim=128)}


def real_lengths_folder(name: str) -> Path | None:
    """Return the folder of the real lengths of a set; None if they are missing: then configs/lengths has its bins."""
    return REAL_LENGTHS if (REAL_LENGTHS / f"{name}.npz").exists() else None
