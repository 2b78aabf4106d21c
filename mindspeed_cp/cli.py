"""The command line: mindspeed-cp train | report | plan | simulate | calibrate | doctor.

Bad input gives one line on standard error and exit code 2; a run that failed for another reason exits with 1.  Commands
import what they need when they are called: `--help` and `plan` never import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mindspeed_cp.cli_calibrate import calibrate
from mindspeed_cp.cli_report import report
from mindspeed_cp.cli_simulate import simulate
from mindspeed_cp.errors import ConfigError, OperatorError, PeerError, PlanError

if TYPE_CHECKING:
    from mindspeed_cp.config import Settings

BAD_INPUT, FAILED, STOPPED = 2, 1, 130

app = typer.Typer(
    name="mindspeed-cp",
    help="Context parallelism for long, packed sequences in Megatron-core: train, look at plans, check a machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _version(wanted: bool) -> None:
    if wanted:
        from mindspeed_cp import __version__

        typer.echo(f"mindspeed-cp {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="Settings, a YAML file; configs/reference.yaml lists every key.")],
    nproc: Annotated[
        int | None,
        typer.Option(help="Local ranks. Default: one replica, tensor * context parallel size.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Replace one setting; may be repeated.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume",
            help="Go on from the newest checkpoint, or refuse if there is one.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
) -> int:
    """Train a GPT with Megatron-core on packed documents.

    Starts its own local ranks. Under torchrun (or any launcher that sets RANK and WORLD_SIZE) it is one rank:
    torchrun --nproc-per-node 4 -m mindspeed_cp.cli train CONFIG
    """
    from mindspeed_cp.config import load_settings

    wanted = list(overrides or ())
    if resume is not None:
        wanted.append(f"checkpoint.resume={'true' if resume else 'false'}")
    if as_json:
        wanted.append("output.progress=none")
    settings = load_settings(config, wanted)
    if settings.context_parallel_suite.algorithm == "auto":
        settings = _chosen(settings, quiet=as_json or settings.output.progress == "none")
    from mindspeed_cp.train.launch import run_under_launcher, start_local_ranks

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if nproc is not None:
            raise ConfigError(f"--nproc {nproc}: the launcher has set the number of ranks; leave --nproc out")
        return run_under_launcher(settings, as_json=as_json)
    return start_local_ranks(settings, nproc, as_json=as_json)


def _chosen(settings: Settings, *, quiet: bool) -> Settings:
    """The settings with an algorithm in the place of auto; the first rank, or who starts the ranks, says why it."""
    from mindspeed_cp.devices import device_type
    from mindspeed_cp.train.auto import resolved

    asked = settings
    settings, decision = resolved(asked)
    if decision is not None and not quiet and os.environ.get("RANK", "0") == "0":
        lines = list(decision.reasons)
        if device_type(settings.train.device) == "cpu":
            lines.append("modelled is that cluster, not this CPU")
        if asked.context_parallel_suite.per_batch:
            also = settings.context_parallel_suite.also
            lines.append(f"rows may also take {', '.join(also)}" if also else "per_batch: nothing else is near it")
        typer.echo("\n".join(("algorithm: auto", *(f"  {line}" for line in lines))))
    return settings


@app.command()
def plan(
    lengths: Annotated[
        str | None, typer.Option(help="Document lengths in tokens, such as 5000,37,1200.", show_default=False)
    ] = None,
    lengths_file: Annotated[
        Path | None,
        typer.Option(help="File of lengths: numbers in text or JSON, or an .npy or .npz array.", show_default=False),
    ] = None,
    kv_lengths: Annotated[
        str | None,
        typer.Option(help="Cross-attention: lengths of each document's keys; full mask only.", show_default=False),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", "--cp", min=1, help="Context-parallel ranks in all. Default: 4 on each node.", show_default=False
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes.", show_default=False)] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of each node.", show_default=False)] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads. Default: as many as query heads.", show_default=False)
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Channels of a head of queries and keys.")] = 64,
    head_dim_v: Annotated[
        int | None, typer.Option(help="Channels of a head of values. Default: the same.", show_default=False)
    ] = None,
    mask: Annotated[str, typer.Option(help="causal or full.")] = "causal",
    window: Annotated[
        str | None,
        typer.Option(
            metavar="LEFT,RIGHT", help="Sliding window in tokens; -1: no limit on that side.", show_default=False
        ),
    ] = None,
    alibi: Annotated[bool, typer.Option("--alibi", help="Linear biases.")] = False,
    dropout: Annotated[float, typer.Option(help="Share of attention weights that is dropped.")] = 0.0,
    algorithm: Annotated[
        str,
        typer.Option(
            help="ring, double_ring, ulysses, hybrid, all_gather, direct, hierarchical, or Megatron's name for one."
        ),
    ] = "ring",
    layout: Annotated[
        str | None,
        typer.Option(
            help="All but ulysses and hierarchical: zigzag (default), contiguous or balanced.", show_default=False
        ),
    ] = None,
    cp_window_size: Annotated[
        int | None, typer.Option(help="double_ring: ranks of an inner ring. Default: of a node.", show_default=False)
    ] = None,
    ulysses_degree: Annotated[
        int | None, typer.Option(help="hybrid: ranks that split heads among them.", show_default=False)
    ] = None,
    prefetch: Annotated[
        int | None,
        typer.Option(help="direct: rounds under way while one is computed; hierarchical: nodes.", show_default=False),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="a2, a3, a800, h800, h200 or a YAML file: whose speeds hierarchical decides by. Default: a2.",
            show_default=False,
        ),
    ] = None,
    routing: Annotated[
        bool | None,
        typer.Option("--routing/--no-routing", help="hierarchical: keys cross to a node once.", show_default=False),
    ] = None,
    head_split: Annotated[
        bool | None,
        typer.Option(
            "--head-split/--no-head-split", help="hierarchical: heads may be split inside nodes.", show_default=False
        ),
    ] = None,
    remap: Annotated[
        str | None,
        typer.Option(help="hierarchical: off, auto (default), qkv or hidden: linear layers apart.", show_default=False),
    ] = None,
    simulated_placements: Annotated[
        int | None,
        typer.Option(help="hierarchical: simulate so many placements, take the fastest.", show_default=False),
    ] = None,
    max_seqlen_per_dp_cp_rank: Annotated[
        int | None, typer.Option(help="hierarchical: most tokens that a rank may hold.", show_default=False)
    ] = None,
    hidden_size: Annotated[
        int | None,
        typer.Option(help="hierarchical: of the model. Default: heads * head-dim.", show_default=False),
    ] = None,
    ffn_hidden_size: Annotated[
        int | None,
        typer.Option(help="hierarchical: of the model. Default: 8/3 of the hidden size.", show_default=False),
    ] = None,
    tensor_model_parallel_size: Annotated[
        int | None, typer.Option(help="hierarchical: ranks that share the heads. Default: 1.", show_default=False)
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="hierarchical: these share rows of hidden states too. Default: no.",
            show_default=False,
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Any option of the algorithm; may be repeated.", show_default=False),
    ] = None,
    bytes_per_element: Annotated[int, typer.Option(min=1, max=8, help="Of q, k, v and out; 2 is bf16.")] = 2,
    verify: Annotated[bool, typer.Option("--verify", help="Prove the plan.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw who computes which tile when.", show_default=False)] = None,
    as_json: AsJson = False,
) -> int:
    """Show how a packed batch is split over ranks: layout, tiles of every step, balance, bytes sent, buffers."""
    from mindspeed_cp.cli_plan import plan_options, read_keys, read_lengths, read_window, topology, write_plan
    from mindspeed_cp.plan import AttentionConfig, build_plan
    from mindspeed_cp.plan.hierarchical import cluster_of

    batch = read_lengths(lengths, lengths_file)
    keys = read_keys(kv_lengths)
    attention = AttentionConfig(
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        mask=mask,
        window=read_window(window),
        alibi=alibi,
        dropout=dropout,
    )
    named = {
        "layout": layout,
        "cp_window_size": cp_window_size,
        "ulysses_degree": ulysses_degree,
        "prefetch": prefetch,
        "routing": routing,
        "head_split": head_split,
        "remap": remap,
        "simulated_placements": simulated_placements,
        "max_seqlen_per_dp_cp_rank": max_seqlen_per_dp_cp_rank,
        "hidden_size": hidden_size,
        "ffn_hidden_size": ffn_hidden_size,
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "sequence_parallel": sequence_parallel,
    }
    options = plan_options(algorithm, named, option or ())
    place = topology(ranks, nodes, ranks_per_node, cluster)
    if cluster is not None:
        cluster_of(place)  # also where the algorithm does not look at it
    made = build_plan(batch, place, attention, algorithm, kv_documents=keys, **options)
    write_plan(made, bytes_per_element, options, verify=verify, png=png, as_json=as_json)
    return 0


app.command()(calibrate)
app.command()(simulate)
app.command()(report)


@app.command()
def doctor(
    device: Annotated[str, typer.Option(help="cpu, cuda, npu, or auto: all that is there.")] = "auto",
    link_seconds: Annotated[
        float | None,
        typer.Option(help="Time limit of the links between NPUs; default: 120, and 15 more for each NPU."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine: versions, devices, links, and the attention operator against the fp64 reference."""
    if device not in ("auto", "cpu", "cuda", "npu"):
        raise ConfigError(f"--device {device}: is no device that can be checked; valid: auto, cpu, cuda, npu")
    if link_seconds is not None and not link_seconds > 0:
        raise ConfigError(f"--link-seconds {link_seconds:g}: must be more than 0, or left out")
    from mindspeed_cp.doctor import examine, write_report

    report = examine(device, link_seconds=link_seconds)
    write_report(report, as_json=as_json)
    return 0 if report["ok"] else FAILED


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors of the user are printed as one line."""
    # Otherwise torch imports torch_npu by itself, and a broken installation of that ends every command in a traceback.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result: Any = app(given, prog_name="mindspeed-cp", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (ConfigError, PlanError) as error:
        return _say(str(error), BAD_INPUT)
    except (PeerError, OperatorError) as error:
        return _say(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return _say("stopped", STOPPED)
    except BrokenPipeError:  # the reader of our output has gone, as in `mindspeed-cp plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        usage = getattr(
            error, "format_message", None
        )  # typer's and click's usage errors, whichever of the two is inside
        if usage is None:
            raise
        return _usage_error(error, usage())


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run())


def _usage_error(error: Exception, text: str) -> int:
    command = getattr(getattr(error, "ctx", None), "command_path", "mindspeed-cp")
    if type(error).__name__ == "NoArgsIsHelpError":  # `mindspeed-cp` alone: the help is the message
        print(text)
        return BAD_INPUT
    return _say(f"{text.rstrip('.')}; see {command} --help", BAD_INPUT)


def _say(text: str, code: int) -> int:
    print("error: " + " ".join(text.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
