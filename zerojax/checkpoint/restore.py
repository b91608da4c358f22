# SPDX-License-Identifier: Apache-2.0
"""What a save holds of a state, and how it is read onto a plan, which may be another."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from zerojax.checkpoint import folder as saves
from zerojax.checkpoint.folder import DamagedError, Save, find_saves
from zerojax.checkpoint.items import (
    ITEMS,
    WEIGHT_ITEMS,
    DataIterator,
    SavedArray,
    abstract_leaves,
    arrays_of_item,
    as_key,
    make_state,
    saved_arrays,
)
from zerojax.sharding.axes import DATA, num_shards
from zerojax.sharding.mesh import make_mesh
from zerojax.sharding.plan import Plan
from zerojax.sharding.specs import split
from zerojax.sharding.state import TrainState, owned
from zerojax.training.checks import check_plan, check_runs
from zerojax.tree import PyTree


def restore(
    path: str | os.PathLike[str], plan: Plan, *, data: DataIterator | None = None
) -> TrainState:
    """Restores a state onto a plan: of any stage, device count, partitioner and precision.

    Every leaf is read as the shards that the plan says, no leaf is ever whole where it will be
    split, and the state may be donated. Only arrays and JSON are read: nothing is executed.

    Args:
      path: a folder of saves, of which the newest whole one is taken, or one save. A newer one
        that is damaged is named in a warning.
      plan: of the same parameters, frozen leaves and optimizer. Another precision casts: from the
        master copy where one was saved; a warning says what is rounded.
      data: an iterator that is set to where the saved one was.

    Returns:
      The state, on the plan's shardings and in its dtypes.

    Raises:
      FileNotFoundError: no such folder, or no save in it.
      ValueError: the save is of another model, optimizer or newer format, or every save is damaged;
        the save has no `data`, or of another number of processes with different data.

    Example:
      >>> import tempfile, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.ones((16, 8))}
      >>> saved = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> folder = tempfile.mkdtemp()
      >>> with zj.Checkpointer(folder, saved) as checkpoints:
      ...     checkpoints.save(zj.init_state(saved, jax.random.key(0)))
      >>> other = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(4), stage=2)
      >>> state = restore(folder, other)
      >>> mu = state.opt_state[0].mu["w"]
      >>> float(state.params["w"].sum()), mu.addressable_shards[0].data.shape
      (128.0, (4, 8))
    """
    return restore_newest(path, plan, data, aside=False)


def restore_params(
    path: str | os.PathLike[str], plan: Plan | None = None, *, dtype: Any = None
) -> PyTree:
    """Restores the parameters alone; files of the optimizer are not touched.

    Args:
      path: a folder of saves, of which the newest whole one is taken, or one save.
      plan: where the parameters go, and their dtype at rest; its optimizer may be any.
      dtype: without a plan, the dtype of real floating parameters; default as saved. A wider one
        is read from the master copy if there is one.

    Returns:
      With a plan, the parameters as its `init_params` arranges them. Without, a dict from each
      leaf's path to its array, split over all devices where it divides.

    Raises:
      FileNotFoundError, ValueError: as `restore`; both plan and dtype given.

    Example:
      >>> import tempfile, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> folder = tempfile.mkdtemp()
      >>> with zj.Checkpointer(folder, plan) as checkpoints:
      ...     checkpoints.save(zj.init_state(plan, jax.random.key(0)))
      >>> params = restore_params(folder, dtype=jnp.bfloat16)
      >>> {name: (str(x.dtype), float(x.sum())) for name, x in params.items()}
      {'b': ('bfloat16', 0.0), 'w': ('bfloat16', 128.0)}
    """
    if plan is not None:
        check_plan(plan)
        check_runs(plan)
        if dtype is not None:
            raise ValueError("restore_params: the plan says the dtypes; leave out dtype.")
    mesh = make_mesh() if plan is None else plan.mesh
    save = _choose(path, WEIGHT_ITEMS, aside=False)
    leaves = save.manifest()["leaves"]
    if plan is not None:
        tree = plan.abstract_state.params
        found = arrays_of_item("params", [leaf.path for leaf in plan.params], tree)
        _check_same(save, leaves, found)
        arrays = _read(save, [_source(entry, leaves) for entry in found])
        arrays = map(as_key, arrays, jax.tree.leaves(tree))
        return jax.tree.unflatten(jax.tree.structure(tree), arrays)
    wanted = []
    for key, said in leaves["params"].items():
        kind = jnp.dtype(said["dtype"])
        if dtype is not None and jnp.issubdtype(kind, jnp.floating):
            kind = dtype
        spec = split(tuple(said["shape"]), num_shards(mesh), DATA).spec
        array = jax.ShapeDtypeStruct(said["shape"], kind, sharding=NamedSharding(mesh, spec))
        wanted.append(_source(SavedArray("params", key, array), leaves))
    return dict(zip(leaves["params"], _read(save, wanted), strict=True))


def restore_newest(
    path: str | os.PathLike[str], plan: Plan, data: DataIterator | None, *, aside: bool
) -> TrainState:
    """As `restore`; with `aside`, damaged saves are renamed, so that they can be made again."""
    check_plan(plan)
    check_runs(plan)
    save = _choose(path, ITEMS, aside=aside)
    manifest = save.manifest()
    leaves = manifest["leaves"]
    keys = str(plan.abstract_state.key.dtype)
    if keys != manifest["plan"]["keys"]:
        raise ValueError(
            f"{save.path} holds PRNG keys of type {manifest['plan']['keys']}, and the plan's are "
            f"{keys}. Set jax_default_prng_impl as it was for the run, before make_plan."
        )
    found = saved_arrays(plan, plan.abstract_state)
    _check_same(save, leaves, [entry for entry in found if entry.item == "params"])
    _check_same(save, leaves, [entry for entry in found if entry.item == "optimizer"])
    wanted = [_source(entry, leaves) for entry in found]
    _warn_of_rounding(save, found, wanted, leaves)
    state = _data(save, manifest, data)  # before the arrays: its errors come at once
    arrays = [
        as_key(x, like) for x, like in zip(_read(save, wanted), abstract_leaves(plan), strict=True)
    ]
    if data is not None:
        data.set_state(state)
    return make_state(plan, arrays)


def _choose(path: str | os.PathLike[str], items: Sequence[str], *, aside: bool) -> Save:
    """The newest save whose files in `items` are as they were written; every process the same.

    The processes share the reading: each checks some of the files.
    """
    index, count = jax.process_index(), jax.process_count()
    found = find_saves(path)
    for number, save in enumerate(found):
        damage = saves.find_damage(save, items, index, count)
        if damage is None:
            others = multihost_utils.process_allgather(np.array(False)) if count > 1 else False
            if not np.any(others):
                return save
            damage = f"{save.path}: another process found a damaged file in it"
        elif count > 1:
            multihost_utils.process_allgather(np.array(True))
        if number + 1 == len(found):
            raise DamagedError(f"{damage}; no older save is there to use in its place.")
        if aside:
            moved = saves.set_aside(save) if index == 0 else None
            damage += f" (the save is now {moved.name})" if moved else ""
        said = f"{damage}; using the save of step {found[number + 1].step} in its place"
        warnings.warn(said, stacklevel=4)
    raise AssertionError("find_saves returns one save or more")


def _check_same(save: Save, leaves: Mapping[str, Any], wanted: Sequence[SavedArray]) -> None:
    """Raises ValueError unless the save has the leaves of one item that the plan has."""
    item = wanted[0].item
    found, expected = leaves[item], {entry.key: list(entry.array.shape) for entry in wanted}
    differ = []
    for key in [*expected, *(key for key in found if key not in expected)]:
        if key not in found:
            differ.append(f"{key!r} is only in the plan")
        elif key not in expected:
            differ.append(f"{key!r} is only in the save")
        elif found[key]["shape"] != expected[key]:
            differ.append(f"{key!r} is {found[key]['shape']}, in the plan {expected[key]}")
    kinds = {entry.key: entry.array.dtype for entry in wanted}
    for key in () if differ else expected:
        here, there = jnp.dtype(kinds[key]), jnp.dtype(found[key]["dtype"])
        floating = jnp.issubdtype(here, jnp.floating) and jnp.issubdtype(there, jnp.floating)
        if here != there and not floating:
            differ.append(f"{key!r} is {there}, in the plan {here}")
    if not differ:
        return
    said = "; ".join(differ[:3])
    if item == "params":
        raise ValueError(
            f"{save.path} is of another model: {len(differ)} of {len(expected)} parameters differ: "
            f"{said}. Plan the model that was saved."
        )
    raise ValueError(
        f"{save.path} is of another optimizer (or other frozen leaves): {len(differ)} leaves "
        f"differ: {said}. Plan the optimizer that was saved, or begin with its parameters alone: "
        "zerojax.init_state(plan, key, params=zerojax.restore_params(path, plan))."
    )


def _source(entry: SavedArray, leaves: Mapping[str, Any]) -> SavedArray:
    """Where the values of an entry are read from: a weight's from its widest copy, if casting.

    A master copy that was not saved is the parameter itself; a parameter in another dtype than
    was saved is rounded from the master copy.
    """
    if entry.item == "master" and entry.key not in leaves["master"]:
        return entry._replace(item="params")
    saved = leaves[entry.item][entry.key]["dtype"]
    if entry.item == "params" and entry.key in leaves["master"] and saved != entry.array.dtype:
        return entry._replace(item="master")
    return entry


def _warn_of_rounding(
    save: Save, found: Sequence[SavedArray], wanted: Sequence[SavedArray], leaves: Mapping[str, Any]
) -> None:
    """Warns of values that the plan cannot hold as they were saved, and holds nowhere else."""
    kept = {entry.key for entry in found if entry.item == "master"}
    rounded = []
    for entry, source in zip(found, wanted, strict=True):
        if entry.item == "params" and entry.key in kept:
            continue  # whatever its dtype, the plan's master copy has the value
        widest = leaves["master"] if entry.key in leaves["master"] else leaves[source.item]
        here, there = entry.array.dtype, jnp.dtype(widest[entry.key]["dtype"])
        if jnp.promote_types(here, there) != here:
            rounded.append(f"{entry.key!r} from {there} to {here}")
    if rounded:
        said = f"{save.path}: {len(rounded)} leaves are rounded, first {rounded[0]}"
        warnings.warn(f"{said}: the plan's precision is narrower than the saved one", stacklevel=4)


def _read(save: Save, wanted: Sequence[SavedArray]) -> list[jax.Array]:
    """The arrays, each device reading its shards, with one large leaf in flight on the host."""
    arrays: list[jax.Array | None] = [None] * len(wanted)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        for item, places in _passes(wanted):
            tree = {key: wanted[i].array for key, i in places.items()}
            how = ocp.checkpoint_utils.construct_restore_args(tree)
            args = ocp.args.PyTreeRestore(item=tree, restore_args=how, partial_restore=True)
            found = reader.restore(save.path / item, args=args)
            for key, i in places.items():
                arrays[i] = owned(found.pop(key))
    return [
        _zeros(x.array) if found is None else found for found, x in zip(arrays, wanted, strict=True)
    ]


def _passes(wanted: Sequence[SavedArray]) -> Iterator[tuple[str, dict[str, int]]]:
    """What to read together: places in `wanted` by key, as many as have the largest one's bytes.

    A weight and its master copy may be read from one array: a key comes once in a pass.
    """
    sizes = [x.array.size * x.array.dtype.itemsize for x in wanted]
    places: dict[str, int] = {}
    item, total = "", 0
    for i, entry in enumerate(wanted):
        if not sizes[i]:
            continue
        full = total + sizes[i] > max(sizes) or entry.key in places
        if places and (full or entry.item != item):
            yield item, places
            places, total = {}, 0
        item, total = entry.item, total + sizes[i]
        places[entry.key] = i
    if places:
        yield item, places


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """An array without elements; Orbax keeps none."""
    return jax.jit(lambda: jnp.zeros(like.shape, like.dtype), out_shardings=like.sharding)()


def _data(save: Save, manifest: Mapping[str, Any], data: DataIterator | None) -> Any:
    """The state to set `data` to."""
    if data is None:
        return None
    states, number = manifest["data"], jax.process_count()
    if states is None:
        raise ValueError(f"{save.path} has no data: it was saved without data=. Leave it out here.")
    if len(states) == number:
        return states[jax.process_index()]
    if any(state != states[0] for state in states):
        raise ValueError(
            f"{save.path}: its data was at different places on the {len(states)} processes that "
            f"saved it, and here are {number}. Restore on {len(states)}, or without data=."
        )
    return states[0]
