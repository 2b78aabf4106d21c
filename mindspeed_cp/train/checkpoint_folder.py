"""The folder of checkpoints, and of one, as all ranks see it: the same, in which nobody else can write."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.train.checkpoint_digests import UnsignedCheckpointError, find_damage, has_signing_key, read_digests
from mindspeed_cp.train.held_folder import HeldFolder, check_can_be_owned
from mindspeed_cp.train.run_files import RunFiles, disk_error, error_text
from mindspeed_cp.train.world import World

_SEEN_SECONDS = 10.0  # until a node must see what another one has made; NFS keeps names for seconds
#: Small, and unpickled as a whole by every rank: no rank takes another's word for them.
_OWN_WORD = (".metadata", "common.pt", "metadata.json")


def check_place(settings: Settings, world: World) -> None:
    """Raise ConfigError on all ranks if they see different folders of checkpoints, or if others can change what one of
    them writes there and checkpoint.trust_unsigned is not set; every rank calls it, at the start of a run."""
    folder = RunFiles(Path(settings.output.folder)).checkpoints
    error = None
    try:
        if not settings.checkpoint.trust_unsigned:
            check_can_be_owned(folder)
    except ConfigError as caught:
        error = f"rank {world.rank}: {caught}"
    _raise_first(world.gather_json(error))
    mark = folder / world.broadcast_json(f".probe-{secrets.token_hex(8)}")
    if world.is_first:
        mark.touch()
    try:
        world.barrier()
        error = None if _is_seen(mark) else _other_folder(folder, world.rank)
        _raise_first(world.gather_json(error))
    finally:
        if world.is_first:
            mark.unlink()


def hold_new(folder: Path, settings: Settings, world: World) -> HeldFolder:
    """Make a folder and hold it, to write a checkpoint in it; every rank calls it.

    Raises:
        ConfigError: ranks do not see the same folder, or others can change it; on all ranks.
        DiskError: a rank cannot make or open it; on all ranks.
    """
    name = world.broadcast_json(f".probe-{secrets.token_hex(8)}")
    held, refusal, failure = None, None, None
    try:
        if world.is_first:
            folder.mkdir(0o755, parents=True)
            (folder / name).touch()
    except OSError as caught:
        failure = caught
    _raise_first_failure(folder, world.gather_json([None, _sent(failure)]))
    try:
        if _is_seen(folder / name):
            held = HeldFolder(folder, owned=not settings.checkpoint.trust_unsigned)
        if held is None or os.listdir(held.path) != [name]:
            refusal = _other_folder(folder, world.rank)
    except ConfigError as caught:
        refusal = str(caught)
    except OSError as caught:
        failure = caught
    _raise_first_failure(folder, world.gather_json([refusal, _sent(failure)]))
    assert held is not None
    if world.is_first:
        (held.path / name).unlink()
    world.barrier()
    return held


def hold_whole(
    folder: Path, digests: dict[str, str], settings: Settings, world: World
) -> tuple[HeldFolder | None, str | None]:
    """Hold a folder and compare its files with their digests; return it, and what is damaged. Every rank calls it.

    Ranks share out the files, but each compares those that it unpickles as a whole.

    Args:
        folder: the checkpoint.
        digests: of its files, as the first rank has read them.
        settings, world: of this run.

    Raises:
        ConfigError: others can change the folder or a file, or the digests are not signed; on all ranks.
    """
    held, error, damage = None, None, None
    trusts = settings.checkpoint.trust_unsigned
    try:
        held = HeldFolder(folder, owned=not trusts)
        if not trusts:
            check_sent_digests(held, folder.name, digests, needs_key=world.size <= world.local_size)
        damage = find_damage(held, digests, world.rank, world.size, _OWN_WORD)
    except OSError as caught:
        damage = error_text(caught)
    except (ConfigError, PeerError) as caught:
        error = str(caught)
    outcomes = world.gather_json([error, damage])
    _raise_first(error for error, _ in outcomes)
    return held, next((damage for _, damage in outcomes if damage is not None), None)


def check_sent_digests(held: HeldFolder, name: str, digests: Mapping[str, str], *, needs_key: bool) -> None:
    """Compare digests that the first rank sent with those of the folder, if this user's key has signed these.

    Args:
        held: the folder.
        name: its name.
        digests: what was sent.
        needs_key: whether this process must have the key: all ranks are on one machine.

    Raises:
        PeerError: they differ, or none were sent.
        UnsignedCheckpointError: the key has not signed those of the folder, though it must have.
    """
    own: Mapping[str, str] | None = digests
    if needs_key or has_signing_key():
        try:
            own = read_digests(held.path, name=name, trust_unsigned=False)
        except UnsignedCheckpointError:  # by the key of another machine
            if needs_key:
                raise
    if not digests or own != digests:
        raise PeerError(f"{name}: the first rank sent other digests than those that are signed")


def _is_seen(path: Path) -> bool:
    deadline = time.monotonic() + _SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _other_folder(folder: Path, rank: int) -> str:
    return (
        f"{folder}: rank {rank} sees another folder of that name than the first rank; give an output.folder that all "
        "nodes share"
    )


def _sent(failure: OSError | None) -> list[Any] | None:
    return None if failure is None else [failure.errno or 0, error_text(failure)]


def _raise_first_failure(folder: Path, outcomes: list[Any]) -> None:
    for refusal, failure in outcomes:
        if refusal is not None:
            raise ConfigError(refusal)
        if failure is not None:
            raise disk_error(OSError(*failure), folder.parent)


def _raise_first(errors: Iterable[str | None]) -> None:
    for error in errors:
        if error is not None:
            raise ConfigError(error)
