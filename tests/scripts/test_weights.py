# SPDX-License-Identifier: Apache-2.0
"""Weights in a safetensors file: the same bits back, one leaf at a time, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import pickle
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import zerojax as zj
from models import transformer
from scripts import export
from scripts.parts import weights
from scripts.parts.weights import finest_params, read_safetensors, write_safetensors
from scripts.train import Options, main
from tests import ROOT, toy
from tests.scripts.test_train import TEXT, read_rows
from tests.training.test_initial_params import assert_equal, run_two_processes

KEY = jax.random.key(toy.KEY)
NAMES = [
    *("blocks.down", "blocks.scale", "blocks.up", "embed", "head", "ids"),
    *("odd.bias", "odd.in", "odd.mid", "odd.out", "temperature"),
]


def bits(x):
    return np.asarray(x).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_same_bits_come_back(stage, num_devices, tmp_path):
    plan = toy.make_plan(num_devices, stage=stage)
    state = zj.init_state(plan, KEY)
    write_safetensors(tmp_path / "w.safetensors", state.params, metadata={"run": "7"})

    loaded = load_file(tmp_path / "w.safetensors")
    assert sorted(loaded) == NAMES
    for name, x in zip(NAMES, jax.tree.leaves(state.params), strict=True):
        assert loaded[name].dtype == x.dtype
        np.testing.assert_array_equal(bits(loaded[name]), bits(x))
    with safe_open(tmp_path / "w.safetensors", "np") as file:
        expected = {"format": "flax", "zerojax": zj.__version__, "run": "7"}
        assert file.metadata() == expected

    given = read_safetensors(tmp_path / "w.safetensors", plan.abstract_state.params)
    for other in (plan, toy.make_plan(9 - num_devices, stage=3 - stage)):
        again = zj.init_state(other, KEY, given)
        assert_equal(again.params, state.params)


def test_bf16_is_rounded_as_astype_rounds(tmp_path):
    params = zj.init_state(toy.make_plan(), KEY).params
    write_safetensors(tmp_path / "w.safetensors", params, "bfloat16")
    loaded = load_file(tmp_path / "w.safetensors")
    assert loaded["ids"].dtype == np.int32
    for name, x in zip(NAMES, jax.device_get(jax.tree.leaves(params)), strict=True):
        expected = x if name == "ids" else x.astype(jnp.bfloat16)
        np.testing.assert_array_equal(bits(loaded[name]), bits(expected))
    plan = toy.make_plan(precision="bf16_master")
    given = read_safetensors(tmp_path / "w.safetensors", plan.abstract_state.params)
    state = zj.init_state(plan, KEY, given)
    np.testing.assert_array_equal(state.params["embed"], loaded["embed"])
    np.testing.assert_array_equal(state.master["embed"], loaded["embed"].astype(np.float32))


@pytest.mark.parametrize("stage", [1, 3])
def test_the_master_copy_is_what_is_written(stage, tmp_path):
    plan = toy.make_plan(precision="bf16_master", stage=stage, frozen=("head",))
    state = zj.init_state(plan, KEY)
    write_safetensors(tmp_path / "w.safetensors", finest_params(state), "float32")
    loaded = load_file(tmp_path / "w.safetensors")
    assert sorted(loaded) == NAMES  # what is frozen has no master, and is there
    np.testing.assert_array_equal(loaded["head"], state.params["head"].astype(np.float32))
    np.testing.assert_array_equal(loaded["embed"], state.master["embed"])
    assert np.any(loaded["embed"] != np.asarray(state.params["embed"], np.float32))  # the twin
    given = read_safetensors(tmp_path / "w.safetensors", plan.abstract_state.params)
    assert_equal(zj.init_state(plan, KEY, given), state)


def test_a_dict_of_paths_is_written_as_its_tree_is(tmp_path):
    nested, paths = tmp_path / "nested", tmp_path / "paths"
    write_safetensors(nested, {"a": {"b": np.ones(2)}, "c": np.ones(3)})
    write_safetensors(paths, {"c": np.ones(3), "a/b": np.ones(2)})
    assert nested.read_bytes() == paths.read_bytes()


def test_an_array_under_two_names_is_written_under_both(tmp_path):
    table = jnp.arange(6.0)
    write_safetensors(tmp_path / "w.safetensors", {"embed": table, "head": {"kernel": table}})
    loaded = load_file(tmp_path / "w.safetensors")
    assert sorted(loaded) == ["embed", "head.kernel"]
    assert_equal(list(loaded.values()), [table, table])


def test_every_dtype_and_odd_shape(tmp_path):
    dtypes = [name for name in weights.NAMES if name not in ("float64", "int64", "uint64")]
    params = {name: jnp.ones((3, 1), name) for name in dtypes}
    params |= {"scalar": jnp.float32(3), "none": jnp.zeros((0, 4)), "wide": np.ones(3)}
    params["turned"] = np.arange(6.0).reshape(2, 3).T  # not in C order
    write_safetensors(tmp_path / "w.safetensors", params)
    loaded = load_file(tmp_path / "w.safetensors")
    assert_equal([loaded[name] for name in sorted(params)], jax.tree.leaves(params))
    lazy = read_safetensors(tmp_path / "w.safetensors", params)
    assert_equal(
        [x[(slice(None),) * len(x.shape)] for x in jax.tree.leaves(lazy)], jax.tree.leaves(params)
    )
    size = int.from_bytes((tmp_path / "w.safetensors").read_bytes()[:8], "little")
    header = json.loads((tmp_path / "w.safetensors").read_bytes()[8 : 8 + size])
    assert size % 8 == 0
    for name, x in params.items():  # aligned, for readers that map the file
        assert header[name]["data_offsets"][0] % x.dtype.itemsize == 0


def write_whole(path, params):
    """The twin: all leaves on the host, then one call."""
    save_file({f"{i}": np.array(x) for i, x in enumerate(jax.tree.leaves(params))}, path)


def peak_bytes(write, *args):
    tracemalloc.start()
    write(*args)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("stage", [0, 3])
def test_the_host_holds_one_leaf_at_a_time(stage, tmp_path):
    init = lambda key: {f"w{i}": jax.random.normal(key, (1024, 128)) for i in range(8)}
    plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(), stage=stage)
    state, leaf = zj.init_state(plan, KEY), 1024 * 128 * 4
    write_safetensors(tmp_path / "w.safetensors", state.params)
    peak = peak_bytes(write_safetensors, tmp_path / "w.safetensors", state.params)
    assert leaf <= peak < 1.5 * leaf
    assert peak_bytes(write_whole, tmp_path / "twin.safetensors", state.params) > 8 * leaf
    given = read_safetensors(tmp_path / "w.safetensors", plan.abstract_state.params)
    assert peak_bytes(lambda: given["w0"][:128]) < leaf / 4


def test_a_file_that_was_not_finished_has_no_name(tmp_path, monkeypatch):
    path, old = tmp_path / "w.safetensors", {"a": np.ones(3), "b": np.ones(2)}
    write_safetensors(path, old)
    before, count = path.read_bytes(), 0

    def fail(leaf, dtype):
        nonlocal count
        count += 1
        if count == 2:
            raise OSError("disk full")
        return np.asarray(leaf, dtype)

    monkeypatch.setattr(weights, "_to_host", fail)
    with pytest.raises(OSError, match="disk full"):
        write_safetensors(path, {"a": np.zeros(3), "b": np.zeros(2)})
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["w.safetensors"]


class Bomb:
    """What a pickle may do to its reader."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_reading_executes_nothing(tmp_path):
    trace = tmp_path / "trace"
    (tmp_path / "w.safetensors").write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(ValueError, match="damaged or no safetensors file"):
        read_safetensors(tmp_path / "w.safetensors", PARAMS)
    assert not trace.exists()
    pickle.loads((tmp_path / "w.safetensors").read_bytes())  # the twin
    assert trace.exists()


