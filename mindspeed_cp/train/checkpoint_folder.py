"""The folder of a checkpoint as all ranks hold it: one that is to be written, or one whose files are whole."""

from __future__ import annotations

import os
from pathlib import Path

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.train.checkpoint_digests import find_damage, read_digests
from mindspeed_cp.train.held_folder import HeldFolder, check_can_be_owned
from mindspeed_cp.train.local_agent import STORE_VARIABLE
from mindspeed_cp.train.run_files import RunFiles, error_text
from mindspeed_cp.train.world import World


def check_place(settings: Settings, world: World) -> None:
    """Raise ConfigError on all ranks if they see different folders of checkpoints, or if others can change what one of
    them writes there, unless checkpoint.trust_unsigned is set; every rank calls it."""
    if settings.checkpoint.trust_unsigned:
        return
    folder = RunFiles(Path(settings.output.folder)).checkpoints
    error, inode = None, None
    try:
        check_can_be_owned(folder)
        inode = folder.stat().st_ino
    except (ConfigError, OSError) as caught:
        error = f"rank {world.rank}: {caught}"
    _check_same(folder, world.gather_json([error, inode]))


def _check_same(folder: Path, outcomes: list[tuple[str | None, int | None]]) -> None:
    for error, _ in outcomes:
        if error is not None:
            raise ConfigError(error)
    if len({inode for _, inode in outcomes}) > 1:
        raise ConfigError(
            f"{folder}: ranks see different folders of that name; give an output.folder that all nodes see as one, or "
            "set checkpoint.trust_unsigned = true if its file system has no inode numbers of its own"
        )


def hold_new(folder: Path, settings: Settings, world: World) -> HeldFolder:
    """Hold an empty folder, to write a checkpoint in it; every rank calls it.

    Raises:
        ConfigError: ranks do not see the same folder, it is not empty, or others can change it; on all ranks.
    """
    held, error, inode = None, None, None
    try:
        held = HeldFolder(folder, owned=not settings.checkpoint.trust_unsigned)
        if not settings.checkpoint.trust_unsigned:
            inode = held.identity[0]
        if any(held.path.iterdir()):
            error = f"{folder}: is not empty, though it was made for a new checkpoint"
    except OSError as caught:
        error = f"{folder}: rank {world.rank} cannot open it ({error_text(caught)}); all nodes must see output.folder"
    except ConfigError as caught:
        error = str(caught)
    _check_same(folder, world.gather_json([error, inode]))
    assert held is not None
    return held


def hold_whole(
    folder: Path, digests: dict[str, str], settings: Settings, world: World
) -> tuple[HeldFolder | None, str | None]:
    """Hold a folder and compare its files with their digests; return it, and what is damaged. Every rank calls it.

    Ranks share out the files of one folder; where nodes have folders of their own, the ranks of each do.

    Raises:
        ConfigError: others can change the folder or a file; on all ranks.
        PeerError: the digests are not those that this user signed.
    """
    held, error, damage = None, None, None
    trusts = settings.checkpoint.trust_unsigned
    try:
        held = HeldFolder(folder, owned=not trusts)
    except OSError as caught:
        damage = error_text(caught)
    except ConfigError as caught:
        error = str(caught)
    identities = world.gather_json(held.identity if held is not None else None)
    if held is not None:
        if STORE_VARIABLE in os.environ and not trusts:  # all ranks are on this machine, with the same key
            check_sent_digests(held, folder.name, digests)
        own = list(held.identity)
        same = [rank for rank, identity in enumerate(identities) if identity == own]
        try:
            damage = find_damage(held, digests, same.index(world.rank), len(same))
        except ConfigError as caught:
            error = str(caught)
    outcomes = world.gather_json([error, damage])
    for error, _ in outcomes:
        if error is not None:
            raise ConfigError(error)
    return held, next((damage for _, damage in outcomes if damage is not None), None)


def check_sent_digests(held: HeldFolder, name: str, digests: dict[str, str]) -> None:
    """Raise PeerError if digests that the first rank sent are not those of the folder, signed with this user's key.

    Args:
        held: the folder.
        name: its name.
        digests: what was sent.
    """
    if read_digests(held.path, name=name, trust_unsigned=False) != digests:
        raise PeerError(f"{name}: the first rank sent other digests than those that are signed")
