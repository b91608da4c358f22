# SPDX-License-Identifier: Apache-2.0
"""A user's loss at a plan, beside the same loss on one device that knows nothing of the plan."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.sharding.plan import Plan
from zerojax.sharding.precision import cast
from zerojax.sharding.state import TrainState
from zerojax.table import format_table
from zerojax.training.batch import shard_batch
from zerojax.training.checks import check_plan, check_runs, check_state
from zerojax.training.gradients import make_gradients
from zerojax.training.init import init_state
from zerojax.training.loss import LossFn, call_loss
from zerojax.tree import PyTree


class LeafDifference(NamedTuple):
    """The gradient of one leaf, computed twice.

    Attributes:
      path: the leaf.
      error: the largest difference, divided by the largest absolute value on one device. A leaf
        with gradients below a thousandth of the largest of all leaves is measured by that
        thousandth: some are zero but for rounding, such as those of an attention's key bias.
      at: the index of that difference; of a stack of layers, the first number is the layer.
      sharded: the value there, at the plan.
      unsharded: the value there, on one device.
      ratio: the number that the gradient of one device must be multiplied by to come closest to
        that at the plan: 1 where they agree, 8 or 0.125 where one of 8 devices counts wrongly.
    """

    path: str
    error: float
    at: tuple[int, ...]
    sharded: float
    unsharded: float
    ratio: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Loss and gradients at a plan and on one device; prints as a table.

    Attributes:
      title: what was compared.
      loss: per unit of weight, at the plan and on one device.
      weight: the sum of the weights, likewise.
      grads: a LeafDifference for every trained leaf, in the plan's order.
      limit: the error that rounding explains.

    Example:
      >>> import optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.eye(8)}
      >>> loss_fn = lambda params, batch, key: (jnp.sum((batch @ params["w"]) ** 2), batch.size)
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> found = zj.check_against_unsharded(loss_fn, plan, np.eye(8, dtype=np.float32)).check()
      >>> found.loss, found.weight, found.same
      ((0.125, 0.125), (64.0, 64.0), True)
    """

    title: str
    loss: tuple[float, float]
    weight: tuple[float, float]
    grads: tuple[LeafDifference, ...]
    limit: float

    @property
    def first(self) -> LeafDifference | None:
        """The first leaf, in the plan's order, whose gradient differs by more than the limit."""
        return next((leaf for leaf in self.grads if not leaf.error <= self.limit), None)

    @property
    def same(self) -> bool:
        """Whether loss, weight and every gradient agree within the limit."""
        sums = zip(*(self.loss, self.weight), strict=True)
        here, there = (np.array(pair) for pair in sums)
        close = np.all(np.abs(here - there) <= self.limit * np.abs(there))
        return bool(close) and self.first is None

    def check(self) -> Comparison:
        """Returns itself. Raises ValueError, with the table, unless all is the same."""
        if not self.same:
            raise ValueError(str(self))
        return self

    def __str__(self) -> str:
        sums = [[name, *map(_number, getattr(self, name))] for name in ("loss", "weight")]
        lines = [self.title, "", format_table(["", "plan", "one device"], sums, right=[1, 2]), ""]
        worst = max(self.grads, key=lambda leaf: np.nan_to_num(leaf.error, nan=np.inf))
        if self.same:
            found = f"the worst is {worst.path!r}, by {worst.error:.1e} of its largest value"
            found = f"the worst is {worst.path!r}, by {worst.error:.1e} of its largest value"
            said = f"All {len(self.grads)} gradients agree; {found} (limit {self.limit:.1e})."
            lines.append(textwrap.fill(said, 100))
            return "\n".join(lines)
        apart = [leaf for leaf in self.grads if not leaf.error <= self.limit]
        said = f"{len(apart)} of {len(self.grads)} gradients differ (limit {self.limit:.1e})"
        lines.append(f"{said}, first {apart[0].path!r}:" if apart else f"{said}; the loss does.")
        rows = []
        for x in apart[:12]:
            values = map(_number, (x.sharded, x.unsharded, x.ratio))
            rows.append([x.path, f"{x.error:.1e}", str(list(x.at)), *values])
        header = ["gradient", "error", "at", "plan", "one device", "ratio"]
        if rows:
            lines += ["", format_table(header, rows, right=[1, 3, 4, 5])]
        if len(apart) > len(rows):
            lines.append(f"... and {len(apart) - len(rows)} more")
        lines += ["", *_remedy(self, apart)]
        return "\n".join(lines)


