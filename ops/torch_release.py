"""The release of the installed torch, for what differs between releases."""

from __future__ import annotations

import re

import torch


def torch_release() -> tuple[int, int]:
    """Return (2, 7) for torch 2.7.1+cpu or 2.7.0a0."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    assert match is not None, torch.__version__
    return int(match[1]), int(match[2])
