# SPDX-License-Identifier: Apache-2.0
"""Wrong use: each error says where, what (with sizes) and one remedy, before anything runs."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import zerojax as zj
from tests import toy

ADAM = optax.adam(1e-3)
INIT = {"w": jnp.zeros((16, 8)), "b": jnp.zeros(8)}


def plan_of(init=lambda key: INIT, optimizer=ADAM, mesh=None, **kwargs):
    mesh = zj.make_mesh() if mesh is None else mesh
    return zj.make_plan(init, optimizer, mesh, **{"stage": 3, **kwargs})


def explicit_mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))


def model_mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def other_axis_mesh():
    return jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: plan_of(stage=4), ["stage is 4", "0, 1, 2 and 3", "Pass stage=0"]),
        (lambda: plan_of(stage=True), ["stage is True"]),
        (lambda: plan_of(stage="3"), ["stage is '3'"]),
        (lambda: plan_of(precision="fp16"), ["'fp16'", "fp32, bf16, bf16_master", "Precision"]),
        (lambda: zj.Precision(compute=jnp.int8), ["Precision.compute", "int8", "jnp.bfloat16"]),
        (lambda: plan_of(partitioner="gspmd"), ["'gspmd'", "'manual' or 'auto'"]),
        (lambda: plan_of(optimizer=optax.adam), ["optimizer is a function", "optax.adamw(1e-3)"]),
        (lambda: plan_of(INIT), ["init_params is a dict", "function from a PRNG key"]),
        (lambda: plan_of(lambda key: {}), ["without leaves"]),
        (
            lambda: plan_of(lambda key: {"net": {"w": INIT["w"], "act": "gelu"}}),
            ["'net/act'", "'gelu'", "a str", "keep it out"],
        ),
        (lambda: plan_of(lambda key: {"w": INIT["w"], "lr": 0.1}), ["'lr'", "a float"]),
        (lambda: plan_of(mesh=jax.devices()), ["mesh is a list", "make_mesh()"]),
        (lambda: plan_of(mesh=other_axis_mesh()), ["('batch',)", "'data'", "rename"]),
        (lambda: plan_of(mesh=explicit_mesh()), ["'data'", "Explicit", "AxisType.Auto"]),
        (lambda: plan_of(mesh=model_mesh()), ["{'model': 2}", "make_mesh()"]),
        (lambda: plan_of(layers=("blocks",)), ["'blocks'", "begin with: b, w"]),
        (lambda: plan_of(layers="w"), ["layers is the string 'w'", "('w',)"]),
        (lambda: plan_of(frozen=("w", "head")), ["frozen", "'head'"]),
        (lambda: plan_of(frozen=("w", "b")), ["all 2 leaves", "nothing to train"]),
        (
            lambda: plan_of(
                lambda key: {"s": {"w": jnp.ones((4, 8)), "v": jnp.ones((3, 8))}}, layers=("s",)
            ),
            ["layers='s'", "'s/w' has shape (4, 8)", "'s/v' has (3, 8)", "number of layers"],
        ),
        (
            lambda: plan_of(lambda key: {"vocab": jnp.ones((50257, 3)), "w": jnp.ones((8, 8))}),
            ["100.0% of", "8 shards", "max_unsharded=2.0%", "'vocab' (50257, 3)", "603 kB", "Pad"],
        ),
        (lambda: plan_of(stage=3.0), ["stage is 3.0"]),
        (lambda: zj.Precision(reduce=jnp.float8_e4m3fn), ["Precision.reduce", "16 or more bits"]),
        (lambda: zj.Precision(jnp.float64), ["Precision.params is float64", "jax_enable_x64"]),
        (lambda: zj.make_mesh(9), ["9 devices wanted, 8 available", "simulate_devices(9)"]),
        (lambda: zj.make_mesh(0), ["0 devices wanted", "between 1 and 8."]),
        (lambda: zj.make_train_step(plan_of(), good_loss), ["the plan is a function"]),
        (lambda: zj.init_state(jax.random.key(0), plan_of()), ["the plan is a ", "make_plan"]),
        (lambda: zj.shard_batch(plan_of(), rows(x=(8, 3))), ["the plan is a dict"]),
        (lambda: zj.simulate_devices(4), ["already started with 8 cpu", "restart"]),
        (lambda: zj.simulate_devices(0), ["num_devices is 0"]),
        (lambda: zj.make_train_step(toy.loss_fn, plan_of(), microbatches=0), ["microbatches is 0"]),
        (
            lambda: zj.init_state(plan_of(), jax.random.PRNGKey(0)),
            ["uint32", "jax.random.key(seed)"],
        ),
        (lambda: zj.init_state(plan_of(), 0), ["key is of type int"]),
    ],
)
def test_building(build, parts):
    with pytest.raises(ValueError) as caught:
        build()
    for part in parts:
        assert part in str(caught.value)


def test_devices_of_the_same_number_may_be_simulated_again():
    zj.simulate_devices(8)


def rows(**shapes):
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (
            rows(tokens=(12, 3)),
            [
                "'tokens' has 12 rows",
                "8 data-parallel devices",
                "Drop 4, or pad to 16",
                "of weight 0",
            ],
        ),
        (rows(x=(8, 3), y=(16, 3)), ["'y' has 16 rows", "'x' has 8"]),
        (rows(x=(8, 3), scale=()), ["'scale' is a scalar", "Repeat it"]),
        (rows(x=(0, 3)), ["0 rows", "Pad to 8"]),
        ({}, ["no arrays"]),
    ],
)
def test_batches(batch, parts):
    with pytest.raises(ValueError) as caught:
        zj.shard_batch(batch, plan_of())
    for part in parts:
        assert part in str(caught.value)


LOSSES = [
    (
        lambda p, b, k: jnp.mean(b["x"] @ p["w"]),
        ["returned a scalar", "(loss_sum, weight)", "mean"],
    ),
    (lambda p, b, k: b["x"] @ p["w"], ["an array of shape (2, 8)"]),
    (lambda p, b, k: {"loss": 0.0}, ["a dict"]),
    (lambda p, b, k: (1.0, 2.0, 3.0), ["a tuple of 3"]),
    (lambda p, b, k: (jnp.sum(b["x"] @ p["w"], 1), 8), ["loss_sum of shape (2,)", "Sum it"]),
    (lambda p, b, k: (jnp.sum(b["x"] @ p["w"]), b["x"][:, 0]), ["weight of shape (2,)"]),
    (
        lambda p, b, k: (jnp.sum(b["x"] @ p["w"]), {"accuracy": 1}),
        ["a dict as its weight", "((loss_sum, weight), aux)"],
    ),
    (lambda p, b, k: (jnp.sum(b["x"] > p["w"][0, 0]), 8), ["loss_sum", "int32", "floating"]),
    (
        lambda p, b, k: ((jnp.sum(b["x"] @ p["w"]), 8), {"ok": b["x"] > 0}),
        ["aux leaf 'ok'", "bool"],
    ),
]


@pytest.mark.parametrize(("loss", "parts"), LOSSES)
@pytest.mark.parametrize("partitioner", ["manual", "auto"])
def test_losses(loss, parts, partitioner):
    plan = plan_of(partitioner=partitioner)
    for make in (zj.make_train_step, zj.make_eval_step):
        with pytest.raises(ValueError) as caught:
            make(loss, plan).lower(plan.abstract_state, rows(x=(16, 16)))
        for part in parts:
            assert part in str(caught.value)


def good_loss(params, batch, key):
    return jnp.sum(batch["x"] @ params["w"] + params["b"]), batch["x"].size


def test_microbatches_must_divide_the_rows():
    plan = plan_of()
    step = zj.make_train_step(good_loss, plan, microbatches=4)
    with pytest.raises(
        ValueError, match=r"16 rows.* 8 data-parallel devices x 4 microbatches = 32. Pad to 32"
    ):
        step(zj.init_state(plan, jax.random.key(0)), zj.shard_batch(rows(x=(16, 16)), plan))


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (lambda: plan_of(optimizer=optax.sgd(0.1)), ["'opt_state/0/", "only in this plan"]),
        (
            lambda: plan_of(optimizer=optax.chain(ADAM, optax.add_decayed_weights(1e-3))),
            ["opt_state"],
        ),
        (
            lambda: plan_of(stage=1),
            ["'params/b' [8] is whole over 8", "(stage 3) says ('data',) over 8."],
        ),
        (lambda: plan_of(mesh=zj.make_mesh(4)), ["over 4 devices", "over 8."]),
        (
            lambda: plan_of(lambda key: {"w": jnp.ones((24, 8)), "b": jnp.ones(8)}),
            ["'params/w'", "[24, 8]", "[16, 8]"],
        ),
        (lambda: plan_of(precision="bf16_master"), ["'master/b' exists only in the state"]),
    ],
)
def test_a_state_from_another_plan(other, parts):
    state, plan = zj.init_state(other(), jax.random.key(0)), plan_of()
    step, batch = zj.make_train_step(good_loss, plan), zj.shard_batch(rows(x=(16, 16)), plan)
    with pytest.raises(ValueError) as caught:
        step(state, batch)
    for part in [*parts, "zerojax.init_state"]:
        assert part in str(caught.value)
    assert not state.params["w"].is_deleted()


def test_a_batch_on_another_device():
    plan = plan_of()
    batch = jax.device_put(rows(x=(16, 16)), jax.devices()[3])
    state = zj.init_state(plan, jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"'x' \[16, 16\] is committed to 1 .* zerojax.shard_batch"
    ):
        zj.make_train_step(good_loss, plan)(state, batch)
    zj.make_train_step(good_loss, plan)(state, zj.shard_batch(batch, plan))


def test_a_state_that_is_no_state():
    plan = plan_of()
    with pytest.raises(ValueError, match="state is a dict; pass the TrainState"):
        zj.make_train_step(good_loss, plan)(INIT, rows(x=(16, 16)))


def test_a_state_used_twice():
    plan = plan_of()
    step, state = zj.make_train_step(good_loss, plan), zj.init_state(plan, jax.random.key(0))
    step(state, rows(x=(16, 16)))
    with pytest.raises(ValueError, match=r"given to an earlier step.*state, metrics = step"):
        step(state, rows(x=(16, 16)))


def test_a_state_of_another_precision_without_optimizer_state():
    """Only the dtype tells it apart: no structure of JAX's differs."""
    bf16 = zj.Precision(jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)
    state = zj.init_state(plan_of(optimizer=optax.sgd(0.1), precision=bf16), jax.random.key(0))
    step = zj.make_train_step(good_loss, plan_of(optimizer=optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"'params/b' is bfloat16\[8\]; the plan says float32"):
        step(state, rows(x=(16, 16)))


def test_an_optimizer_that_adds_a_leaf():
    growing = optax.GradientTransformation(lambda params: (), lambda g, s, p=None: (g, jnp.ones(3)))
    plan = plan_of(optimizer=growing)
    with pytest.raises(ValueError, match=r"'opt_state' exists only in the state. The optimizer's"):
        zj.make_train_step(good_loss, plan).lower(plan.abstract_state, rows(x=(16, 16)))


def test_an_optimizer_that_changes_its_types():
    changing = optax.GradientTransformation(
        lambda params: jnp.zeros((), jnp.int32), lambda g, s, p=None: (g, s + 0.5)
    )
    plan = plan_of(optimizer=changing)
    with pytest.raises(
        ValueError, match=r"'opt_state' is float32\[\]; the plan says int32\[\]. The opt"
    ):
        zj.make_train_step(good_loss, plan).lower(plan.abstract_state, rows(x=(16, 16)))


def test_simulating_after_jax_started():
    code = "import jax, zerojax as zj; jax.devices(); zj.simulate_devices(8)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"JAX_PLATFORMS": "cpu"}
    )
    assert "JAX already started with 1 cpu device(s)" in run.stderr
    assert "restart the notebook kernel" in run.stderr
