"""The arguments of `mindspeed-cp calibrate`, and what can be refused before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_cp.cost.cluster import Cluster, load_cluster
from mindspeed_cp.errors import ConfigError

DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Request:
    """The arguments of the command.

    Attributes:
        out: the preset to write.
        overwrite: also where there is one.
        device: "auto", "cpu" or "npu".
        nproc: local ranks to start for the links; 1: none; None: all NPUs, or 2 on a CPU.
        base: a preset for what is not measured.
        measurements: a CSV file; its kinds are not measured here.
        name: of the new preset; None: of the file.
        peak_flops: of the device; None: of the base, or the highest rate measured.
        heads, kv_heads, head_dim, longest, dtype: of the attention that is timed.
        seconds: about as long the kernels may take.
    """

    out: Path
    overwrite: bool = False
    device: str = "auto"
    nproc: int | None = None
    base: str | None = None
    measurements: Path | None = None
    name: str | None = None
    peak_flops: float | None = None
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 128
    longest: int | None = None
    dtype: str = "bf16"
    seconds: float = 20.0

    def check(self) -> Cluster | None:
        """Refuse what can be refused before anything is measured.

        Returns:
            The base, read.

        Raises:
            ConfigError: an argument is wrong, or the base or the file to write cannot be used.
        """
        if self.device not in ("auto", "cpu", "npu"):
            raise ConfigError(f"--device {self.device}: is no device that can be calibrated; valid: auto, cpu, npu")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: valid: {', '.join(DTYPES)}")
        if self.out.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"{self.out}: must end in .yaml; presets are read by that name")
        if self.out.exists() and not self.overwrite:
            raise ConfigError(f"{self.out}: is there already; give another name, or --overwrite")
        if not self.out.parent.is_dir():
            raise ConfigError(f"{self.out}: the folder {self.out.parent} does not exist")
        for option, value, least in (
            ("--heads", self.heads, 1),
            ("--head-dim", self.head_dim, 1),
            ("--longest", 1024 if self.longest is None else self.longest, 256),
            ("--nproc", 1 if self.nproc is None else self.nproc, 1),
        ):
            if value < least:
                raise ConfigError(f"{option} {value}: must be {least} or more")
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(f"--kv-heads {self.kv_heads}: must divide --heads {self.heads}")
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"--seconds {self.seconds:g}: must be above 0, at most 3600")
        if self.peak_flops is not None and not 0 < self.peak_flops <= 1e21:
            raise ConfigError(f"--peak-flops {self.peak_flops:g}: must be FLOP/s above 0, such as 353.9e12")
        return None if self.base is None else load_cluster(self.base)
