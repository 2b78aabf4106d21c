"""The command line: mindspeed-cp train | plan | simulate | calibrate | convert | doctor.

Invalid input prints one line on standard error and exits with code 2; a run that fails for another reason exits with 1.
Commands import their modules when they are called: `--help` and `plan` never import torch.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mindspeed_cp.cli.calibrate import calibrate
from mindspeed_cp.cli.convert import convert
from mindspeed_cp.cli.doctor import doctor
from mindspeed_cp.cli.length_report import lengths
from mindspeed_cp.cli.options import PlanOptions, SimulateOptions, command_of
from mindspeed_cp.cli.train import train
from mindspeed_cp.errors import (
    MESSAGE_LIMIT,
    ConfigError,
    OperatorError,
    PeerError,
    PlanError,
    missing_package,
    shortened,
)

BAD_INPUT, FAILED, STOPPED = 2, 1, 130

app = typer.Typer(
    name="mindspeed-cp",
    help="Context parallelism for long, packed sequences in Megatron-core: train, inspect plans, check a machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from mindspeed_cp import __version__

        typer.echo(f"mindspeed-cp {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command()(lengths)
app.command()(train)
app.command()(command_of(PlanOptions, "plan"))
app.command()(calibrate)
app.command()(command_of(SimulateOptions, "simulate"))
app.command()(convert)
app.command()(doctor)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; print errors of the user as one line."""
    # torch would import torch_npu by itself, and a broken installation of it would end every command in a traceback.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path of other bytes than the terminal's letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        result: Any = app(
            list(sys.argv[1:] if arguments is None else arguments), prog_name="mindspeed-cp", standalone_mode=False
        )
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (ConfigError, PlanError) as error:
        return _print_error(str(error), BAD_INPUT)
    except (PeerError, OperatorError) as error:
        return _print_error(str(error), FAILED)
    except ModuleNotFoundError as error:
        text = missing_package(error)
        if text is None:
            raise
        return _print_error(text, BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _print_error("stopped", STOPPED)
    except BrokenPipeError:  # the reader of the output ended, as in `mindspeed-cp plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        path = f"{error.filename}: " if error.filename is not None else ""
        return _print_error(f"{path}{error.strerror or error}", FAILED)
    except MemoryError:
        return _print_error("the memory of this machine, or its limit (ulimit -v), does not suffice", FAILED)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # a usage error of typer or of click
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
    return _print_error(f"{text.rstrip('.')}; see {command} --help", BAD_INPUT)


def _print_error(text: str, code: int) -> int:
    print("error: " + shortened(" ".join(text.split()), MESSAGE_LIMIT), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
