"""How long plans take: building one, one rank's tiles, and the proof.

    python -m benchmarks.plan [--documents 1000] [--ranks 8 64] [--repeat 7] [--prove-up-to 8] [--only ring direct]

Documents have lognormal lengths (about 926 tokens on average: 1,000 of them are 926K tokens). Medians of the repeats.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from benchmarks.timing import median_us
from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms import ALGORITHMS


def median_ms(run: Callable[[], object], repeat: int) -> float:
    """Return the median milliseconds of a call, after one to warm up."""
    return median_us(run, repeat) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--prove-up-to", type=int, default=8, help="prove plans of at most this many ranks")
    parser.add_argument("--only", nargs="+", default=[*ALGORITHMS, "ring:balanced", "direct:balanced"])
    args = parser.parse_args()
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(500), 1.2, args.documents), 1, 200_000).astype(int)
    documents, attention = Documents(lengths), AttentionConfig(8)
    print(f"{len(documents)} documents, {documents.tokens} tokens, medians of {args.repeat}")
    for ranks in args.ranks:
        topology = Topology(1, ranks)
        for name in args.only:
            algorithm, _, layout = name.partition(":")
            options = {"layout": layout} if layout else {}

            def build(
                topology: Topology = topology, algorithm: str = algorithm, options: dict[str, str] = options
            ) -> Plan:
                return build_plan(documents, topology, attention, algorithm, **options)

            plan = build()
            took = median_ms(build, args.repeat)
            tiles = median_ms(lambda plan=plan, rank=ranks // 2: plan.forward.tiles(rank), args.repeat)  # type: ignore[misc]
            count = len(plan.forward.tiles(ranks // 2))
            line = f"{name:16}{ranks:4} ranks: build {took:7.1f} ms, one rank's tiles {tiles:6.1f} ms ({count} tiles)"
            if ranks <= args.prove_up_to:
                line += f", proof of all ranks {median_ms(lambda plan=plan: verify_plan(plan), 3):6.0f} ms"  # type: ignore[misc]
            print(line, flush=True)


if __name__ == "__main__":
    main()
