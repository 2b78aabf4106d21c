"""`mindspeed-cp train`: train a GPT on packed documents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mindspeed_cp.cli.options import Overrides
from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_cp.config import Settings


def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Settings, a YAML file; an unknown key says where all are. Default: a quick start of minutes.",
            show_default=False,
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Ranks, on this machine. Default: those of train.data_parallel_size replicas, or of one.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
) -> int:
    """Train a GPT with Megatron-core on packed documents.

    Starts the ranks on this machine. Under a launcher that sets RANK and WORLD_SIZE, such as torchrun, on one machine
    or on many, it is one rank: torchrun --nnodes 2 --nproc-per-node 4 ... -m mindspeed_cp train CONFIG
    """
    from mindspeed_cp.config.settings import QUICKSTART, load_settings
    from mindspeed_cp.device.select import load_cuda, require_torch_npu
    from mindspeed_cp.device.versions import require_megatron_of_train

    all_overrides = list(overrides or ())
    if as_json:
        all_overrides.append("output.log_interval=0")
    settings = load_settings(config or QUICKSTART, all_overrides, _print_note)
    require_megatron_of_train()
    if settings.train.device == "npu":
        require_torch_npu("train.device = npu", "train.device: cpu")
    elif settings.train.device == "cuda":
        load_cuda("train.device = cuda")
    if settings.context_parallel_suite.algorithm == "auto":
        settings = _resolve_auto(settings, quiet=as_json or settings.output.log_interval == 0)
    from mindspeed_cp.train.launch import run_under_launcher, start_local_ranks

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if nproc is not None:
            raise ConfigError(f"--nproc {nproc}: the launcher has set the number of ranks; leave --nproc out")
        return run_under_launcher(settings, as_json=as_json)
    return start_local_ranks(settings, nproc, as_json=as_json)


def _print_note(text: str) -> None:
    """Print a note on standard error, once for all ranks."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"note: {text}", err=True)


def _resolve_auto(settings: Settings, *, quiet: bool) -> Settings:
    """Return the settings with an algorithm in place of auto; print the reasons once."""
    from mindspeed_cp.config.candidates import resolve_auto
    from mindspeed_cp.device.select import resolve_device_type

    chosen, decision = resolve_auto(settings)
    if decision is not None and not quiet and os.environ.get("RANK", "0") == "0":
        lines = list(decision.reasons)
        if resolve_device_type(settings.train.device) == "cpu":
            lines.append("modelled is that cluster, not this CPU")
        typer.echo("\n".join(("algorithm: auto", *(f"  {line}" for line in lines))))
    return chosen
