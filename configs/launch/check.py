"""What launch.sh has to know of the settings, of a rank table and of this machine before it starts the ranks.

    check.py settings CONFIG --ranks-per-node N --nodes N --node-rank N [--set SECTION.KEY=VALUE ...]
    check.py rank-table FILE --ranks-per-node N --nodes N --machine NAME --versions "1.2 1.0"
    check.py machine --device npu|cpu --ranks-per-node N --nodes N --node-rank N --master-port PORT

Bad input: one line on standard error, exit code 2.  `machine` lists what is wrong, a line each: setting, value, remedy.
Imports neither torch nor torch_npu.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Finding = tuple[str, str, str]  # setting, value, what is valid
_SOURCE_IT = "source CANN's set_env.sh, or name it: --cann /usr/local/Ascend/ascend-toolkit/set_env.sh"


class Refused(Exception):
    """Bad input; carries setting, value and what is valid."""

    def __str__(self) -> str:
        setting, value, valid = self.args
        return f"{setting} = {value}: {valid}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the checks; its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    checks = parser.add_subparsers(dest="check", required=True)
    settings = checks.add_parser("settings")
    settings.add_argument("config")
    settings.add_argument("--set", dest="overrides", action="append", default=[])
    table = checks.add_parser("rank-table")
    table.add_argument("file", type=Path)
    table.add_argument("--machine", required=True)
    table.add_argument("--versions", required=True)
    machine = checks.add_parser("machine")
    machine.add_argument("--device", required=True)
    machine.add_argument("--master-port", type=int, required=True)
    for check in (settings, table, machine):
        check.add_argument("--ranks-per-node", type=int, required=True)
    for check in (settings, machine):
        check.add_argument("--node-rank", type=int, required=True)
    for check in (settings, table, machine):
        check.add_argument("--nodes", type=int, required=True)
    given = parser.parse_args(arguments)
    try:
        if given.check == "settings":
            print_settings(given.config, given.overrides, given.ranks_per_node, given.nodes, given.node_rank)
        elif given.check == "rank-table":
            versions = given.versions.split()
            check_rank_table(given.file, given.ranks_per_node, given.nodes, given.machine, versions)
            print(given.file.absolute())
        else:
            port = given.master_port if given.nodes > 1 and given.node_rank == 0 else None
            for finding in machine_findings(given.device, given.ranks_per_node, port):
                print("\t".join(finding))
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def print_settings(config: str, overrides: Sequence[str], ranks_per_node: int, nodes: int, node_rank: int) -> None:
    """Prints context_parallel_suite.timeout_seconds, rounded down, and output.folder, if the settings are right."""
    try:
        from mindspeed_cp.config.rules import data_parallel_size
        from mindspeed_cp.config.settings import load_settings
        from mindspeed_cp.errors import ConfigError
        from mindspeed_cp.train.run_files import RunFiles
    except ImportError as error:
        remedy = "activate the environment of mindspeed-cp, or `pip install -e .` in a checkout"
        raise Refused("--python", sys.executable, f"cannot import mindspeed_cp ({error}); {remedy}") from None
    try:
        settings = load_settings(config, overrides)
        data_parallel_size(settings, ranks_per_node * nodes)
        folder = RunFiles(Path(settings.output.folder)).folder
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    suite = settings.context_parallel_suite
    spanned = settings.model_parallel_size / ranks_per_node
    if node_rank == 0 and spanned > 1 and spanned != suite.nodes:
        print(
            f"note: context_parallel_suite.nodes = {suite.nodes}, but with {ranks_per_node} ranks on a node the "
            f"{suite.context_parallel_size} ranks of a context are on {spanned:g}; plans follow the setting",
            file=sys.stderr,
        )
    print(int(suite.timeout_seconds))
    print(folder)


def check_rank_table(path: Path, ranks_per_node: int, nodes: int, machine: str, versions: Sequence[str]) -> None:
    """Refused unless HCCL would find in `path` the ranks numbered node by node.

    A file that is missing or a link makes torch-npu go on without it, and one with other ranks fails in the first
    operation only, so both are refused here.  Format: "Configuring Resource Information Through a rank table File",
    HCCL user guide.
    """

    def refuse(valid: str) -> Refused:
        return Refused("RANK_TABLE_FILE", str(path), valid)

    if path.is_symlink():
        raise refuse("is a link, which torch-npu ignores; name the file itself")
    try:
        table = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise refuse(f"cannot be read ({error.strerror}); must be a rank table, JSON with a server_list") from None
    except ValueError as error:
        raise refuse(f"is not JSON ({error}); must be a rank table, JSON with a server_list") from None
    servers = table.get("server_list") if isinstance(table, dict) else None
    if not isinstance(servers, list) or not all(isinstance(server, dict) for server in servers):
        raise refuse('has no server_list; must be JSON: {"server_list": [{"server_id": ..., "device": [...]}], ...}')
    if table.get("version") not in versions:
        valid = " or ".join(map(json.dumps, versions))
        raise refuse(f"has version {json.dumps(table.get('version'))}; {machine} takes {valid}")
    if table.get("status", "completed") != "completed":
        raise refuse(f"has status {json.dumps(table['status'])}; HCCL takes a table that is completed")
    devices = [_devices(server) for server in servers]
    count, ranks = sum(map(len, devices)), ranks_per_node * nodes
    if count != ranks:
        raise refuse(f"has {count} devices, and there are {ranks} ranks ({nodes} nodes of {ranks_per_node})")
    ids = sorted(_rank_ids(each) for each in devices)
    if ids != [[node * ranks_per_node + local for local in range(ranks_per_node)] for node in range(nodes)]:
        raise refuse(
            f"has rank_id {ids} on its servers; ranks are numbered node by node, 0 to {ranks_per_node - 1} first"
        )
    if table["version"] == "1.2":
        if not isinstance(table.get("super_pod_list"), list):
            raise refuse('has version "1.2" and no super_pod_list, which says what servers are in one SuperPoD')
        if not all("super_device_id" in device for each in devices for device in each):
            raise refuse('has version "1.2" and devices without super_device_id')


def _devices(server: Mapping[str, Any]) -> list[dict[str, Any]]:
    devices = server.get("device")
    return [device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else []


def _rank_ids(devices: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the sorted rank ids of the devices, -1 for each that is not a number."""
    texts = [str(device.get("rank_id")) for device in devices]
    return sorted(int(text) if text.isdigit() else -1 for text in texts)


