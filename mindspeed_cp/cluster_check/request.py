"""Arguments of `mindspeed-cp doctor --cluster`, and their checks before anything is measured."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mindspeed_cp.device.select import resolve_device_type
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig

#: Name of each type of tensors and bytes of an element.
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
MAX_TOKENS_PER_RANK = 2**22
LEAST_TOKENS_PER_RANK = 64

#: Seconds without any sign of a rank's worker, beyond the limit of a link, after which it counts as hung.
SILENCE_SECONDS = 60.0


@dataclass(frozen=True)
class DeviceDefaults:
    """Sizes for a kind of device: tokens of a rank, type, rows of the largest timed tile, hidden size of the timed
    matrix products, bytes of the largest message, and seconds until a silent link counts as hung."""

    tokens_per_rank: int
    dtype: str
    longest: int
    hidden_size: int
    message_bytes: int
    link_seconds: float


#: HCCL itself waits 120 s for a connection.
DEFAULTS = {
    "cpu": DeviceDefaults(1024, "fp32", 1024, 512, 8 << 20, 20.0),
    "npu": DeviceDefaults(8192, "bf16", 16384, 4096, 64 << 20, 150.0),
}


@dataclass(frozen=True)
class ClusterRequest:
    """The arguments of the command; None: the default of the device.

    Attributes:
        folder: gets the report, the figures and the archive.
        overwrite: True to replace an earlier report in the folder.
        device: "auto", "cpu" or "npu".
        tokens_per_rank: tokens of a batch divided by ranks.
        heads, kv_heads, head_dim: attention.
        dtype: type of all tensors.
        kernel_seconds: approximate time for the kernels.
        link_seconds: seconds until a silent link counts as hung.
        seed: seed of batches and inputs.
    """

    folder: Path
    overwrite: bool = False
    device: str = "auto"
    tokens_per_rank: int | None = None
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 64
    dtype: str | None = None
    kernel_seconds: float = 10.0
    link_seconds: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Check everything that does not depend on the ranks.

        Raises:
            ConfigError: an argument is not valid.
        """
        if self.device not in ("auto", *DEFAULTS):
            raise ConfigError(
                f"--device {self.device}: --cluster measures cpu and npu; valid: auto, cpu, npu; without --cluster "
                "the doctor checks GPUs too"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: valid: {', '.join(DTYPES)}")
        tokens = self.tokens_per_rank
        if tokens is not None and not LEAST_TOKENS_PER_RANK <= tokens <= MAX_TOKENS_PER_RANK:
            raise ConfigError(f"--tokens-per-rank {tokens}: valid: {LEAST_TOKENS_PER_RANK} to {MAX_TOKENS_PER_RANK:,}")
        for option, value in (("--heads", self.heads), ("--head-dim", self.head_dim)):
            if value < 1:
                raise ConfigError(f"{option} {value}: must be 1 or more")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ConfigError(f"--kv-heads {self.kv_heads}: must divide --heads {self.heads}")
        if not 0 < self.kernel_seconds <= 600:
            raise ConfigError(f"--kernel-seconds {self.kernel_seconds:g}: must be above 0, at most 600")
        if self.link_seconds is not None and not 0 < self.link_seconds <= 3600:
            raise ConfigError(f"--link-seconds {self.link_seconds:g}: must be above 0, at most 3600")

    def check_folder(self) -> None:
        """Make the folder if it is missing, and check that the report can be written there.

        Raises:
            ConfigError: the folder cannot be made or written, or holds a report already.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".mindspeed-cp-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"--folder {self.folder}: cannot be written: {error.strerror}; give a folder of your own"
            ) from None
        if (self.folder / "report.html").exists() and not self.overwrite:
            raise ConfigError(f"--folder {self.folder}: holds a report already; give another one, or --overwrite")

    @property
    def device_type(self) -> str:
        """Kind of device: "cpu" or "npu"."""
        return resolve_device_type(self.device)

    @property
    def defaults(self) -> DeviceDefaults:
        """Sizes for the kind of device."""
        return DEFAULTS[self.device_type]

    @property
    def type_name(self) -> str:
        """Name of the type of tensors."""
        return self.dtype or self.defaults.dtype

    @property
    def tokens(self) -> int:
        """Tokens of a batch divided by ranks."""
        return self.tokens_per_rank or self.defaults.tokens_per_rank

    @property
    def link_limit(self) -> float:
        """Seconds until a silent link counts as hung."""
        return self.link_seconds or self.defaults.link_seconds

    @property
    def silence(self) -> float:
        """Seconds without any sign of a worker until it counts as hung."""
        return SILENCE_SECONDS + 2 * self.link_limit

    @property
    def attention(self) -> AttentionConfig:
        """Attention of the algorithms and of the kernels."""
        return AttentionConfig(self.heads, self.kv_heads or self.heads, self.head_dim)
