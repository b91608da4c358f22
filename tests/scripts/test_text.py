# SPDX-License-Identifier: Apache-2.0
"""Text to batches: the same everywhere, nothing lost, nothing silently left out."""

import itertools
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from scripts.parts.text import (
    Bytes,
    Text,
    TokenizerFile,
    Windows,
    check_batch,
    make_batches,
    read_text,
    split_text,
)

SEQ = 4


def numbered(num_windows: int) -> Windows:
    """Windows whose first token is their number x SEQ."""
    return Windows(np.arange(num_windows * SEQ + 1), SEQ, "training")


def rows(iterator, num_batches: int) -> np.ndarray:
    """The next batches as [num_batches, rows, SEQ + 1]."""
    return np.stack([batch["tokens"] for batch in itertools.islice(iterator, num_batches)])


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "text"
    (root / "a").mkdir(parents=True)
    (root / ".git").mkdir()
    for name, data in {
        "b.txt": b"second",
        "a/z.py": b"first ",
        "c.md": "thïrd".encode(),
        "d.bin": b"\x00\x01",
        "e.txt": b"",
        ".hidden": b"no",
        ".git/config": b"no",
    }.items():
        (root / name).write_bytes(data)
    (root / "link").symlink_to(root / "a")
    return root


def test_a_folder_is_read_in_sorted_order_and_says_what_it_left_out(folder):
    text = read_text([folder])
    assert text.ids.tobytes().decode() == "first secondthïrd"
    assert str(text) == (
        "18 tokens from 3 files; left out: 1 binary, 1 empty, 2 hidden or linked folders, "
        "1 hidden or special files"
    )
    np.testing.assert_array_equal(text.ids, read_text([folder]).ids)


def test_a_file_named_twice_is_read_once(folder):
    text = read_text([folder / "b.txt", folder])
    assert text.ids.tobytes().decode() == "secondfirst thïrd"
    assert text.left_out["named twice"] == 1
    assert str(read_text([folder / "b.txt"])) == "6 tokens from 1 file; left out: nothing"


def test_bytes_of_a_named_file_are_taken_as_they_are(folder):
    assert read_text([folder / "d.bin"]).ids.tolist() == [0, 1]
    assert Bytes().decode([104, 105, 255]) == "hi\N{REPLACEMENT CHARACTER}"


def test_the_default_text_is_the_standard_library():
    text = read_text()
    assert len(text.ids) > 5_000_000
    assert text.ids.dtype == np.uint8
    assert b"class OrderedDict" in text.ids.tobytes()
    assert text.left_out["folders of tests etc."] > 0


def test_no_token_is_both_trained_on_and_held_out():
    text = Text(np.arange(1000), 1, Counter())
    train, held_out = split_text(text, SEQ)
    seen = [{x for i in range(len(w)) for x in w[i]["tokens"].tolist()} for w in (train, held_out)]
    assert not seen[0] & seen[1]
    assert len(held_out) == round(249 * 0.05)
    assert held_out[len(held_out) - 1]["tokens"][-1] == 999
    assert len(train) + len(held_out) >= 248


def test_every_token_is_predicted_once():
    windows = numbered(5)
    targets = [x for i in range(len(windows)) for x in windows[i]["tokens"][1:].tolist()]
    assert targets == list(range(1, 21))


def test_an_epoch_holds_every_window_once_and_the_next_is_in_another_order():
    found = rows(make_batches(numbered(12), 3, seed=1), 8)[:, :, 0].reshape(2, 12)
    assert [sorted(epoch) for epoch in found.tolist()] == [list(range(0, 48, 4))] * 2
    assert found[0].tolist() != found[1].tolist()
    assert found[0].tolist() != sorted(found[0].tolist())


def test_a_batch_may_straddle_epochs_so_that_no_window_is_dropped():
    found = rows(make_batches(numbered(5), 2), 5)[:, :, 0].ravel()
    assert Counter(found.tolist()) == dict.fromkeys(range(0, 20, 4), 2)