def file_of(params, path):
    write_safetensors(path, params)
    return path


def abstract(params):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


PARAMS = {"blocks": {"up": np.ones((3, 4), np.float32)}, "ids": np.arange(3, dtype=np.int32)}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda p: {"blocks": p["blocks"]}, ["lack 1 of the plan's 2 leaves: 'ids' int32[3]"]),
        (lambda p: p | {"head": p["ids"]}, ["1 leaves more than the plan's 2: 'head' int32[3]"]),
        (lambda p: {"model": p}, ["'blocks/up' float32[3, 4]", "'model.blocks.up'", "path"]),
        (
            lambda p: p | {"blocks": {"up": p["blocks"]["up"][1:]}},
            ["'blocks/up' is float32[2, 4] for float32[3, 4]", "Plan for the model"],
        ),
        (lambda p: p | {"ids": np.ones(3)}, ["'ids' is float64[3] for int32[3]"]),
    ],
)
def test_a_file_of_other_weights_is_refused(change, parts, tmp_path):
    path = file_of(change(PARAMS), tmp_path / "w.safetensors")
    with pytest.raises(ValueError) as error:
        read_safetensors(path, abstract(PARAMS))
    for part in [str(path), *parts]:
        assert part in str(error.value)


def test_what_the_plan_marks_as_none_the_file_may_lack(tmp_path):
    path = file_of({"ids": PARAMS["ids"]}, tmp_path / "w.safetensors")
    given = read_safetensors(path, abstract(PARAMS) | {"blocks": None})
    assert given["blocks"] is None
    assert_equal(given["ids"][:], PARAMS["ids"])


