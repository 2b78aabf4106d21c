"""What papers report of these systems, to be read beside what is modelled here.

None of it was measured by this project, and no setting is quite the same: models, lengths and clusters differ.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reported:
    """A published figure.

    Attributes:
        system: whose.
        figure: times as fast.
        over: as what.
        where: the clusters on which it was measured, as the paper says; presets of this project by name.
        source: the paper.
        presets: clusters of this project to which it comes nearest.
        column: the system's name in the tables, if it is in them.
    """

    system: str
    figure: str
    over: str
    where: str
    source: str
    presets: tuple[str, ...] = ()
    column: str | None = None


REPORTED = (
    Reported(
        "Zeppelin", "2.80x on average, up to 6.60x", "the state of the art (steps)",
        "nodes of 8 A800 with 4 x 200 Gb/s, of 8 H800 with 8 NICs, of 8 H200 with 8 x 400 Gb/s", "arXiv 2509.21841",
        ("a800", "h800", "h200"), "Zeppelin",
    ),
    Reported(
        "Zeppelin", "routing alone 1.6x; engine 3.2x; with routing 3.51x; with remap 3.64x",
        "its baseline, lengths of ArXiv (steps)", "not stated in what was at hand", "arXiv 2509.21841",
        ("a800", "h800", "h200"), "Zeppelin",
    ),
    Reported("Megatron dynamic CP", "up to 1.48x", "static context parallelism", "NVIDIA GPUs", "Megatron-core"),
    Reported("ByteScale", "up to 7.89x", "the state of the art (steps)", "NVIDIA GPUs", "arXiv 2502.21231"),
    Reported("FlexSP", "up to 1.98x", "the state of the art (steps)", "NVIDIA GPUs", "arXiv 2412.01523", (), "FlexSP"),
    Reported("WLB-LLM", "1.23x", "its baseline (steps)", "NVIDIA GPUs", "arXiv 2503.17924", (), "WLB-LLM"),
    Reported(
        "DHP", "up to 1.36x", "Megatron-LM and DeepSpeed (steps)", "8 nodes of Ascend 910B", "arXiv 2602.21788",
        ("a2",), "DHP",
    ),
    Reported("TASP", "up to 3.58x", "ring attention (attention alone)", "H100, MI300X", "arXiv 2509.26541"),
    Reported("DistCA", "up to 1.35x", "the state of the art (steps)", "512 H200", "arXiv 2510.18121", ("h200",)),
)  # fmt: skip


def for_cluster(name: str) -> list[Reported]:
    """Return the figures that were measured on a cluster like this one."""
    return [reported for reported in REPORTED if name in reported.presets]
