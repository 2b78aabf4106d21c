"""What the section `context_parallel_suite` names outside of the settings: modules of algorithms, and the cluster."""

from __future__ import annotations

import importlib
from typing import Any

from mindspeed_cp.cluster.cluster import cluster_of, load_cluster
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import Topology
from mindspeed_cp.schema.messages import bad_value


def check_cluster(cluster: str | None, topology: Topology, key: str = "cluster") -> None:
    """Raise SettingError if there is no such cluster, or it has no such nodes.

    Args:
        cluster: preset or file; None: the default, which nodes of any size fit.
        topology: the context-parallel ranks.
        key: name of the setting, for the error.
    """
    if cluster is None:
        return
    try:
        if cluster == "":  # a topology takes it for none
            load_cluster(cluster)
        cluster_of(topology)
    except ConfigError as error:
        raise bad_value(key, cluster, f"cannot be used: {error}") from None


def import_modules(names: Any) -> None:
    """Import the modules that register algorithms; other types of the value are reported as an invalid field."""
    for name in names if isinstance(names, list) else ():
        try:
            importlib.import_module(name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            rule = f"{name!r} cannot be imported: {error}; give modules that Python finds, for example by PYTHONPATH"
            raise bad_value("algorithm_modules", names, rule) from None
