# SPDX-License-Identifier: Apache-2.0
"""The compiled training step: gradients device by device, the optimizer in the global view."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.hardware.devices import platform
from zerojax.sharding.plan import Plan
from zerojax.sharding.precision import accumulable
from zerojax.sharding.state import TrainState
from zerojax.training.checks import (
    check_alive,
    check_batch,
    check_plan,
    check_rows,
    check_runs,
    check_state,
    check_types,
)
from zerojax.training.compiler_options import options_for
from zerojax.training.gradients import (
    call_with_weights,
    gather_params,
    make_gradients,
    make_weights,
    rest_specs,
)
from zerojax.training.loss import LossFn, Sums
from zerojax.training.update import update
from zerojax.tree import PyTree

Metrics = dict[str, Any]


def make_train_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    microbatches: int = 1,
    skip_nonfinite: bool = False,
    compiler_options: Mapping[str, bool | int | str] | None = None,
) -> Step:
    """Returns `step(state, batch) -> (state, metrics)`, one optimizer update, compiled.

    The loss function is ordinary single-device code. It sees whole parameters in the compute
    dtype and some rows of the batch, and returns a SUM over those rows and what to divide it by.
    Sums and weights are added over microbatches and devices and divided once, so padding, unequal
    weights, accumulation and the number of devices do not change the result.

    Args:
      loss_fn: `(params, batch, key) -> (loss_sum, weight)` or `((loss_sum, weight), aux)`; two
        scalars, and a tree of sums that are divided by the same weight. The key differs between
        steps, microbatches and devices.
      plan: from `make_plan`.
      microbatches: how many slices each device makes of its rows, one after another.
      skip_nonfinite: if any gradient is not finite, leave the whole state as it was, bit by bit,
        and report `skipped` = 1 in the metrics.
      compiler_options: XLA's, as `jax.jit` takes them; None is GPU_OPTIONS of
        `zerojax.training.compiler_options` on GPUs and none elsewhere.

    Returns:
      A Step. The state given to it is donated: use the one it returns. `metrics` is a dict of
      scalars on the device: `loss` (per unit of weight), `weight` (the sum), `grad_norm` (global,
      before any clipping by the optimizer), `aux` if the loss function has it, and `skipped` with
      `skip_nonfinite`.

    Raises:
      ValueError: when called or lowered: the loss function returns something else, the rows do
        not divide by devices x microbatches, or the state belongs to another plan.

    Example:
      >>> import jax, jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((8, 8))}
      >>> def loss_fn(params, batch, key):
      ...     error = batch["x"] @ params["w"] - batch["y"]
      ...     return jnp.sum(error**2), error.size
      >>> plan = zj.make_plan(init, optax.adam(0.1), zj.make_mesh(8), stage=3)
      >>> step = zj.make_train_step(loss_fn, plan)
      >>> state = zj.init_state(plan, jax.random.key(0))
      >>> batch = zj.shard_batch({"x": jnp.eye(8), "y": 2 * jnp.eye(8)}, plan)
      >>> for _ in range(3):
      ...     state, metrics = step(state, batch)
      ...     print(f"{metrics['loss']:.4f}")
      0.5000
      0.4513
      0.4051
    """
    check_plan(plan)
    if type(microbatches) is not int or microbatches < 1:
        raise ValueError(f"microbatches is {microbatches!r}; pass a whole number, 1 or more.")
    gradients = make_gradients(loss_fn, plan, microbatches)

    def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        check_rows(batch, plan.num_batch_shards, microbatches)
        check_types(plan, state)
        sums, grad_sums = gradients(state, batch)
        grads = jax.tree.map(lambda g: accumulable(g) / sums.weight, grad_sums)
        metrics = sums.metrics()
        metrics["grad_norm"] = optax.tree.norm(grads)
        new = update(plan, state, grads, metrics["loss"])
        if skip_nonfinite:
            finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]).all()
            new = jax.tree.map(functools.partial(jnp.where, finite), new, state)
            metrics["skipped"] = 1 - finite.astype(jnp.int32)
        return new, metrics

    return Step(train_step, plan, microbatches, compiler_options, donate=True, loss_fn=loss_fn)


def make_eval_step(loss_fn: LossFn, plan: Plan) -> Step:
    """Returns `eval_step(state, batch) -> metrics`: `loss`, `weight` and `aux`, no update.

    The state is not donated. To combine several batches, weigh each loss by its `weight`.

    Args:
      loss_fn: as for `make_train_step`; pass the variant without dropout if there is one.
      plan: from `make_plan`.

    Returns:
      A Step. `metrics` is a dict of scalars on the device, as that of `make_train_step`.

    Raises:
      ValueError: when called or lowered, as the step of `make_train_step` does.

    Example:
      >>> import jax, jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.ones((8, 8))}
      >>> loss_fn = lambda params, batch, key: (jnp.sum((batch @ params["w"]) ** 2), batch.size)
      >>> plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(8), stage=3)
      >>> state = zj.init_state(plan, jax.random.key(0))
      >>> metrics = zj.make_eval_step(loss_fn, plan)(state, jnp.eye(8))
      >>> {name: float(value) for name, value in metrics.items()}
      {'loss': 1.0, 'weight': 64.0}
    """
    check_plan(plan)

    def device_sums(params: PyTree, batch: PyTree, key: jax.Array) -> Sums:
        key = jax.random.fold_in(key, plan.partitioner.batch_index())
        weights = make_weights(plan, params)
        whole = gather_params(plan, weights)
        sums = call_with_weights(plan, weights, whole, loss_fn, batch, key)
        with jax.named_scope("sums"):
            return sums.map(plan.partitioner.all_reduce)

    def eval_step(state: TrainState, batch: PyTree) -> Metrics:
        check_rows(batch, plan.num_batch_shards)
        check_types(plan, state)
        key = jax.random.fold_in(state.key, state.step)
        run = plan.partitioner.per_device(device_sums, rest_specs(plan), P())
        return run(state.params, batch, key).metrics()

    return Step(eval_step, plan, 1, None, donate=False, loss_fn=loss_fn)


class Step:
    """A jitted function of a plan's state and a batch, with errors that say what to mend.

    `step(state, batch)` and `step.lower(plan.abstract_state, abstract_batch)` are those of
    `step.jitted`, the function that `jax.jit` returned. Made by `make_train_step` and
    `make_eval_step`.

    Attributes:
      plan: whose states the step takes.
      loss_fn: the user's loss function.
      microbatches: slices that each device makes of its rows.
      donates: the state given to the step is donated; so in a training step.
      jitted: the function of a state and a batch, as `jax.jit` returned it.

    Example:
      >>> import jax, jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((256, 256))}
      >>> loss_fn = lambda params, batch, key: (jnp.sum((batch @ params["w"]) ** 2), batch.size)
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> step = zj.make_train_step(loss_fn, plan)
      >>> rows = jax.ShapeDtypeStruct((16, 256), jnp.float32)
      >>> compiled = step.lower(plan.abstract_state, rows).compile()
      >>> compiled.memory_analysis().argument_size_in_bytes  # a shard of the state, and of the rows
      100368
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: Plan,
        microbatches: int,
        options: Mapping[str, bool | int | str] | None,
        *,
        donate: bool,
        loss_fn: LossFn,
    ):
        self.plan, self.loss_fn, self.microbatches = plan, loss_fn, microbatches
        self.fn, self.donates = fn, donate
        # One step at a time on simulated devices: with many in flight on few cores, the devices of
        # one wait for threads that another holds, until XLA ends the process (seen on jax 0.11).
        self.simulated = platform(plan.mesh) == "cpu"
        replicated = NamedSharding(plan.mesh, P())
        outputs = (plan.state_shardings, replicated) if donate else replicated
        self.jitted = jax.jit(
            fn,
            in_shardings=(plan.state_shardings, plan.batch_sharding),
            out_shardings=outputs,
            donate_argnums=(0,) if donate else (),
            compiler_options=options_for(plan.mesh, options),
            keep_unused=True,  # a leaf of the state that the step does not read is donated too
        )

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        """Runs the step. With `make_train_step` the state is donated."""
        check_runs(self.plan)
        check_rows(batch, self.plan.num_batch_shards, self.microbatches)
        check_alive(state)
        if self.simulated:
            jax.block_until_ready(jax.tree.leaves(state)[:1])
        try:
            return self.jitted(state, jax.tree.map(self._on_mesh, batch))
        except (TypeError, ValueError):
            check_state(self.plan, state)
            check_batch(self.plan, batch)
            raise

    def lower(self, abstract_state: TrainState, abstract_batch: PyTree) -> jax.stages.Lowered:
        """Lowers for shapes, without arrays; `.compile()` gives the program."""
        check_rows(abstract_batch, self.plan.num_batch_shards, self.microbatches)
        check_state(self.plan, abstract_state)
        return self.jitted.lower(abstract_state, abstract_batch)

    def _on_mesh(self, x: Any) -> Any:
        """Host arrays go where sharded ones are, so that both kinds run the same program."""
        there = isinstance(x, Tracer) or (isinstance(x, jax.Array) and x.committed)
        return x if there else jax.device_put(x, self.plan.batch_sharding)
