"""Folders with the bookkeeping of checkpoints, without their tensors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.train.checkpoint import MANIFEST, Progress, _manifest_text
from mindspeed_cp.train.checks import identity
from mindspeed_cp.train.run_files import RunFiles


def with_checkpoint(folder: Path, **record: Any) -> Settings:
    """Settings, and a folder with the manifests of two checkpoints; `record` changes that of the newer one."""
    settings = Settings(output={"folder": str(folder)})  # type: ignore[arg-type]
    files = RunFiles(folder)
    files.create()
    good = {**asdict(Progress(3)), "identity": identity(settings), "files": {}}
    for step, values in ((2, good | {"step": 2}), (3, good | record)):
        files.checkpoint(step).mkdir()
        (files.checkpoint(step) / MANIFEST).write_text(_manifest_text(values))
    files.latest.write_text("iter_0000003\n")
    return settings