def machine_findings(device: str, ranks_per_node: int, port: int | None) -> Iterator[Finding]:
    """What keeps the ranks from starting on this machine; rank 0 is to listen on `port`, if one is given."""
    if device == "npu":
        yield from cann_findings(os.environ)
        yield from device_findings(ranks_per_node, os.environ.get("ASCEND_RT_VISIBLE_DEVICES"), Path("/dev"))
    if port is not None:
        yield from port_findings(port)


def cann_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """CANN's set_env.sh sets ASCEND_HOME_PATH, and puts CANN's libraries on LD_LIBRARY_PATH."""
    home = environment.get("ASCEND_HOME_PATH", "")
    if not home:
        yield "ASCEND_HOME_PATH", "(nothing)", _SOURCE_IT
    elif not Path(home).is_dir():
        yield "ASCEND_HOME_PATH", home, f"no such folder; {_SOURCE_IT}"
    else:
        folders = [Path(folder) for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
        if not any((folder / "libascendcl.so").exists() for folder in folders):
            path = ":".join(map(str, folders)) or "(nothing)"
            yield "LD_LIBRARY_PATH", path, f"no libascendcl.so there; {_SOURCE_IT}"


def device_findings(ranks_per_node: int, visible: str | None, folder: Path) -> Iterator[Finding]:
    """The driver makes a node davinciN in `folder` (/dev) for each device; ASCEND_RT_VISIBLE_DEVICES hides some."""
    present = sorted(int(node.name[7:]) for node in folder.glob("davinci*") if re.fullmatch(r"davinci\d+", node.name))
    if len(present) < ranks_per_node:
        remedy = f"{ranks_per_node} ranks, and {len(present)} devices ({folder}/davinciN); see `npu-smi info`"
        yield "--ranks-per-node", str(ranks_per_node), f"{remedy}, or use fewer ranks or --device cpu"
    elif visible:
        chosen = [text for text in visible.split(",") if text.strip().isdigit()]
        if len(chosen) < ranks_per_node:
            remedy = f"shows {len(chosen)} devices to {ranks_per_node} ranks; unset it, or use fewer ranks"
            yield "ASCEND_RT_VISIBLE_DEVICES", visible, remedy


def port_findings(port: int) -> Iterator[Finding]:
    """Rank 0 listens on `port`, of one address of node 0."""
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as rank 0 does: a port just left is free
        try:
            free.bind(("", port))
        except OSError as error:
            yield "--master-port", str(port), f"cannot be had ({error.strerror}); name another, the same on all nodes"


if __name__ == "__main__":
    sys.exit(main())