@pytest.mark.parametrize("kept", [0, 4, 60, -1])
def test_a_damaged_file_is_named(kept, tmp_path):
    path = file_of(PARAMS, tmp_path / "w.safetensors")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"w\.safetensors is damaged or no safetensors file: ."):
        read_safetensors(path, abstract(PARAMS))


def test_what_cannot_be_written_or_read_is_named(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(FileNotFoundError, match=r"no file .*w\.safetensors; give the path"):
        read_safetensors(path, PARAMS)
    with pytest.raises(ValueError, match=r"two leaves have the name 'a\.b'; rename"):
        write_safetensors(path, {"a.b": np.ones(1), "a": {"b": np.ones(1)}})
    with pytest.raises(ValueError, match=r"two leaves have the name 'a\.b'; rename"):
        write_safetensors(path, {"a/b": np.ones(1), "a": {"b": np.ones(1)}})
    with pytest.raises(ValueError, match=r"leaf 'k' is key<fry>; the format knows float64"):
        write_safetensors(path, {"k": jax.random.key(0)})
    header = b'{"w":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}} '
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"12")
    with pytest.raises(ValueError, match=r"w\.safetensors: 'w' is F8_E4M3; convert it to one of"):
        read_safetensors(path, {"w": np.ones(2)})
    save_file({"a/b": np.ones(1), "a.b": np.ones(1)}, path)
    with pytest.raises(ValueError, match=r"names that differ only in '/' and '\.'"):
        read_safetensors(path, {"a": {"b": np.ones(1)}})
    assert [each.name for each in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Options of a run of 3 steps, and a file of other weights for its model."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "text.txt").write_text(TEXT)
    options = Options(
        layers=1,
        seq=16,
        steps=3,
        data=(folder / "text.txt",),
        out=folder / "out",
        eval_every=0,
        eval_batches=1,
        sample=0,
        init_from=folder / "w.safetensors",
    )
    config = dataclasses.replace(transformer.PRESETS["tiny"], num_layers=1, seq_len=16)
    params = jax.jit(functools.partial(transformer.init_params, config))(jax.random.key(9))
    write_safetensors(folder / "w.safetensors", params)
    return options, params


def test_training_from_a_file_is_training_from_its_arrays(small, monkeypatch):
    options, params = small
    folder = options.out.parent
    main(options)
    main(dataclasses.replace(options, stage=0, out=folder / "stage0"))
    main(dataclasses.replace(options, init_from=None, out=folder / "drawn"))  # the twin
    monkeypatch.setattr(transformer, "init_params", lambda config, key: params)
    main(dataclasses.replace(options, init_from=None, out=folder / "constant"))

    def losses(name):
        return [row["loss"] for row in read_rows(folder / name)]

    assert len(losses("out")) == 3
    assert losses("out") == losses("constant")
    np.testing.assert_allclose(losses("out"), losses("stage0"), rtol=1e-4)
    assert abs(losses("out")[0] - losses("drawn")[0]) > 1e-4
    assert json.loads((folder / "out/options.json").read_text())["init_from"].endswith(
        "w.safetensors"
    )


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"layers": 2},
            [
                "--init-from: ",
                "w.safetensors: ",
                "16 of params' 20",
                "[1, 128] for float32[2, 128]",
                "--layers",
            ],
        ),
        ({"init_from": ROOT / "Makefile"}, ["--init-from: ", "Makefile is damaged or no"]),
        ({"init_from": ROOT / "none"}, ["--init-from: no file ", "none; give the path"]),
    ],
)
def test_train_refuses_a_file_that_does_not_fit(small, change, parts, tmp_path):
    options, _ = small
    with pytest.raises((ValueError, OSError)) as error:
        main(dataclasses.replace(options, out=tmp_path / "out", **change))
    for part in parts:
        assert part in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_writes_the_parameters_before_rounding(dtype, tmp_path, capsys):
    (tmp_path / "options.json").write_text('{"layers": 1}')
    plan = toy.make_plan(precision="bf16_master")
    state = zj.init_state(plan, KEY)
    with zj.Checkpointer(tmp_path / "saves", plan) as checkpoints:
        checkpoints.save(state)
    out = tmp_path / "w.safetensors"
    wanted = export.Options(tmp_path / "saves", out, dtype, tmp_path / "options.json")
    export.main(wanted)
    assert capsys.readouterr().out.startswith(f"{out}: 11 arrays, 3,")
    with safe_open(out, "np") as file:
        assert file.metadata()["options"] == '{"layers": 1}'
    expected = np.asarray(state.master["embed"]).astype(dtype)
    np.testing.assert_array_equal(load_file(out)["embed"], expected)
    with pytest.raises(FileExistsError, match=r"--out: .*w\.safetensors exists; give another"):
        export.main(wanted)