def test_batches_depend_on_the_seed_only():
    first, again, other = (rows(make_batches(numbered(50), 4, seed), 9) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert first.dtype == np.int32
    assert (first != other).any()


@pytest.mark.parametrize("processes", [2, 4])
def test_the_rows_of_all_processes_are_the_global_batch(processes):
    whole = rows(make_batches(numbered(50), 8), 10)
    parts = [
        rows(make_batches(numbered(50), 8, process=(i, processes)), 10) for i in range(processes)
    ]
    assert parts[0].shape == (10, 8 // processes, SEQ + 1)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("done", [0, 1, 7])
def test_a_restored_iterator_continues_at_the_next_batch(done):
    iterator = make_batches(numbered(9), 2, process=(1, 2))
    rows(iterator, done) if done else None
    state = iterator.get_state()
    expected = rows(iterator, 12)
    restored = make_batches(numbered(9), 2, process=(1, 2))
    restored.set_state(state)
    np.testing.assert_array_equal(rows(restored, 12), expected)


def test_reading_starts_no_threads():
    before = threading.active_count()
    rows(make_batches(numbered(50), 4), 3)
    assert threading.active_count() == before


@pytest.fixture
def tokenizer_path(tmp_path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 7}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file_neither_cuts_off_nor_pads(tokenizer_path, tmp_path):
    (tmp_path / "text.txt").write_text("one two two three")
    tokenizer = TokenizerFile(tokenizer_path)
    assert tokenizer.vocab_size == 8
    text = read_text([tmp_path / "text.txt"], tokenizer, vocab_size=8)
    assert text.ids.tolist() == [0, 1, 1, 7]
    assert tokenizer.decode([0, 1]) == "one two"
    with pytest.raises(
        ValueError, match=r"token id 7 is not below .* of 7; give --vocab 8 or more"
    ):
        read_text([tmp_path / "text.txt"], tokenizer, vocab_size=7)


def test_what_a_tokenizer_cannot_read(tokenizer_path, tmp_path):
    tokenizer = TokenizerFile(tokenizer_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "text/good.txt").write_text("one")
    assert read_text([tmp_path / "text"], tokenizer).left_out["not UTF-8"] == 1
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8; convert it, or omit --tokeniz"):
        read_text([tmp_path / "text/latin.txt"], tokenizer)


def test_tokenizer_files_that_cannot_be_used(tokenizer_path, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no file .*nothing; give the path of a tokenizer"):
        TokenizerFile(tmp_path / "nothing")
    tokenizer_path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: .*; give a tokenizer.json"):
        TokenizerFile(tokenizer_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[tokenizer\]'"):
        TokenizerFile(tokenizer_path)


def test_paths_that_cannot_be_used(folder, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*nothing; give a path that"):
        read_text([folder, tmp_path / "nothing"])
    with pytest.raises(ValueError, match=r"e.txt: 0 tokens from 0 files; left out: 1 empty; give"):
        read_text([folder / "e.txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"0 files; left out: nothing; give --data with text"):
        read_text([tmp_path / "empty"])

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"cannot read .*z.py \(Permission denied\); give others"):
        read_text([folder])


def test_a_folder_that_cannot_be_listed(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(ValueError, match=r"cannot read .*text \(Permission denied\); give others"):
        read_text([folder])


@pytest.mark.parametrize(
    ("num_tokens", "seq", "message"),
    [
        (
            9,
            4,
            r"9 tokens are too few .* window of 4 \+ 1 each; give more --data or a smaller --seq",
        ),
        (0, 4, r"0 tokens are too few"),
        (100, 0, r"--seq: a window of 0 tokens is none; give --seq 1 or more"),
    ],
)
def test_texts_that_are_too_short(num_tokens, seq, message):
    with pytest.raises(ValueError, match=message):
        split_text(Text(np.arange(num_tokens), 1, Counter()), seq)


def test_the_shortest_text_that_will_do():
    train, held_out = split_text(Text(np.arange(10), 1, Counter()), 4)
    assert (len(train), len(held_out)) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 6}, r"training split has 5 windows of 4 tokens, and 1 x 6 are needed; give more"),
        ({"rows": 2, "needed": 3}, r"and 3 x 2 are needed; .* or fewer --eval-batches"),
        ({"rows": 3, "process": (0, 2)}, r"--batch: 3 rows for 2 processes; give a multiple of 2"),
        ({"rows": 0}, r"--batch: 0 rows"),
        ({"rows": 2, "seed": -1}, r"Seed must be an integer between 0 and 2\*\*32-1"),
    ],
)
def test_batches_that_cannot_be_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_batches(numbered(5), **arguments)


def test_rows_that_devices_and_microbatches_cannot_share():
    check_batch(12, 2, 3)
    with pytest.raises(
        ValueError, match=r"^--batch: 8 rows, not a multiple of 2 data-parallel devices x 3 micro"
    ):
        check_batch(8, 2, 3)
    with pytest.raises(ValueError, match=r"= 6; give --batch 6 or 12$"):
        check_batch(8, 2, 3)
    with pytest.raises(ValueError, match=r"= 8; give --batch 8$"):
        check_batch(4, 8)
