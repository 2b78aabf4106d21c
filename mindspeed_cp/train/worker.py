"""One rank: joins the other ranks, trains, and reports every error as one line and an exit code.

`mindspeed-cp train` starts it as `python -m mindspeed_cp.train.worker SETTINGS-AS-JSON`; under torchrun the command
line calls `run_rank`. Importing this module imports neither torch nor Megatron.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from pathlib import Path

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device import open_files
from mindspeed_cp.errors import PeerError
from mindspeed_cp.train.exit_note import EXIT_NOTE, clear_exit_note, exit_note_text, exit_process, write_exit_note
from mindspeed_cp.train.failures import (
    classify_error,
    is_lost_rank_error,
    is_out_of_memory,
    lost_over_device,
    out_of_memory_error,
)
from mindspeed_cp.train.held_folder import keep_files_owned
from mindspeed_cp.train.local_agent import end_with_launcher
from mindspeed_cp.train.uncompiled import uncompiled_megatron


def run_rank(settings: Settings, *, as_json: bool) -> None:
    """Train as the rank that the environment names; the first rank prints the summary.

    Raises:
        ConfigError: A setting cannot be used, or the loss is not finite.
        PeerError: Another rank died; the error names it where that can be found out.
        Stopped: The rank was asked to stop in a step that cannot be finished.
    """
    faulthandler.enable(2)  # a crash in a library leaves its stacks on standard error
    open_files.raise_limit()
    keep_files_owned()
    with uncompiled_megatron():
        from mindspeed_cp.megatron import megatron_compat
        from mindspeed_cp.train.loop import train
    from mindspeed_cp.report.text import print_tables, wrap_text
    from mindspeed_cp.train.lost_ranks import name_lost_ranks
    from mindspeed_cp.train.progress_display import ignore_closed_terminal
    from mindspeed_cp.train.rank_logs import open_own_log
    from mindspeed_cp.train.run_files import RunFiles
    from mindspeed_cp.train.summary import closing_lines, summary_table
    from mindspeed_cp.train.world import join_ranks

    with megatron_compat(), join_ranks(settings) as world:
        if world.device.type != "cpu":
            write_exit_note(EXIT_NOTE, exit_note_text(world.rank, world.device.type))
        try:
            summary = train(settings, world)
        except (PeerError, RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise out_of_memory_error(settings, world.rank) from None
            if isinstance(error, PeerError) or is_lost_rank_error(error):
                if world.device.type != "cpu":  # the library's watchdog leaves no time to ask which rank is gone
                    raise lost_over_device(world.rank, error, world.device.type) from None
                raise name_lost_ranks(world, error) from None
            raise
    clear_exit_note(EXIT_NOTE)
    if summary is None:
        return
    with ignore_closed_terminal(), open_own_log(RunFiles(Path(settings.output.folder)).logs) as log:
        for stream in (log, sys.stdout):
            if as_json:
                print(json.dumps(summary), file=stream, flush=True)
                continue
            print_tables([summary_table(summary)], stream)
            for line in closing_lines(summary):
                print(wrap_text(line), file=stream, flush=True)


def main() -> None:
    """Run a rank that `mindspeed-cp train` started."""
    end_with_launcher()
    settings = Settings.model_validate_json(sys.argv[1])
    try:
        run_rank(settings, as_json="--json" in sys.argv[2:])
    except BaseException as error:
        kind, line, code = classify_error(error)
        if kind == "bug":
            traceback.print_exc()
        write_exit_note(kind, line)
        exit_process(code)


if __name__ == "__main__":
    main()
