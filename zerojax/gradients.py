# SPDX-License-Identifier: Apache-2.0
"""Gradients of one step: what each device computes, and when a gradient leaves the backward."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.collectives import device_index
from zerojax.loss import LossFn, Sums, accumulable, call_loss
from zerojax.mesh import DATA
from zerojax.plan import Plan
from zerojax.precision import cast
from zerojax.state import PyTree, TrainState, merge, select


def make_gradients(
    loss_fn: LossFn, plan: Plan, microbatches: int
) -> Callable[[TrainState, PyTree], tuple[Sums, PyTree]]:
    """Returns (state, batch) -> the loss function's sums, and the sum of the gradients.

    The gradients are arranged as the trained parameters and lie on `update_specs`.
    """
    place, trained = plan.partitioner, [leaf.trained for leaf in plan.params]
    specs = update_specs(plan)
    # Cut gradients of stages 2 and 3 leave every microbatch as shards. All others stay local until
    # the last one and are reduced once.
    early = [plan.stage.splits_grads and leaf.split.dim is not None for leaf in plan.grads]

    def reduce(grad: jax.Array, spec: P) -> jax.Array:
        return place.scatter(cast(grad, plan.precision.reduce), spec)

    def zeros(x: jax.ShapeDtypeStruct, spec: P = P()) -> jax.Array:
        return place.local(accumulable(jnp.zeros(x.shape, x.dtype)), spec)

    def one_slice(whole: PyTree, batch: PyTree, key: jax.Array) -> tuple[Sums, list[jax.Array]]:
        def loss(weights: PyTree) -> tuple[jax.Array, Sums]:
            sums = call_loss(loss_fn, merge(whole, weights), batch, key)
            return sums.loss_sum, sums

        grads, sums = jax.grad(loss, has_aux=True)(select(whole, trained))
        return sums, [
            reduce(grad, spec) if now else place.local(grad)
            for grad, spec, now in zip(jax.tree.leaves(grads), specs, early, strict=True)
        ]

    def all_slices(whole: PyTree, batch: PyTree, key: jax.Array) -> tuple[Sums, list[jax.Array]]:
        slices = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        first = jax.tree.map(lambda x: x[0], slices)
        sums, grads = jax.eval_shape(one_slice, whole, first, key)
        shard_specs = [spec if now else P() for spec, now in zip(specs, early, strict=True)]
        carry = sums.map(zeros), [zeros(*x) for x in zip(grads, shard_specs, strict=True)]

        def add(carry: PyTree, xs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
            index, rows = xs
            terms = one_slice(whole, rows, jax.random.fold_in(key, index))
            return jax.tree.map(lambda total, x: total + accumulable(x), carry, terms), None

        return lax.scan(add, carry, (jnp.arange(microbatches), slices))[0]

    def on_device(params: PyTree, batch: PyTree, key: jax.Array) -> tuple[Sums, list[jax.Array]]:
        key = jax.random.fold_in(key, device_index(DATA))
        # Once per step: XLA would move the gather out of the loop over microbatches anyway.
        whole = gather_params(plan, params)
        sums, grads = (all_slices if microbatches > 1 else one_slice)(whole, batch, key)
        done = [
            grad if now else reduce(grad, spec)
            for grad, spec, now in zip(grads, specs, early, strict=True)
        ]
        return sums.map(place.all_reduce), done

    run = place.per_device(on_device, rest_specs(plan), (P(), specs))

    def gradients(state: TrainState, batch: PyTree) -> tuple[Sums, PyTree]:
        key = jax.random.fold_in(state.key, state.step)
        sums, leaves = run(state.params, batch, key)
        return sums, jax.tree.structure(select(state.params, trained)).unflatten(leaves)

    return gradients


def gather_params(plan: Plan, params: PyTree) -> PyTree:
    """Every leaf whole and in the compute dtype; the cast comes first, for half the bytes."""
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten(
        plan.partitioner.gather(cast(x, plan.precision.compute), leaf.rest)
        for x, leaf in zip(leaves, plan.params, strict=True)
    )


def rest_specs(plan: Plan) -> PyTree:
    """The parameters' specs at rest, arranged as the parameters."""
    return jax.tree.map(lambda x: x.sharding.spec, plan.abstract_state.params)


def update_specs(plan: Plan) -> list[P]:
    """For every trained leaf, the spec on which the optimizer works: that of its moments."""
    cut = plan.stage.splits_opt_state
    return [leaf.split.spec if cut else P() for leaf in plan.grads]
