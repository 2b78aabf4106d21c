"""Programs in processes that are forked with everything imported: a Python that imports torch takes seconds of a core.

For tests of what a program computes and says. Those of how Python is started start it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.limits import HANG
from tests.processes import forked

#: Files of standard output and error of a program.
Outputs = tuple[str, str]


def run_programs(
    program: Callable[[list[str]], int | None], words: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in one process for each environment, all at once.

    Args:
        program: at module level; called with the words, which are in sys.argv too; returns or exits with the exit code.
        words: arguments of the command line.
        environments: what each process has besides this process's environment.

    Returns:
        Exit code, standard output and standard error of each; a process that has not ended within HANG is killed.
    """
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-programs-") as folder:
        outputs = [(f"{folder}/out{number}", f"{folder}/err{number}") for number in range(len(environments))]
        processes: list[BaseProcess] = []
        try:
            for environment, files in zip(environments, outputs, strict=True):
                arguments = ({**os.environ, **environment}, files, _run, (program, list(words)))
                processes.append(forked.Process(target=_begin, args=arguments))
                processes[-1].start()
            deadline = time.monotonic() + HANG
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            subprocess.CompletedProcess(list(words), process.exitcode or 0, *map(_text, files))
            for process, files in zip(processes, outputs, strict=True)
        ]


def forked_processes() -> SimpleNamespace:
    """Return a stand-in for the module `multiprocessing` of which every context forks: for modules that spawn."""
    return SimpleNamespace(get_context=lambda method: forked)


def _text(file: str) -> str:
    return Path(file).read_text() if os.path.exists(file) else ""


def _begin(
    environment: Mapping[str, str], outputs: Outputs, target: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """In a process that was forked: take environment and outputs of the program, and call the target."""
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    context = _ProgramContext(outputs)
    multiprocessing.get_context = lambda method=None: context  # type: ignore[assignment]
    target(*arguments)


def _run(program: Callable[[list[str]], int | None], words: list[str]) -> None:
    sys.argv = [program.__name__, *words]
    sys.exit(program(words))


class _ProgramContext:
    """The context of a program's own processes: they are forked, with its environment and its outputs."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs

    def Process(
        self, *, target: Callable[..., Any], args: Sequence[Any] = (), daemon: bool | None = None
    ) -> BaseProcess:
        return forked.Process(target=_begin, args=(dict(os.environ), self._outputs, target, args), daemon=daemon)

    def __getattr__(self, name: str) -> Any:
        return getattr(forked, name)
