"""Digests of the files of a checkpoint, signed with a key of the user who trains.

A checkpoint holds pickles, and loading a pickle may run any code. digests.json lists the SHA-256 of every other file,
so that a flipped bit is noticed before anything is loaded, and carries an HMAC-SHA-256 (RFC 2104) of the list and of
the folder's name, so that a file or a folder that somebody else put there is noticed too. The key is in the user's
home, not beside the checkpoint: who can write a checkpoint cannot sign it. Digests are taken of files that were
written, and compared before these are loaded; `held_folder` sees to it that nobody else writes in them meanwhile.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.held_folder import SWITCH, HeldFolder
from mindspeed_cp.train.run_files import error_text, sync_folder

DIGESTS = "digests.json"
KEY_VARIABLE = "MINDSPEED_CP_KEY_FILE"
_BLOCK_BYTES = 2**20


class DamagedCheckpointError(ConfigError):
    """A checkpoint is not whole; an older one may be."""


class UnsignedCheckpointError(ConfigError):
    """A checkpoint was not signed with the key of this user."""


def file_digest(file: BinaryIO) -> str:
    """Read a file to its end, close it, and return its SHA-256, hexadecimal."""
    digest = hashlib.sha256()
    with file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_digests(held: HeldFolder, name: str, digests: Mapping[str, str]) -> None:
    """Write digests.json; signed, if nobody else could change the files.

    Args:
        held: the folder of the checkpoint, under any name.
        name: the name that the folder will have.
        digests: the digest of each file, by its name.
    """
    files = dict(sorted(digests.items()))
    signed = {"files": files, "signature": _signature(name, files) if held.is_owned else ""}
    (held.path / DIGESTS).write_text(json.dumps(signed, indent=1) + "\n", encoding="utf-8")


def read_digests(folder: Path, *, trust_unsigned: bool, name: str | None = None) -> dict[str, str] | None:
    """Return the digest of each file of a checkpoint, by its name.

    Args:
        folder: the checkpoint.
        trust_unsigned: accept a missing or foreign signature.
        name: of the folder; None: that of its path.

    Returns:
        None if there is no digests.json and trust_unsigned is set.

    Raises:
        DamagedCheckpointError: digests.json is damaged, or there is a file of which it says nothing.
        UnsignedCheckpointError: the checkpoint is not signed with the key of this user.
    """
    try:
        digests = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        files, signature = digests["files"], digests["signature"]
        if (
            not isinstance(signature, str)
            or not signature.isascii()
            or not all(isinstance(digest, str) for digest in files.values())
        ):
            raise TypeError
    except FileNotFoundError:
        if trust_unsigned:
            return None
        raise _unsigned(folder, f"there is no {DIGESTS}") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{DIGESTS}: {error_text(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedCheckpointError(f"{DIGESTS} is damaged") from None
    if not trust_unsigned and not hmac.compare_digest(signature, _signature(name or folder.name, files)):
        raise _unsigned(folder, "the signature is not of this user's key")
    unknown = _unknown_file(folder, files)
    if unknown is not None:
        raise DamagedCheckpointError(unknown)
    return files


def _unknown_file(folder: Path, digests: Mapping[str, str]) -> str | None:
    unknown = sorted(path.name for path in folder.iterdir() if path.name not in digests and path.name != DIGESTS)
    return f"{unknown[0]} is not one of its files" if unknown else None


def find_damage(
    held: HeldFolder, digests: Mapping[str, str], share: int = 0, shares: int = 1, always: Sequence[str] = ()
) -> str | None:
    """Compare files with their digests, in one share of all files; return what is wrong with the first bad one.

    Args:
        held: the folder of the checkpoint.
        digests: of its files.
        share, shares: number of this share, and of all.
        always: names of files that belong to every share.

    Raises:
        ConfigError: others can change a file.
    """
    unknown = _unknown_file(held.path, digests) if digests else None
    if unknown is not None:
        return unknown
    names = sorted(digests)
    for name in dict.fromkeys([*(name for name in always if name in digests), *names[share::shares]]):
        try:
            if file_digest(held.open(name)) != digests[name]:
                return f"{name} was changed"
        except OSError as error:
            return f"{name}: {error_text(error)}"
    return None


def has_signing_key() -> bool:
    """Return True if this user has a key on this machine."""
    return _key_path().exists()


def signing_key() -> bytes:
    """Return the key of this user; made by the first call.

    Raises:
        ConfigError: it cannot be read or made, or others can read it.
    """
    path = _key_path()
    try:
        if not path.exists():
            _make_key(path)
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"{path}: signs checkpoints, but other users can read or change it; make it yours alone (chmod 600), "
                f"or remove it and set {SWITCH} once for the checkpoints that it signed"
            )
        key = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: the key that signs checkpoints cannot be read or made: {error_text(error)}; name a file of "
            f"yours, on a disk that outlives the run, in the environment variable {KEY_VARIABLE}"
        ) from None
    if len(key) < 32:
        raise ConfigError(f"{path}: not a valid key ({len(key)} bytes; at least 32); remove the file")
    return key


def _key_path() -> Path:
    named = os.environ.get(KEY_VARIABLE)
    if named:
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "mindspeed-cp" / "checkpoint.key"


def _make_key(path: Path) -> None:
    """Make a key that only this user can read; of several processes that try at once, one succeeds."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, path)
        sync_folder(path.parent)
    except FileExistsError:
        pass
    finally:
        partial.unlink()


def _signature(name: str, files: Mapping[str, str]) -> str:
    signed = json.dumps([name, sorted(files.items())]).encode()
    return hmac.new(signing_key(), signed, "sha256").hexdigest()


def _unsigned(folder: Path, why: str) -> UnsignedCheckpointError:
    return UnsignedCheckpointError(
        f"{folder}: was not written by this user on this machine ({why}), and loading it can run code; if you trust "
        f"where it comes from, set {SWITCH} = true, or name the key it was signed with in {KEY_VARIABLE}"
    )