def check_against_unsharded(
    loss_fn: LossFn,
    plan: Plan,
    batch: PyTree,
    *,
    state: TrainState | None = None,
    microbatches: int = 1,
    limit: float | None = None,
) -> Comparison:
    """Computes one batch's loss and gradients at the plan, and again on one device.

    The second time nothing is split: the whole batch, whole parameters, `jax.grad` of the loss
    function, no microbatches, and layers in a plain `lax.scan`. Everything must fit on the first
    device of the mesh, so use a small model of the same code.

    Args:
      loss_fn: as for `make_train_step`, in its variant without dropout.
      plan: from `make_plan`, of one process.
      batch: the host's rows, a multiple of devices x microbatches; unequal weights find more.
      state: whose parameters to use, left as it is; default those of `init_state`.
      microbatches: as for `make_train_step`.
      limit: the largest error that counts as rounding, relative to the largest value of each
        array; default 2e-5 if compute and reductions are in fp32, else 8 units of the last
        place of the coarser dtype.

    Returns:
      A Comparison, which prints as a table. `.check()` raises if something differs.

    Raises:
      ValueError: the loss draws random numbers (devices draw different ones), the mesh is of
        several processes or compile-only, or an argument does not fit the plan.

    Example:
      >>> import optax, zerojax as zj
      >>> init = lambda key: {"w": jax.random.normal(key, (8, 4))}
      >>> def loss_fn(params, batch, key):
      ...     return jnp.sum((batch @ params["w"]) ** 2), 1  # the weight should count the rows
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> found = check_against_unsharded(loss_fn, plan, np.eye(8, dtype=np.float32))
      >>> (found.same, found.first.path, round(found.first.ratio, 3))
      (False, 'w', 0.125)
    """
    check_plan(plan)
    check_runs(plan)
    if jax.process_count() > 1:
        raise ValueError("check_against_unsharded: run it in one process, on devices of one host.")
    if state is None:
        state = init_state(plan, jax.random.key(0))
    check_state(plan, state)
    trained = [leaf.trained for leaf in plan.params]

    def at_plan(state: TrainState, batch: PyTree):
        sums, grads = make_gradients(loss_fn, plan, microbatches)(state, batch)
        return sums.loss_sum / sums.weight, sums.weight, [g / sums.weight for g in _real(grads)]

    def on_one_device(leaves: list[jax.Array], batch: PyTree, key: jax.Array):
        treedef = jax.tree.structure(plan.abstract_state.params)

        def total(chosen: list[jax.Array]):
            left = iter(chosen)
            mixed = [next(left) if on else x for x, on in zip(leaves, trained, strict=True)]
            params = treedef.unflatten([cast(x, plan.precision.compute) for x in mixed])
            sums = call_loss(loss_fn, params, batch, key)
            return sums.loss_sum, sums.weight

        chosen = [x for x, on in zip(leaves, trained, strict=True) if on]
        (loss_sum, weight), grads = jax.value_and_grad(total, has_aux=True)(chosen)
        return loss_sum / weight, weight, [g / weight for g in _real(grads)]

    here = jax.jit(at_plan)(state, shard_batch(batch, plan))
    first = plan.mesh.devices.flat[0]
    host = jax.device_put(jax.device_get((jax.tree.leaves(state.params), batch)), first)
    run = jax.jit(on_one_device)
    there, again = (run(*host, jax.device_put(jax.random.key(i), first)) for i in range(2))
    if float(there[0]) != float(again[0]):
        raise ValueError(
            f"the loss is {float(there[0]):.6g} with one key and {float(again[0]):.6g} with "
            "another: it draws random numbers, which differ between devices. Pass the variant "
            "without dropout."
        )
    largest = max((float(jnp.max(jnp.abs(g), initial=0)) for g in there[2]), default=0.0)
    grads = zip(plan.grads, here[2], there[2], strict=True)
    dtypes = [jnp.finfo(d) for d in (plan.precision.compute, plan.precision.reduce)]
    coarse = max(float(info.eps) for info in dtypes)
    return Comparison(
        f"stage {plan.stage.number} over {plan.num_devices} devices, beside one device",
        (float(here[0]), float(there[0])),
        (float(here[1]), float(there[1])),
        tuple(
            _difference(leaf.path, np.asarray(x), np.asarray(y), largest / 1000)
            for leaf, x, y in grads
        ),
        (2e-5 if coarse < 1e-6 else 8 * coarse) if limit is None else limit,
    )


def _real(grads: PyTree) -> list[jax.Array]:
    """The gradients in fp32 or wider."""
    return [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in jax.tree.leaves(grads)]


def _difference(path: str, here: np.ndarray, there: np.ndarray, least: float) -> LeafDifference:
    if not here.size:
        return LeafDifference(path, 0.0, (), 0.0, 0.0, 1.0)
    apart = np.abs(here.astype(np.complex128) - there.astype(np.complex128))
    at = np.unravel_index(np.argmax(np.nan_to_num(apart, nan=np.inf)), apart.shape)
    largest, square = max(np.max(np.abs(there)), least), np.vdot(there, there).real
    error = apart[at] / largest if largest else (0.0 if not apart[at] else np.inf)
    ratio = np.vdot(there, here).real / square if square else float("nan")
    sharded, unsharded = float(np.real(here[at])), float(np.real(there[at]))
    return LeafDifference(path, float(error), tuple(map(int, at)), sharded, unsharded, float(ratio))


def _number(x: float) -> str:
    return f"{x:.6g}"


def _remedy(found: Comparison, apart: list[LeafDifference]) -> list[str]:
    """What the figures suggest."""
    if not np.isclose(*found.weight, rtol=found.limit):
        return ["The weights differ: return as weight the number of rows or tokens of the loss."]
    ratios = [leaf.ratio for leaf in apart if np.isfinite(leaf.ratio)]
    if ratios and np.ptp(ratios) < 1e-3 and abs(ratios[0] - 1) > 1e-2:
        return [f"All by one factor, {ratios[0]:.4g}: the weight does not count what is summed."]
    return [
        "The loss of some rows depends on others (a mean over the batch, batch statistics), or the",
        "loss function knows the number of devices. Return sums over rows, and their weight.",
    ]
