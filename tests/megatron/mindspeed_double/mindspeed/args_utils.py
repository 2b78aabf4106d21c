"""MindSpeed's arguments, parsed from the command line while its adaptor is imported."""

import sys
from argparse import ArgumentParser, Namespace

ARGS = Namespace()


def parse() -> Namespace:
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--context-parallel-algo", default="megatron_cp_algo")
    parser.add_argument("--attention-mask-type", default="causal")
    parser.add_argument("--position-embedding-type", default="rope")
    parser.add_argument("--recompute-method", default=None)
    parser.add_argument("--ulysses-degree-in-cp", type=int, default=None)
    for name, default in (("cp-window-size", 1), ("pre-tockens", 65536), ("next-tockens", 0), ("sparse-mode", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in (
        *("use-cp-send-recv-overlap", "use-fused-ring-attention-update", "multi-latent-attention", "moe-fb-overlap"),
        *("use-fused-rotary-pos-emb", "use-fused-rmsnorm", "use-fused-swiglu"),
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--context-parallel-size", type=int, default=1)
    vars(ARGS).update(vars(parser.parse_known_args(sys.argv[1:])[0]))
    return ARGS