def test_a_mistake_in_export_is_one_line(tmp_path):
    command = ["-m", "scripts.export", "--checkpoint", str(tmp_path / "no"), "--out", "x"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: --checkpoint: {tmp_path / 'no'} is no folder; pass the folder of a run's saves.\n"
    )


PROCESS = """
import sys
from pathlib import Path
import jax
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))
import zerojax as zj
from jax.experimental.multihost_utils import process_allgather
from scripts.parts.weights import finest_params, read_safetensors, write_safetensors
from tests.training import test_initial_params as test_given
from tests import toy

path = Path(sys.argv[3]) / "w.safetensors"
for stage in (1, 3):
    plan = toy.make_plan(None, precision="bf16_master", stage=stage)
    state = zj.init_state(plan, jax.random.key(3))
    write_safetensors(path, finest_params(state), "float32")
    given = read_safetensors(path, plan.abstract_state.params)
    again = zj.init_state(plan, jax.random.key(4), given)
    found, expected = process_allgather((again.master, state.master), tiled=True)
    test_given.assert_equal(found, expected)
"""


@pytest.mark.full
def test_several_processes_write_one_file(tmp_path):
    run_two_processes(PROCESS, str(tmp_path))
    assert sorted(load_file(tmp_path / "w.safetensors")) == NAMES
    assert [each.name for each in tmp_path.iterdir()] == ["w.safetensors"]
