"""Files of a check: the page, the figures, the cluster, simulated pages, and the archive of all of them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_cp.choose.compare import Comparison
from mindspeed_cp.cluster_check.page import page
from mindspeed_cp.cluster_check.privacy import scrubbed
from mindspeed_cp.cluster_check.results import CheckResults
from mindspeed_cp.report.files import write_atomically
from mindspeed_cp.report.timelines import comparison_figure

ARCHIVE = "cluster-report.tar.gz"


class ReportWriter:
    """Writes what a check has so far.

    Args:
        folder: gets the files.
        hosts: names and addresses that may stand in messages and are replaced.
    """

    def __init__(self, folder: Path, hosts: Sequence[str]) -> None:
        self._folder, self._hosts = folder, tuple(hosts)
        self._pictures: dict[str, bytes] = {}
        self._names: list[str] = []

    def plain(self, results: CheckResults) -> dict[str, Any]:
        """Return the figures as JSON values, without names of hosts."""
        return self._clean(results).as_json()

    def _clean(self, results: CheckResults) -> CheckResults:
        """Return the figures without names of hosts."""
        clean: CheckResults = scrubbed(results, self._hosts)
        return clean

    def write(self, results: CheckResults, comparisons: Mapping[str, Comparison]) -> None:
        """Write page, figures and cluster, each in one move."""
        for name, comparison in comparisons.items():
            if name not in self._pictures:
                buffer = io.BytesIO()
                comparison_figure(comparison).savefig(buffer, format="png")
                self._pictures[name] = buffer.getvalue()
        self._write("report.html", page(self._clean(results), self._pictures))
        self._write("results.json", json.dumps(self.plain(results), indent=1))
        if results.cluster is not None:
            self._write("cluster.yaml", results.cluster["text"])

    def finish(self, results: CheckResults, comparisons: Mapping[str, Comparison]) -> Path:
        """Write everything, and the archive; return its path."""
        self.write(results, comparisons)
        path = self._folder / ARCHIVE

        def pack(new: Path) -> None:
            with tarfile.open(new, "w:gz") as archive:
                for file in self._names:
                    archive.add(self._folder / file, f"cluster-report/{file}", filter=_anonymous)

        return write_atomically("--folder", path, pack)

    def _write(self, name: str, text: str) -> None:
        write_atomically("--folder", self._folder / name, lambda new: new.write_text(text, encoding="utf-8"))
        if name not in self._names:
            self._names.append(name)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the entry without the name of the user."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
