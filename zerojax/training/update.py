# SPDX-License-Identifier: Apache-2.0
"""One optimizer update in the global view: the optimizer sees whole arrays, XLA slices them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.sharding.collectives import gather_global
from zerojax.sharding.plan import Plan
from zerojax.sharding.precision import cast
from zerojax.sharding.specs import is_split
from zerojax.sharding.state import TrainState, merge, select, strong
from zerojax.training.checks import check_types
from zerojax.training.gradients import update_specs
from zerojax.tree import PyTree


def update(plan: Plan, state: TrainState, grads: PyTree, loss: jax.Array) -> TrainState:
    """The state after one update by these gradients; `loss` is for optimizers that ask for it."""
    trained = [leaf.trained for leaf in plan.params]
    pin = functools.partial(_constrain, plan, specs=update_specs(plan))
    # With a master copy, it is what the optimizer updates, and parameters are rounded from it.
    weights = select(state.params, trained) if state.master is None else state.master
    weights = pin(weights)
    grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights)
    more = _extra_args(plan.optimizer, value=loss, grad=grads)
    with jax.named_scope("update"):  # what the optimizer itself moves, for the audit
        updates, opt_state = plan.optimizer.update(grads, state.opt_state, weights, **more)
    weights = pin(optax.apply_updates(weights, updates))
    rounded = pin(jax.tree.map(lambda w: cast(w, plan.precision.params), weights))
    new = TrainState(
        step=state.step + 1,
        params=merge(state.params, _at_rest(plan, rounded)),
        opt_state=strong(opt_state),
        key=state.key,
        master=None if state.master is None else weights,
    )
    check_types(
        plan,
        new,
        "The optimizer's update changed it: a state must keep its arrays and types from step to "
        "step. Set the optimizer's dtype arguments (such as mu_dtype) to match.",
    )
    return new


def _at_rest(plan: Plan, params: PyTree) -> PyTree:
    """The updated parameters on their specs at rest; at stages 1 and 2 they become whole here.

    At stage 2 the largest come first, and each waits until the fourth before it is whole. Left
    alone, XLA puts the pieces of all together after the last gather, where nothing hides it. (At
    stage 1 the gradients too come in an order of XLA's, and waiting for another costs more.)
    """
    leaves, treedef = jax.tree.flatten(params)
    rest = [leaf.rest for leaf in plan.params if leaf.trained]
    cuts, gathered = update_specs(plan), []
    for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
        if cuts[i] == rest[i] or is_split(rest[i]):
            leaves[i] = lax.with_sharding_constraint(leaves[i], NamedSharding(plan.mesh, rest[i]))
            continue
        if plan.stage.splits_grads and len(gathered) >= 4:
            last = gathered[-4]
            leaves[i], leaves[last] = lax.optimization_barrier((leaves[i], leaves[last]))
        leaves[i] = gather_global(leaves[i], cuts[i], plan.mesh)
        gathered.append(i)
    return treedef.unflatten(leaves)


def _extra_args(optimizer: optax.GradientTransformation, **available: Any) -> dict[str, Any]:
    """Those of the available keyword arguments that the optimizer's update takes."""
    parameters = inspect.signature(optimizer.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return available
    return {name: value for name, value in available.items() if name in parameters}


def _constrain(plan: Plan, tree: PyTree, specs: list[P]) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        lax.with_sharding_constraint(x, NamedSharding(plan.mesh, spec))
        for x, spec in zip(leaves, specs, strict=True)
    )
