"""The settings of `plan` and `simulate`: a settings file or built-in values, with the options of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_cp.config.settings import override_settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.yaml_file import SettingsFile, parse_settings, read_settings_file, with_value

_SUITE = "context_parallel_suite"

DTYPES = ("bf16", "fp32")


@dataclass(frozen=True)
class CommandSettings:
    """Options that replace settings; None: not given.

    Attributes:
        config: settings file.
        overrides: of --set.
        algorithm, heads, kv_heads, head_dim, cluster, dtype: values of the options of these names.
        ranks, nodes, ranks_per_node: the context-parallel ranks.
    """

    config: Path | None = None
    overrides: Iterable[str] = ()
    algorithm: str | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    cluster: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    dtype: str | None = None

    def read(self, built_in: str) -> SettingsFile:
        """Return the settings file, or the built-in settings (YAML), with the values of the options.

        Raises:
            ConfigError: the file or an override is invalid, the numbers of ranks contradict each other, or the sizes of
                the model are not given.
        """
        if self.heads is not None and self.head_dim is None:
            raise ConfigError(f"--heads {self.heads}: needs --head-dim, the channels of a head, such as --head-dim 128")
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"--dtype {self.dtype!r}: valid: {', '.join(DTYPES)}")
        config = self.config
        file = parse_settings(built_in, "built-in settings") if config is None else read_settings_file(config)
        file = override_settings(file, self.overrides)
        for option, key, value in (
            ("--algorithm", f"{_SUITE}.algorithm", self.algorithm),
            ("--cluster", f"{_SUITE}.cluster", self.cluster),
            ("--heads", "model.num_attention_heads", self.heads),
            ("--kv-heads", "model.num_query_groups", self.kv_heads),
            ("--head-dim", "model.kv_channels", self.head_dim),
            ("--dtype", "train.bf16", None if self.dtype is None else self.dtype == "bf16"),
        ):
            if value is not None:
                file = with_value(file, key, value, option)
        return self._with_topology(self._with_model(file))

    def _with_model(self, file: SettingsFile) -> SettingsFile:
        """Return the settings with all sizes that are modelled; the defaults of `train` are no user's model."""
        model, train = (
            section if isinstance(section := file.data.get(name), dict) else {} for name in ("model", "train")
        )
        if self.config is None:
            if "ffn_hidden_size" in model and "hidden_size" not in model:
                raise ConfigError("--set model.ffn_hidden_size: needs the other size of linear layers, hidden_size")
            return file
        has_width = "hidden_size" in model or ("kv_channels" in model and not model.get("multi_latent_attention"))
        if "num_attention_heads" not in model or not has_width:
            missing = "model.num_attention_heads" if "num_attention_heads" not in model else "model.hidden_size"
            raise ConfigError(
                f"{self.config}: {missing} is not given, and nothing is modelled by a default; give the section model "
                "(num_attention_heads, num_query_groups, kv_channels, hidden_size, ffn_hidden_size) and train.bf16, or "
                "--heads, --kv-heads, --head-dim and --dtype"
            )
        if "bf16" not in train and file.is_override("model.num_attention_heads"):
            file = with_value(file, "train.bf16", True)
        return file

    def _with_topology(self, file: SettingsFile) -> SettingsFile:
        """Return the settings with --ranks, --nodes and --ranks-per-node; what is not given is kept."""
        ranks, nodes, ranks_per_node = self.ranks, self.nodes, self.ranks_per_node
        if ranks is None and nodes is None and ranks_per_node is None:
            return file
        suite = file.data.get(_SUITE)
        size, file_nodes = (
            value if type(value := suite.get(key) if isinstance(suite, dict) else None) is int and value > 0 else 1
            for key in ("context_parallel_size", "nodes")
        )
        if ranks is None:
            nodes = nodes or file_nodes
            ranks = nodes * (ranks_per_node or max(1, size // file_nodes))
        elif nodes is None:
            nodes = ranks // ranks_per_node if ranks_per_node else file_nodes
        if ranks_per_node is not None and nodes * ranks_per_node != ranks:
            raise ConfigError(
                f"--ranks {ranks}: differs from --nodes {nodes} x --ranks-per-node {ranks_per_node} = "
                f"{nodes * ranks_per_node}; leave one of them out"
            )
        if ranks % nodes:
            raise ConfigError(f"--ranks {ranks}: must be a multiple of --nodes {nodes}; give --ranks-per-node instead")
        file = with_value(file, f"{_SUITE}.context_parallel_size", ranks, "--ranks")
        return with_value(file, f"{_SUITE}.nodes", nodes, "--nodes")

    def has_linear_part(self, file: SettingsFile) -> bool:
        """Return True if the settings give the sizes of the linear part of a layer."""
        model = file.data.get("model")
        return isinstance(model, dict) and "hidden_size" in model
