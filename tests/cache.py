# SPDX-License-Identifier: Apache-2.0
"""Programs compiled by an earlier test or run are read from .jax_cache, also by subprocesses.

JAX writes an entry in place, so another process may read half of it. Each process of pytest has
therefore a folder of its own, and shares complete entries after each file of tests, by hard links.
A run that is killed leaves such a folder, which nobody reads.
"""

import atexit
import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from tests import ROOT

SHARED = ROOT / ".jax_cache"
LARGEST, DAY = 4e9, 86_400  # bytes, beyond which it begins anew, and seconds

# Without locations in the sources, an entry is found again when lines move; the names that the
# receipt reads are part of its key, as they are part of the program's text.
SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
}
# For a process that is to be killed: it reads what is there, and leaves no half of an entry.
READ_ONLY = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}


def begin() -> str:
    """Make the folder of this process, to be JAX's; before JAX is imported."""
    with contextlib.suppress(OSError):
        SHARED.mkdir(exist_ok=True)
        tidy()
    writable = os.access(SHARED, os.W_OK)
    own = tempfile.mkdtemp(prefix="run-", dir=SHARED if writable else None)
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    os.environ.update(SETTINGS)
    return own


def tidy() -> None:
    """Remove what killed runs left, and everything once it is too much."""
    entries = [path.stat() for path in SHARED.glob("*-cache")]
    if sum(entry.st_size for entry in entries) > LARGEST:
        for path in SHARED.glob("*-cache"):
            path.unlink(missing_ok=True)
    for path in SHARED.glob("run-*"):
        if time.time() - path.stat().st_mtime > DAY:
            shutil.rmtree(path, ignore_errors=True)


def share(own: Path) -> None:
    """Exchange entries with the other processes: each folder gets what it lacks."""
    with contextlib.suppress(FileNotFoundError):  # made anew by another run
        here, there = ({path.name for path in folder.glob("*-cache")} for folder in (own, SHARED))
        for names, source, target in ((there - here, SHARED, own), (here - there, own, SHARED)):
            for name in names:
                link(source / name, target / name)


def link(source: Path, target: Path) -> None:
    """Link an entry; where that cannot be, it is compiled again."""
    with contextlib.suppress(OSError):
        target.hardlink_to(source)
