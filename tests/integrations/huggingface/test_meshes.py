"""DDP, FSDP2, HSDP and tensor parallelism on four ranks: three steps equal to the documents one by one."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from mindspeed_cp import ConfigError, Topology
from tests.integrations.huggingface.meshes import planned_steps, reference
from tests.integrations.huggingface.models import make_config, make_model

wanted_of = cache(reference)

CASES = [
    pytest.param("llama", "ddp", "ring", False, None, marks=pytest.mark.thorough),
    ("llama", "fsdp2", "direct", True, None),
    ("qwen2", "fsdp2", "hierarchical", False, 0.5),
    pytest.param("llama", "hsdp", "ulysses", False, None, marks=pytest.mark.thorough),
    pytest.param("llama", "tensor parallel", "direct", False, None, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "kind", "algorithm", "checkpoint", "clip"), CASES)
def test_three_steps_equal_the_documents_one_by_one(pool, name, kind, algorithm, checkpoint, clip) -> None:
    losses, weights = wanted_of(name, clip)
    for got, parameters in pool.run(4, planned_steps, name, kind, algorithm, checkpoint, clip):
        assert got == pytest.approx(losses, abs=2e-6)
        assert parameters.keys() == weights.keys()
        assert max(float((parameters[key] - weights[key]).abs().max()) for key in weights) < 2e-6


@pytest.mark.parametrize("kind", ["bf16", "autocast"])
def test_mixed_precision_runs_in_bf16(pool, kind: str) -> None:
    losses, weights = wanted_of("llama", None)
    start = dict(make_model(make_config("llama"), "sdpa").named_parameters())
    for got, parameters in pool.run(4, planned_steps, "llama", kind, "direct", False, None):
        assert got == pytest.approx(losses, abs=0.03) and got != pytest.approx(losses, abs=1e-6)
        moved = torch.cat([(weights[key] - start[key]).flatten() for key in weights])
        error = torch.cat([(parameters[key] - weights[key]).flatten() for key in weights])
        assert error.norm() < 0.03 * moved.norm()


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_scaled_gradients_give_the_same_steps(pool, kind: str) -> None:
    losses, weights = wanted_of("llama", 0.5)
    for got, parameters in pool.run(4, planned_steps, "llama", kind, "ring", False, 0.5, True):
        assert got == pytest.approx(losses, abs=2e-6)
        assert max(float((parameters[key] - weights[key]).abs().max()) for key in weights) < 2e-6


def mesh(*ranks: object) -> SimpleNamespace:
    return SimpleNamespace(mesh=np.array(ranks), mesh_dim_names=("cp",))


@pytest.mark.parametrize(
    ("ranks", "per_node", "topology"),
    [
        ((0, 1, 2, 3), 8, (1, 4)),
        (range(8, 16), 8, (1, 8)),
        (range(16), 8, (2, 8)),
        ((0, 8, 16), 8, (3, 1)),
        ((0, 2, 8, 10), 8, (2, 2)),
    ],
)
def test_a_mesh_gives_nodes_and_ranks(ranks, per_node, topology) -> None:
    made = Topology.from_mesh(mesh(*ranks), per_node, cluster="a2")
    assert (made.nodes, made.ranks_per_node, made.cluster) == (*topology, "a2")


def test_processes_of_a_node_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Topology.from_mesh(mesh(0, 1, 2, 3)) == Topology(2, 2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert Topology.from_mesh(mesh(4, 5, 6)) == Topology(1, 3)


def test_meshes_that_make_no_topology_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh has the dimensions \('cp',\); valid: the context-parallel one alone"):
        Topology.from_mesh(mesh((0, 1), (2, 3)))
    with pytest.raises(ConfigError, match=r"ranks \[0, 1, 8\], with 8 processes on a node; valid: equally many"):
        Topology.from_mesh(mesh(0, 1, 8), 8)
    with pytest.raises(ConfigError, match="node by node"):
        Topology.from_mesh(mesh(8, 0), 8)
