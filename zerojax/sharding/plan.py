# SPDX-License-Identifier: Apache-2.0
"""The plan: for every array of the training state, where its bytes live, and why."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.sharding import axes, collectives
from zerojax.sharding.leaves import Leaf, at_rest, opt_state_leaves, param_leaves
from zerojax.sharding.mesh import check_mesh
from zerojax.sharding.precision import Precision, get_precision
from zerojax.sharding.specs import format_spec, is_split
from zerojax.sharding.stage import KINDS, STATE_KINDS, Stage, get_stage
from zerojax.sharding.state import TrainState, new_state
from zerojax.table import format_bytes, format_table
from zerojax.tree import PathRule, PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Said once: the mesh, the stage, and the place of every array. Made by `make_plan`.

    Attributes:
      mesh: the device mesh.
      stage: a row of the stage table.
      precision: the dtypes.
      partitioner: `collectives.Manual` or `collectives.Auto`.
      init_params: the user's function from a key to parameters.
      optimizer: the user's optax transformation.
      params: a Leaf for every leaf of the parameters, in tree order.
      grads: a Leaf for every trained leaf; `rest` is how it leaves the backward.
      master: a Leaf for every trained leaf if the precision has a master copy, else none.
      opt_state: a Leaf for every leaf of the optimizer state.
      abstract_state: a TrainState of ShapeDtypeStructs with shardings; `step.lower` takes it.

    Example:
      >>> import jax.numpy as jnp, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((16, 64))}
      >>> plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(8), stage=3)
      >>> print(plan)
      stage 3 over 8 devices (GB = 1e9 bytes)
      <BLANKLINE>
      params  shape     dtype    at rest    per device  why
      ------  --------  -------  ---------  ----------  -------------
      w       (16, 64)  float32  ('data',)       512 B  dim 0, 16 / 8
      <BLANKLINE>
      totals     leaves    bytes  per device  of it whole
      ---------  ------  -------  ----------  -----------
      params          1  4.10 kB       512 B          0 B
      grads           1  4.10 kB       512 B          0 B
      master          0      0 B         0 B          0 B
      opt_state       0      0 B         0 B          0 B
    """

    mesh: Mesh
    stage: Stage
    precision: Precision
    partitioner: collectives.Manual | collectives.Auto
    init_params: Callable[[jax.Array], PyTree]
    optimizer: optax.GradientTransformation
    params: tuple[Leaf, ...]
    grads: tuple[Leaf, ...]
    master: tuple[Leaf, ...]
    opt_state: tuple[Leaf, ...]
    abstract_state: TrainState

    @property
    def num_shards(self) -> int:
        """Into how many shards ZeRO splits an array of the state."""
        return axes.num_shards(self.mesh)

    @property
    def num_batch_shards(self) -> int:
        """Into how many parts the rows of a batch are cut."""
        return axes.num_batch_shards(self.mesh)

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return self.mesh.size

    @property
    def state_shardings(self) -> TrainState:
        """A TrainState of NamedShardings."""
        return jax.tree.map(lambda x: x.sharding, self.abstract_state)

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of every leaf of a batch: its rows are split over the devices."""
        return NamedSharding(self.mesh, axes.batch_spec(self.mesh))

    def bytes_per_device(self, leaf: Leaf) -> int:
        """Bytes of one leaf at rest on each device."""
        shard = NamedSharding(self.mesh, leaf.rest).shard_shape(leaf.array.shape)
        return math.prod(shard) * leaf.array.dtype.itemsize

    def leaves(self, *kinds: str) -> list[Leaf]:
        """The leaves of these kinds, each one of `stage.KINDS`, one kind after another."""
        return [leaf for kind in kinds for leaf in getattr(self, kind)]

    def rest_bytes(self, *kinds: str) -> int:
        """Bytes on each device of these kinds as they rest; without any, of the whole state."""
        return sum(map(self.bytes_per_device, self.leaves(*(kinds or STATE_KINDS))))

    def __str__(self) -> str:
        return _describe(self)


def make_plan(
    init_params: Callable[[jax.Array], PyTree],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    stage: int,
    layers: Sequence[str] = (),
    precision: str | Precision = "fp32",
    partitioner: str = "manual",
    frozen: PathRule = (),
    max_unsharded: float = 0.02,
) -> Plan:
    """Decides where every array of the training state lives; runs nothing, allocates nothing.

    Args:
      init_params: from a PRNG key to a pytree of arrays.
      optimizer: any optax transformation, unmodified.
      mesh: a mesh with an Auto axis "data", such as `make_mesh()`.
      stage: 0, 1, 2 or 3; see `zerojax.stage`.
      layers: paths of the parameters that hold stacked layers, such as ("blocks",): their first
        dimension counts layers and is never split.
      precision: "fp32", "bf16", "bf16_master" or a `Precision`.
      partitioner: "manual" (shard_map, explicit collectives) or "auto" (sharding constraints,
        XLA inserts the collectives). Same numbers from both.
      frozen: parameters that are not trained: paths as in `layers`, or a function from a path to
        a bool. They have no gradient and no optimizer state. Integer leaves are always frozen.
      max_unsharded: the share of bytes that may stay whole although the stage splits their kind.

    Returns:
      A Plan; `print(plan)` shows every leaf, its spec, its bytes per device and why.

    Raises:
      ValueError: an argument is not of its kind, a path names no leaf, a parameter is not an
        array, stacked leaves disagree on the number of layers, nothing is left to train, or more
        than `max_unsharded` of the bytes cannot be split.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from zerojax.sharding.mesh import make_mesh
      >>> init = lambda key: {"w": jax.random.normal(key, (16, 64)), "b": jnp.zeros(64)}
      >>> plan = make_plan(init, optax.adam(1e-3), make_mesh(8), stage=3)
      >>> [(leaf.path, tuple(leaf.rest), plan.bytes_per_device(leaf)) for leaf in plan.params]
      [('b', ('data',), 32), ('w', ('data',), 512)]
    """
    check_mesh(mesh)
    row, dtypes = get_stage(stage), get_precision(precision)
    if partitioner not in collectives.PARTITIONERS:
        names = " or ".join(map(repr, collectives.PARTITIONERS))
        raise ValueError(f"partitioner is {partitioner!r}; pass {names}.")
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}; pass an optax transformation, such as "
            "optax.adamw(1e-3)."
        )
    num_shards = axes.num_shards(mesh)
    leaves = param_leaves(init_params, layers, frozen, num_shards)
    trained = [leaf for leaf in leaves if leaf.trained]
    build = functools.partial(
        new_state, init_params, optimizer, dtypes, [leaf.trained for leaf in leaves]
    )
    shapes = jax.eval_shape(build, jax.random.key(0))
    params = at_rest(leaves, row.splits("params"), dtypes.params)
    grads = at_rest(trained, row.splits("grads"), dtypes.reduce)
    master = at_rest(trained, row.splits("master"), dtypes.master) if dtypes.master else ()
    opt_state = opt_state_leaves(shapes.opt_state, leaves, num_shards)
    opt_state = at_rest(opt_state, row.splits("opt_state"))
    plan = Plan(
        mesh=mesh,
        stage=row,
        precision=dtypes,
        partitioner=collectives.PARTITIONERS[partitioner](mesh),
        init_params=init_params,
        optimizer=optimizer,
        params=params,
        grads=grads,
        master=master,
        opt_state=opt_state,
        abstract_state=_abstract_state(shapes, mesh, params, master, opt_state),
    )
    _check_unsharded(plan, max_unsharded)
    return plan


def _abstract_state(
    shapes: TrainState,
    mesh: Mesh,
    params: Sequence[Leaf],
    master: Sequence[Leaf],
    opt_state: Sequence[Leaf],
) -> TrainState:
    """The abstract state with a sharding on every leaf."""

    def on_mesh(tree: PyTree, specs: Sequence[P]) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(leaves, specs, strict=True)
        )

    return TrainState(
        step=on_mesh(shapes.step, [P()]),
        params=on_mesh(shapes.params, [leaf.rest for leaf in params]),
        opt_state=on_mesh(shapes.opt_state, [leaf.rest for leaf in opt_state]),
        key=on_mesh(shapes.key, [P()]),
        master=on_mesh(shapes.master, [leaf.rest for leaf in master]),
    )


def _check_unsharded(plan: Plan, max_unsharded: float) -> None:
    """Fails when too many of the bytes that the stage splits cannot be split."""
    if not plan.stage.splits_opt_state or plan.num_shards == 1:
        return
    leaves = plan.leaves(*STATE_KINDS)
    whole = sorted((x for x in leaves if x.split.dim is None), key=lambda x: -x.num_bytes)
    share = sum(x.num_bytes for x in whole) / sum(x.num_bytes for x in leaves)
    if share > max_unsharded:
        worst = "; ".join(
            f"{x.path!r} {x.array.shape}, {format_bytes(x.num_bytes)}: {x.split.reason}"
            for x in whole[:3]
        )
        raise ValueError(
            f"{share:.1%} of the state's bytes cannot be split into {plan.num_shards} shards, "
            f"more than max_unsharded={max_unsharded:.1%}. The largest: {worst}. Pad those sizes "
            f"to a multiple of {plan.num_shards}, or raise max_unsharded to accept the cost."
        )


def _describe(plan: Plan) -> str:
    """What print(plan) shows: every parameter, what else stays whole, and the totals."""
    rows = []
    for leaf in plan.params:
        why = leaf.split.reason
        if leaf.split.dim is not None and not plan.stage.splits_opt_state:
            why = "stage 0 splits nothing"
        elif leaf.split.dim is not None and not plan.stage.splits_params:
            why = f"optimizer state: {why}"
        cells = [leaf.path, str(leaf.array.shape), str(leaf.array.dtype), format_spec(leaf.rest)]
        size = format_bytes(plan.bytes_per_device(leaf))
        rows.append([*cells, size, why if leaf.trained else f"{why}; frozen"])
    header = ["params", "shape", "dtype", "at rest", "per device", "why"]
    totals = []
    for kind in KINDS:
        leaves = plan.leaves(kind)
        size = sum(leaf.num_bytes for leaf in leaves)
        whole = sum(leaf.num_bytes for leaf in leaves if not is_split(leaf.rest))
        sizes = map(format_bytes, (size, plan.rest_bytes(kind), whole))
        totals.append([kind, str(len(leaves)), *sizes])
    columns = ["totals", "leaves", "bytes", "per device", "of it whole"]
    return "\n".join(
        [
            f"stage {plan.stage.number} over {plan.num_devices} devices (GB = 1e9 bytes)",
            "",
            format_table(header, rows, right=[4]),
            "",
            format_table(columns, totals, right=[1, 2, 3, 4]),
        ]
    )
