# SPDX-License-Identifier: Apache-2.0
"""Saves on disk: folders named by their step, each whole or not there, with a sum for every file.

    FOLDER/1200/manifest.json   what was saved: plan, versions, every leaf's shape and dtype
    FOLDER/1200/SHA256SUMS      of all files below; `sha256sum -c SHA256SUMS` checks them by hand
    FOLDER/1200/params/         the parameters, written by Orbax
    FOLDER/1200/master/         the master copy, if the precision has one
    FOLDER/1200/optimizer/      optimizer state, step and key

A save is written under another name and renamed when it is complete; one that is removed is renamed
first. So a folder whose name is a number is a whole save, unless its files were damaged later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TextIO

FORMAT = 1  # of the folder; a newer one is refused
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"
WRITING, DELETING = ".orbax-checkpoint-tmp", ".deleting"  # ends of names that are no saves
DAMAGED = ".damaged"


class DamagedError(ValueError):
    """A file of a save is missing, or is not what was written."""


class Save(NamedTuple):
    """One save: the number of updates that its state has seen, and its folder."""

    step: int
    path: Path

    def manifest(self) -> dict[str, Any]:
        """What was saved. Raises DamagedError, or ValueError for a format newer than `FORMAT`."""
        path = self.path / MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
            found = manifest["format"]
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{path} cannot be read ({error})") from error
        if found != FORMAT:
            raise ValueError(
                f"{path}: its format is {found}, and this zerojax reads {FORMAT}. Use the zerojax "
                f"that wrote it ({manifest.get('versions', {}).get('zerojax')}) or a newer one."
            )
        return manifest


def local_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path. Raises ValueError for an address such as gs://..., which is none."""
    if "://" in str(path):
        raise ValueError(f"{path}: saves are read and written on file systems; mount it, or copy.")
    return Path(path).absolute()


def find_saves(path: str | os.PathLike[str]) -> list[Save]:
    """The saves in a folder, the newest first; a folder that is itself a save is the only one.

    Raises:
      FileNotFoundError: the path is missing, or holds no save.
    """
    path = local_path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder; pass the folder of a run's saves.")
    if (path / MANIFEST).exists() or (path / SUMS).exists():
        return [Save(int(path.name) if path.name.isdecimal() else -1, path)]
    found = [Save(int(x.name), x) for x in path.iterdir() if x.is_dir() and x.name.isdecimal()]
    if not found:
        names = sorted(x.name for x in path.iterdir() if x.name.endswith(WRITING))
        begun = f" ({', '.join(names)} was never completed)" if names else ""
        raise FileNotFoundError(f"{path} holds no save{begun}; pass the folder of a run's saves.")
    return sorted(found, reverse=True)


def finalize(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes manifest and sums into a folder that is complete but for them."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    files = [x for x in sorted(folder.rglob("*")) if x.is_file()]
    # Orbax still writes to its own metadata, of which nothing is read here.
    names = [str(x.relative_to(folder)) for x in files if x.name != "_CHECKPOINT_METADATA"]
    lines = [f"{digest}  {name}\n" for name, digest in _digests(folder, names)]
    with (folder / SUMS).open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def find_damage(save: Save, items: Sequence[str], index: int = 0, count: int = 1) -> str | None:
    """Names a file that is not as it was written, or None.

    Args:
      save: the save.
      items: the folders in it that matter, such as ("params",).
      index: which share of the files to read.
      count: into how many shares they are dealt out.
    """
    try:
        lines = (save.path / SUMS).read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (FileNotFoundError, ValueError) as error:  # missing, not UTF-8, not two columns
        return f"{save.path / SUMS} cannot be read ({error})"
    if MANIFEST not in sums:
        return f"{save.path / SUMS} does not name {MANIFEST}"
    needed = sorted(x for x in sums if x == MANIFEST or x.split("/")[0] in items)
    mine = needed[index::count]
    try:
        for name, digest in _digests(save.path, mine):
            if digest != sums[name]:
                size = (save.path / name).stat().st_size
                return f"{save.path / name} ({size:,} bytes) does not match its SHA-256 sum"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    return None


def _digests(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:  # hashing leaves Python's lock
        yield from zip(names, pool.map(digest, names), strict=True)


def open_folder(folder: Path) -> TextIO:
    """Makes the folder ready for one run to write to, and returns the lock that keeps others out.

    What an earlier run left unfinished is removed.

    Raises:
      OSError: the folder cannot be made or written to, or another run holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        lock = (folder / ".lock").open("w")
    except OSError as error:
        why = f"cannot write to the folder {folder} ({error.strerror})"
        raise OSError(error.errno, f"{why}; give another for the saves") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        why = (
            f"another run is saving to {folder}; wait until it ends, or give another folder (if it "
            "is this program's own Checkpointer, close() that first)"
        )
        raise BlockingIOError(error.errno, why) from error
    except OSError as error:  # a network file system without locks
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    for path in folder.iterdir():
        name, dot, end = path.name.partition(".")
        if name.isdecimal() and (dot + end).startswith((WRITING, DELETING)):
            _remove(path)
    return lock


def check_shared(folder: Path) -> None:
    """Raises OSError unless the folder that process 0 opened is there for this process too."""
    try:
        (folder / ".lock").open().close()
    except OSError as error:
        why = f"this process does not see the folder {folder} that process 0 made"
        raise OSError(
            error.errno, f"{why} ({error.strerror}); give one that all processes reach"
        ) from error


def close_folder(lock: TextIO) -> None:
    """Lets other runs have the folder, also while a forked child holds a copy of the lock."""
    with contextlib.suppress(OSError):  # a network file system without locks
        fcntl.flock(lock, fcntl.LOCK_UN)
    lock.close()


def prune(found: Sequence[Save], keep_latest: int, keep_best: str | None) -> None:
    """Removes all but the latest saves and the one whose metric is the smallest.

    A folder without manifest and sums is not ours, whatever its name. What cannot be removed is
    named in a warning: it is no reason for a run to end.
    """
    found = [x for x in found if (x.path / MANIFEST).exists() or (x.path / SUMS).exists()]
    kept = set(found[:keep_latest])
    if found and keep_best is not None:
        kept.add(min(found, key=lambda save: (_metric(save, keep_best), -save.step)))
    for save in found:
        if save not in kept:
            _remove(save.path)


def _remove(path: Path) -> None:
    """Renames a folder, so that it is no save, and removes it; warns if that fails."""
    try:
        if not path.name.endswith(DELETING):
            path = path.rename(f"{path}{DELETING}")
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except OSError as error:  # such as a file that is still open, on a network file system
        warnings.warn(f"{path} could not be removed ({error}); remove it by hand", stacklevel=2)


def set_aside(save: Save) -> Path:
    """Renames a damaged save, so that it is none, and the run can save that step again."""
    number = 1
    while True:
        path = Path(f"{save.path}{DAMAGED}{'' if number == 1 else number}")
        if not path.exists():
            return save.path.rename(path)
        number += 1


def _metric(save: Save, name: str) -> float:
    """The save's metric; infinite where it has none, is not a number, or cannot be read."""
    # A damaged manifest is reported where it is restored.
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        value = float(save.manifest()["metrics"].get(name, math.inf))
        return math.inf if math.isnan(value) else value
    return math.inf
