# SPDX-License-Identifier: Apache-2.0
"""Text to batches: files -> tokens -> windows -> shuffled rows, the same on every run and host.

The text is read whole into memory. A window is `seq` tokens and the `seq` that follow each, so
`seq + 1` in all: neighbours share one token, and every token is predicted once.
"""

import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np

from zerojax.training.checks import near_rows

# Folders within the standard library that are no part of it, or tests with odd files.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


class Bytes:
    """One token per byte."""

    vocab_size = 256

    def encode(self, data: bytes) -> np.ndarray:
        """Return the bytes of one file as ids, uint8."""
        return np.frombuffer(data, np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with a mark where they are not UTF-8."""
        return bytes(ids).decode("utf-8", errors="replace")


class TokenizerFile:
    """A `tokenizer.json` of the `tokenizers` library, without its cut-off and padding."""

    def __init__(self, path: Path):
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(
                "--tokenizer: needs pip install '.[tokenizer]' in a clone of zerojax"
            ) from error
        if not path.is_file():
            raise FileNotFoundError(
                f"--tokenizer: no file {path}; give the path of a tokenizer.json"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise ValueError(f"--tokenizer: {path}: {error}; give a tokenizer.json") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def encode(self, data: bytes) -> np.ndarray | None:
        """Return the ids of one file, int32, or None where it is not UTF-8."""
        try:
            return np.asarray(self._tokenizer.encode(data.decode("utf-8")).ids, np.int32)
        except UnicodeDecodeError:
            return None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out."""
        return self._tokenizer.decode(list(ids))


Tokens = Bytes | TokenizerFile


@dataclass(frozen=True, eq=False)
class Text:
    """The ids of all files, one file after the other, and what was left out on the way."""

    ids: np.ndarray
    num_files: int
    left_out: Counter[str]

    def __str__(self) -> str:
        reasons = [f"{count:,} {why}" for why, count in sorted(self.left_out.items()) if count]
        files = "file" if self.num_files == 1 else "files"
        said = f"{len(self.ids):,} tokens from {self.num_files:,} {files}"
        return f"{said}; left out: {', '.join(reasons) or 'nothing'}"


def _walk(folder: Path, left_out: Counter[str], stdlib: bool) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        kept = [n for n in folders if not (n.startswith(".") or os.path.islink(Path(root, n)))]
        left_out["hidden or linked folders"] += len(folders) - len(kept)
        folders[:] = [name for name in kept if not (stdlib and name in SKIPPED)]
        left_out["folders of tests etc."] += len(kept) - len(folders)
        for path in (Path(root, name) for name in names):
            hidden = path.name.startswith(".") or not path.is_file()
            if not hidden and not (stdlib and path.suffix != ".py"):
                yield path
            else:
                left_out["hidden or special files" if hidden else "not .py"] += 1


def read_text(
    paths: Sequence[Path] = (), tokens: Tokens | None = None, vocab_size: int | None = None
) -> Text:
    """Read files, and folders in sorted order, into one array of ids.

    Args:
        paths: Files or folders; none: the *.py files of this Python's standard library. What a
            folder holds is left out, and counted, when it is hidden, linked, binary (a zero byte
            in it), or not UTF-8 where a tokenizer needs that; a file named here is used or refused.
        tokens: `Bytes()`, the default, or a `TokenizerFile`.
        vocab_size: The model's vocabulary; every id must be below it.

    Raises:
        ValueError, FileNotFoundError: A path cannot be used, no text at all, an id too large.
    """
    tokens = tokens or Bytes()
    pieces: dict[Path, np.ndarray] = {}  # by real path: no text is both trained on and held out
    left_out: Counter[str] = Counter()
    for root in paths or [Path(sysconfig.get_path("stdlib"))]:
        if not root.exists():
            raise FileNotFoundError(f"--data: no file or folder {root}; give a path that exists")
        named = not root.is_dir()
        try:
            for path in [root] if named else sorted(_walk(root, left_out, not paths)):
                data = path.read_bytes()
                if path.resolve() in pieces:
                    left_out["named twice"] += 1
                elif not data or (b"\0" in data and not named):
                    left_out["binary" if data else "empty"] += 1
                elif (ids := tokens.encode(data)) is not None:
                    pieces[path.resolve()] = ids
                elif named:
                    raise ValueError(
                        f"--data: {path} is not UTF-8; convert it, or omit --tokenizer"
                    )
                else:
                    left_out["not UTF-8"] += 1
        except OSError as error:
            name = error.filename or root
            raise ValueError(
                f"--data: cannot read {name} ({error.strerror}); give others"
            ) from error
    text = Text(np.concatenate([np.empty(0, np.uint8), *pieces.values()]), len(pieces), left_out)
    if not text.ids.size:
        raise ValueError(f"--data: {', '.join(map(str, paths))}: {text}; give --data with text")
    if (largest := int(text.ids.max())) >= (vocab_size or largest + 1):
        said = f"--data: token id {largest} is not below the vocabulary of {vocab_size}"
        raise ValueError(f"{said}; give --vocab {largest + 1} or more")
    return text


@dataclass(frozen=True, eq=False)
class Windows:
    """A grain source: item i is `{"tokens": int32 [seq + 1]}`, from token i * seq on."""

    ids: np.ndarray
    seq: int
    name: str

    def __len__(self) -> int:
        return max(0, (len(self.ids) - 1) // self.seq)

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        start = int(index) * self.seq
        return {"tokens": self.ids[start : start + self.seq + 1].astype(np.int32)}


def split_text(text: Text, seq: int, held_out: float = 0.05) -> tuple[Windows, Windows]:
    """Hold out the last windows, disjoint from the rest; ValueError without one for each side."""
    if seq < 1:
        raise ValueError(f"--seq: a window of {seq} tokens is none; give --seq 1 or more")
    num_held_out = max(1, round((len(text.ids) - 1) // seq * held_out))
    cut = len(text.ids) - (num_held_out * seq + 1)
    if cut <= seq:
        said = f"{len(text.ids)} tokens are too few for a training and a validation window"
        raise ValueError(f"--data: {said} of {seq} + 1 each; give more --data or a smaller --seq")
    return Windows(text.ids[:cut], seq, "training"), Windows(text.ids[cut:], seq, "validation")


def check_batch(rows: int, num_batch_shards: int, microbatches: int = 1) -> None:
    """Raise ValueError unless devices that differ in rows, and microbatches, can share a batch."""
    multiple = num_batch_shards * microbatches
    if found := near_rows(rows, multiple):
        product = (
            f"{num_batch_shards} data-parallel devices x {microbatches} microbatches = {multiple}"
        )
        near = " or ".join(str(fit) for fit in found if fit)
        raise ValueError(f"--batch: {rows} rows, not a multiple of {product}; give --batch {near}")


def make_batches(
    windows: Windows, rows: int, seed: int = 0, process: tuple[int, int] = (0, 1), needed: int = 1
) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    """Iterate without end over `{"tokens": int32 [rows / processes, seq + 1]}`.

    One global shuffle by `seed` (below 2**32), another each epoch; a batch may straddle two epochs,
    so no window is dropped, and at least `needed` batches are there before a window comes twice.
    Process (i, n) reads the i-th of n blocks of rows of each global batch, which is therefore the
    same for every n. `get_state()` is a small dict; `set_state()` resumes at the very batch that
    would have come next. Everything runs in the calling thread.

    Raises:
        ValueError: Too few windows, rows that the processes cannot share, or a bad seed.
    """
    index, count = process
    if rows < 1 or rows % count:
        raise ValueError(f"--batch: {rows} rows for {count} processes; give a multiple of {count}")
    if len(windows) < rows * needed:
        said = f"the {windows.name} split has {len(windows)} windows of {windows.seq} tokens"
        remedy = "give more --data, a smaller --batch or fewer --eval-batches"
        raise ValueError(f"--data: {said}, and {needed} x {rows} are needed; {remedy}")
    rows_in_order = grain.MapDataset.source(windows).shuffle(seed=seed).repeat()
    # Endless as it is, nothing is dropped; without this its length overflows for one row a batch.
    mine = rows_in_order.batch(rows // count, drop_remainder=True)[index::count]
    return iter(mine.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
