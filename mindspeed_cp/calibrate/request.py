"""Arguments of `mindspeed-cp calibrate`, and their checks before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_cp.cluster.cluster import Cluster, load_cluster
from mindspeed_cp.errors import ConfigError

DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class CalibrationRequest:
    """The arguments of the command.

    Attributes:
        out: file of the preset.
        overwrite: True to replace an existing file.
        device: "auto", "cpu" or "npu".
        nproc: local ranks to start for measuring links; 1: none; None: all NPUs, or 2 on a CPU.
        base: preset for the values that are not measured.
        csv: CSV file; the kinds of measurements that it has are not measured.
        name: name of the preset; None: that of the file.
        peak_flops: peak of one device in FLOP/s; None: that of the base, or the highest measured rate.
        heads, kv_heads, head_dim, dtype: attention that is timed.
        longest: rows of the largest tile.
        seconds: approximate time for the kernels.
    """

    out: Path
    overwrite: bool
    device: str
    nproc: int | None
    base: str | None
    csv: Path | None
    name: str | None
    peak_flops: float | None
    heads: int
    kv_heads: int | None
    head_dim: int
    longest: int | None
    dtype: str
    seconds: float

    def check(self) -> Cluster | None:
        """Check the arguments and return the base, or None.

        Raises:
            ConfigError: an argument is not valid, or the base or the output file cannot be used.
        """
        if self.device not in ("auto", "cpu", "npu"):
            raise ConfigError(f"--device {self.device}: cannot be calibrated; valid: auto, cpu, npu")
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
