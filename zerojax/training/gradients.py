# SPDX-License-Identifier: Apache-2.0
"""Gradients of one step: what each device computes, and when a gradient leaves the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.engine.weights import Exchange, Weight, step_scope
from zerojax.sharding.plan import Plan
from zerojax.sharding.precision import accumulable, cast
from zerojax.sharding.state import TrainState, select
from zerojax.training.loss import LossFn, Sums, call_loss
from zerojax.tree import PyTree


def make_gradients(
    loss_fn: LossFn, plan: Plan, microbatches: int
) -> Callable[[TrainState, PyTree], tuple[Sums, PyTree]]:
    """Returns (state, batch) -> the loss function's sums, and the sum of the gradients.

    The gradients are arranged as the trained parameters and lie on `update_specs`.
    """
    partitioner, specs = plan.partitioner, update_specs(plan)
    grad_specs = _grad_specs(plan, microbatches)

    def one_slice(params: PyTree, whole: list[jax.Array], batch: PyTree, key: jax.Array):
        def loss(sinks: list[jax.Array]) -> tuple[jax.Array, Sums]:
            weights = make_weights(plan, params, sinks, grad_specs)
            sums = call_with_weights(plan, weights, whole, loss_fn, batch, key)
            return sums.loss_sum, sums

        grads, sums = jax.grad(loss, has_aux=True)(_sinks(plan, grad_specs))
        return sums, grads

    def all_slices(params: PyTree, whole: list[jax.Array], batch: PyTree, key: jax.Array):
        slices = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        first = jax.tree.map(lambda x: x[0], slices)
        sums, _ = jax.eval_shape(one_slice, params, whole, first, key)
        carry = (
            sums.map(lambda x: partitioner.zeros(x.shape, x.dtype, None)),
            list(map(accumulable, _sinks(plan, grad_specs))),
        )

        def add(carry: PyTree, xs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
            index, rows = xs
            terms = one_slice(params, whole, rows, jax.random.fold_in(key, index))
            return jax.tree.map(lambda total, x: total + accumulable(x), carry, terms), None

        return lax.scan(add, carry, (jnp.arange(microbatches), slices))[0]

    def on_device(params: PyTree, batch: PyTree, key: jax.Array) -> tuple[Sums, list[jax.Array]]:
        key = jax.random.fold_in(key, partitioner.batch_index())
        # Once per step: XLA would move these gathers out of the loop over microbatches anyway.
        # Those of weights that the loss function hands to the layer engine are unused and vanish.
        whole = gather_params(plan, make_weights(plan, params))
        run = all_slices if microbatches > 1 else one_slice
        stay_local = [spec is None for spec in grad_specs]
        sums, grads = run(params, whole, batch, key)
        done = [
            partitioner.scatter(cast(grad, plan.precision.reduce), spec) if local else grad
            for grad, spec, local in zip(grads, specs, stay_local, strict=True)
        ]
        with jax.named_scope("sums"):  # the audit tells them from weights by this name
            return sums.map(partitioner.all_reduce), done

    run = partitioner.per_device(on_device, rest_specs(plan), (P(), specs))
    trained = [leaf.trained for leaf in plan.params]

    def gradients(state: TrainState, batch: PyTree) -> tuple[Sums, PyTree]:
        key = jax.random.fold_in(state.key, state.step)
        sums, grads = run(state.params, batch, key)
        return sums, jax.tree.structure(select(state.params, trained)).unflatten(grads)

    return gradients


def make_weights(
    plan: Plan,
    params: PyTree,
    sinks: Sequence[jax.Array] = (),
    grad_specs: Sequence[P | None] = (),
) -> list[Weight]:
    """A Weight for every parameter; without sinks there are no gradients."""
    ways = iter(zip(sinks, grad_specs, strict=True))
    weights = []
    for leaf, array in zip(plan.params, jax.tree.leaves(params), strict=True):
        sink, grad_spec = next(ways) if leaf.trained and sinks else (None, None)
        weights.append(Weight(leaf.path, array, leaf.rest, sink, grad_spec, leaf.stacked))
    return weights


def gather_params(plan: Plan, weights: Sequence[Weight]) -> list[jax.Array]:
    """Every leaf whole and in the compute dtype."""
    return list(map(Exchange(plan.partitioner, plan.precision).gather, weights))


def call_with_weights(
    plan: Plan,
    weights: Sequence[Weight],
    whole: Sequence[jax.Array],
    loss_fn: LossFn,
    batch: PyTree,
    key: jax.Array,
) -> Sums:
    """Calls the loss function on whole weights, whose gradients are led to their sinks."""
    exchange = Exchange(plan.partitioner, plan.precision)
    arrays = [exchange.attach(weight, x) for weight, x in zip(weights, whole, strict=True)]
    with step_scope(exchange, weights, arrays):
        params = jax.tree.structure(plan.abstract_state.params).unflatten(arrays)
        return call_loss(loss_fn, params, batch, key)


def rest_specs(plan: Plan) -> PyTree:
    """The parameters' specs at rest, arranged as the parameters."""
    return jax.tree.map(lambda x: x.sharding.spec, plan.abstract_state.params)


def update_specs(plan: Plan) -> list[P]:
    """For every trained leaf, the spec on which the optimizer works: that of its moments."""
    cut = plan.stage.splits_opt_state
    return [leaf.split.spec if cut else P() for leaf in plan.grads]


def _grad_specs(plan: Plan, microbatches: int) -> list[P | None]:
    """For every trained leaf, the spec on which its gradient leaves each microbatch's backward.

    None: it stays local to the device, and is reduced once after the last microbatch.
    """
    if plan.stage.number == 0 and microbatches == 1:
        return [P() for _ in plan.grads]
    early = plan.stage.splits_grads
    return [
        leaf.split.spec if early and leaf.split.dim is not None else None for leaf in plan.grads
    ]


def _sinks(plan: Plan, grad_specs: Sequence[P | None]) -> list[jax.Array]:
    """Zeros in the place and dtype of every gradient as it leaves the backward."""
    sinks = []
    for leaf, grad_spec in zip(plan.grads, grad_specs, strict=True):
        real = jnp.issubdtype(leaf.array.dtype, jnp.floating)
        dtype: Any = plan.precision.compute if real and grad_spec is None else leaf.array.dtype
        sinks.append(plan.partitioner.zeros(leaf.array.shape, dtype, grad_spec))
    return sinks
