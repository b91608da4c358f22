# SPDX-License-Identifier: Apache-2.0
"""Training steps with one defect each, as people write them, and the plan they should follow."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj

LAYERS, WIDTH, HIDDEN, ROWS, TOKENS = 4, 64, 256, 16, 12
OPTIMIZER = optax.adam(1e-3)
SHARDS = {"up": P(None, None, "data"), "down": P(None, "data")}


def batch(rows=ROWS):
    return {"x": jax.ShapeDtypeStruct((rows, TOKENS, WIDTH), jnp.float32)}


def init_params(key):
    up = jax.random.normal(key, (LAYERS, WIDTH, HIDDEN)) / 8
    return {"blocks": {"up": up, "down": up.swapaxes(1, 2)}}


def block(params, x):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def make_plan(mesh, stage):
    return zj.make_plan(init_params, OPTIMIZER, mesh, stage=stage, layers=("blocks",))


def total(params, batch):
    """The loss with a plain scan over whole layers."""
    x, _ = lax.scan(lambda x, p: (block(p, x), None), batch["x"], params["blocks"])
    return jnp.sum(x**2) / x.size


def update(grads, params, opt_state):
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def compiled(mesh, grads_of, params_at, opt_at, rows=ROWS, donate=(0, 1)):
    """The step of `grads_of(params, batch)`, compiled for state on these specs."""
    params = jax.eval_shape(init_params, jax.random.key(0))
    opt_state = jax.eval_shape(OPTIMIZER.init, params)

    def placed(tree, at):
        spec = {"up": at["up"], "down": at["down"]}
        return jax.tree.map_with_path(
            lambda path, x: NamedSharding(mesh, spec[path[-1].key] if x.ndim else P()), tree
        )

    def step(params, opt_state, batch):
        return update(grads_of(params, batch), params, opt_state)

    places = placed(params, params_at), placed(opt_state, opt_at)
    jitted = jax.jit(
        step,
        in_shardings=(*places, NamedSharding(mesh, P("data"))),
        out_shardings=places,
        donate_argnums=donate,
    )
    return jitted.lower(params, opt_state, batch(rows)).compile()


WHOLE = {"up": P(), "down": P()}


def naive(mesh, rows=ROWS):
    """Weights and batch sharded, and nothing else said: XLA moves activations."""
    return compiled(mesh, jax.grad(total), SHARDS, SHARDS, rows)


def no_donation(mesh):
    return compiled(
        mesh, manual(mesh, _gather_per_layer(jax.checkpoint)), SHARDS, SHARDS, donate=()
    )


def leaf_left_whole(mesh):
    at = {**SHARDS, "down": P()}
    return compiled(mesh, jax.grad(total), at, at)


def manual(mesh, loss, at=SHARDS):
    """Gradients by shard_map, of a loss that gathers what it needs of the shards."""
    specs = {"blocks": at}
    return jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check_vma=False
    )


def gather(params, dims):
    return {
        name: lax.all_gather(x, "data", axis=dims[name], tiled=True) for name, x in params.items()
    }


def _gather_per_layer(wrap):
    def loss(params, batch):
        def body(x, shards):
            return block(gather(shards, {"up": 1, "down": 0}), x), None

        x, _ = lax.scan(wrap(body), batch["x"], params["blocks"])
        return jnp.sum(x**2) / x.size

    return loss


def hoisted(mesh):
    """All layers gathered where the step enters."""

    def loss(params, batch):
        return total({"blocks": gather(params["blocks"], {"up": 2, "down": 1})}, batch)

    return compiled(mesh, manual(mesh, loss), SHARDS, SHARDS)


def kept(mesh):
    """Gathered layer by layer, and kept as residuals for the backward."""
    return compiled(mesh, manual(mesh, _gather_per_layer(lambda body: body)), SHARDS, SHARDS)


def stack_regathered(mesh):
    """A checkpoint policy around the scan: before the backward, a loop gathers all layers."""
    policy = checkpoint_policies.dots_saveable

    def loss(params, batch):
        def run(params, x):
            def body(x, shards):
                return block(gather(shards, {"up": 1, "down": 0}), x), None

            return lax.scan(body, x, params["blocks"])[0]

        x = jax.checkpoint(run, policy=policy)(params, batch["x"])
        return jnp.sum(x**2) / x.size

    return compiled(mesh, manual(mesh, loss), SHARDS, SHARDS)


def all_reduced(mesh):
    """Stage 1 as it was first written: all-reduce, update a slice, gather: 3 Psi."""

    def grads(params, batch):
        grads = jax.lax.psum(jax.grad(total)(params, batch), "data")
        index = lax.axis_index("data")
        cut = {"up": 2, "down": 1}
        return {
            "blocks": {
                name: lax.dynamic_slice_in_dim(
                    g, index * (g.shape[cut[name]] // 8), g.shape[cut[name]] // 8, cut[name]
                )
                for name, g in grads["blocks"].items()
            }
        }

    specs = {"blocks": WHOLE}
    run = jax.shard_map(
        grads,
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs={"blocks": SHARDS},
        check_vma=False,
    )
    return compiled(mesh, run, WHOLE, SHARDS)


# name of the finding that each program must have: how it is made, the stage it should be
PROGRAMS = {
    "activations-moved": (naive, 3),
    "gather-hoisted": (hoisted, 3),
    "weights-kept": (kept, 3),
    "stack-regathered": (stack_regathered, 3),
    "all-reduce-for-scatter": (all_reduced, 1),
    "extra-traffic": (all_reduced, 1),
    "leaf-left-whole": (leaf_left_whole, 3),
    "donation-lost": (no_donation, 3),
    "traffic-grows": (functools.partial(naive, rows=2 * ROWS), 3),
}
