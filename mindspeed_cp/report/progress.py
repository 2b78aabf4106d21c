"""Progress of long work: on a terminal's standard error, what is being done and for how long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

#: Seconds before anything is shown.
QUIET_SECONDS = 2.0


@contextmanager
def show_progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line with a running clock while the body runs, from the third second on; nothing unless the standard error
    is a terminal.

    Args:
        text: what is being done.

    Yields:
        A function that replaces the text.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(text)
    timer = Timer(QUIET_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda text: progress.update(task, description=text)
    finally:
        timer.cancel()
        timer.join()  # it may just be starting the display
        progress.stop()
