# SPDX-License-Identifier: Apache-2.0
"""The compiled step: one compile, donation, skipping, keys, precision, frozen leaves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from tests import toy

BOTH = pytest.mark.parametrize("partitioner", ["manual", "auto"])


@functools.cache
def compile_events():
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *args, **kwargs: events.append(name) if "backend_compile" in name else None
    )
    return events


def injected():
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    return optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)


@pytest.mark.parametrize(
    ("stage", "partitioner", "optimizer"),  # every pair of values
    [
        (0, "manual", "multisteps"),
        (0, "auto", "injected"),
        (2, "manual", "injected"),
        (2, "auto", "multisteps"),
        (3, "manual", "multisteps"),
        (3, "auto", "injected"),
    ],
)
def test_one_compile(stage, partitioner, optimizer):
    how = injected() if optimizer == "injected" else optimizer
    plan = toy.make_plan(stage=stage, partitioner=partitioner, optimizer=how)
    step = zj.make_train_step(toy.loss_fn, plan, microbatches=2)
    state, batch = zj.init_state(plan, jax.random.key(0)), zj.shard_batch(next(toy.batches()), plan)
    state, _ = step(state, batch)
    events = compile_events()
    before = len(events)
    for _ in range(10):
        state, _ = step(state, batch)
    assert int(state.step) == 11
    assert len(events) == before
    assert step.jitted._cache_size() == 1
    jax.jit(lambda x: x + before)(1)  # the twin: the counter does count
    assert len(events) > before


@pytest.mark.parametrize("sabotage", [False, True])
def test_weak_types_do_not_compile_twice(sabotage, monkeypatch):
    """`jnp.asarray(0.1)` is weak-typed until the first update makes it a plain float32."""
    if sabotage:
        monkeypatch.setattr("zerojax.sharding.state.strong", lambda tree: tree)
    optimizer = optax.GradientTransformation(
        lambda params: jnp.asarray(0.1),
        lambda grads, s, params=None: (jax.tree.map(lambda g: -s * g, grads), s * jnp.float32(1)),
    )
    plan = toy.make_plan(optimizer=optimizer)
    step, state = zj.make_train_step(toy.loss_fn, plan), zj.init_state(plan, jax.random.key(0))
    for batch in toy.batches(num_steps=3):
        state, _ = step(state, batch)
    assert step.jitted._cache_size() == (2 if sabotage else 1)


@jax.numpy_dtype_promotion("strict")
def lower_strictly(loss, **how):
    """Not with optax's Adam, which promotes the number of its updates."""
    plan = toy.make_plan(precision="bf16_master", optimizer=optax.sgd(1e-2), **how)
    step = zj.make_train_step(loss, plan, microbatches=2, skip_nonfinite=True)
    step.lower(plan.abstract_state, next(toy.batches()))


@BOTH
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_dtype_is_promoted_unasked(stage, partitioner):
    lower_strictly(toy.loss_fn, stage=stage, partitioner=partitioner)


def test_a_promotion_is_noticed():
    def promoting(params, batch, key):
        (loss_sum, weight), aux = toy.loss_fn(params, batch, key)
        return (loss_sum * batch["target"].sum(), weight), aux

    with pytest.raises(ValueError, match="no available implicit dtype promotion path"):
        lower_strictly(promoting)


@BOTH
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_donated(stage, partitioner):
    """Every buffer but those of the small whole leaves is reused; a warning would be an error."""
    plan = toy.make_plan(stage=stage, partitioner=partitioner, precision="bf16_master")
    step = zj.make_train_step(toy.loss_fn, plan)
    state, batch = zj.init_state(plan, jax.random.key(0)), zj.shard_batch(next(toy.batches()), plan)
    old = jax.tree.leaves(state)
    compiled = step.lower(state, batch).compile()
    state_bytes = sum(
        x.addressable_shards[0].data.nbytes for x in old if x.dtype != state.key.dtype
    )
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes
    pointers = {s.data.unsafe_buffer_pointer() for x in old[1:9] for s in x.addressable_shards}
    state, _ = step(state, batch)
    assert all(x.is_deleted() for x in old)
    new = {
        s.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(state)[1:9]
        for s in x.addressable_shards
    }
    assert pointers == new


def poisoned(batch, value):
    return {**batch, "weight": np.where(np.arange(toy.ROWS) == 17, value, batch["weight"])}


@BOTH
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nonfinite_gradient_is_skipped(partitioner, microbatches, value):
    plan = toy.make_plan(partitioner=partitioner)
    step = zj.make_train_step(toy.loss_fn, plan, microbatches=microbatches, skip_nonfinite=True)
    state = zj.init_state(plan, jax.random.key(0))
    skipped = []
    for number, batch in enumerate(toy.batches()):
        before = jax.device_get(state._replace(key=jax.random.key_data(state.key)))
        bad = number in (1, 3)
        state, metrics = step(state, poisoned(batch, value) if bad else batch)
        skipped.append(int(metrics["skipped"]))
        after = jax.device_get(state._replace(key=jax.random.key_data(state.key)))
        same = [
            np.array_equal(a, b)
            for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)
        ]
        assert all(same) == bad
    assert skipped == [0, 1, 0, 1, 0]
    assert int(state.step) == 3


def test_without_skipping_a_nonfinite_loss_shows():
    plan = toy.make_plan()
    step = zj.make_train_step(toy.loss_fn, plan)
    state = zj.init_state(plan, jax.random.key(0))
    state, metrics = step(state, poisoned(next(toy.batches()), np.nan))
    assert np.isnan(metrics["loss"])
    assert "skipped" not in metrics


def noise_loss(params, batch, key):
    """Dropout: its mask is drawn from the key for the rows at hand."""
    keep = lambda x: x * jax.random.bernoulli(key, 0.5, x.shape) * 2
    losses = optax.softmax_cross_entropy_with_integer_labels(
        toy.logits(params, batch["tokens"], keep), batch["target"]
    )
    return (jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])), {
        "loss_again": losses.sum()
    }


def test_both_partitioners_draw_the_same_dropout():
    run = lambda **kwargs: toy.train(toy.make_plan(**kwargs), loss=drawn, microbatches=2)[:2]
    drawn = lambda *args: (noise_loss(*args)[0], {"loss_again": noise_loss(*args)[0][0]})
    manual = run(stage=3)
    np.testing.assert_allclose(run(stage=3, partitioner="auto"), manual, rtol=1e-5)
    np.testing.assert_allclose(run(stage=1), manual, rtol=1e-5)
    plain, _, _ = toy.train(toy.make_plan(stage=3), microbatches=2)
    assert not np.allclose(manual[0], plain, rtol=1e-3)


def test_a_resumed_run_draws_the_same_dropout():
    plan = toy.make_plan(stage=3)
    step = zj.make_train_step(noise_loss, plan)
    state, data = zj.init_state(plan, jax.random.key(0)), list(toy.batches())
    state, _ = step(state, data[0])
    saved = jax.device_get(state._replace(key=jax.random.key_data(state.key)))
    restored = saved._replace(key=jax.random.wrap_key_data(jnp.asarray(saved.key)))
    restored = jax.device_put(restored, plan.state_shardings)
    ends = []
    for run in (state, restored):
        losses = []
        for batch in data[1:]:
            run, metrics = step(run, batch)
            losses.append(float(metrics["loss"]))
        ends.append((losses, jax.device_get(run.params)))
    jax.tree.map(np.testing.assert_array_equal, ends[0], ends[1])
    assert step.jitted._cache_size() == 1


@BOTH
def test_keys_differ_between_steps_microbatches_and_devices(partitioner):
    """The loss function returns its draw; all 3 steps x 2 microbatches x 8 devices are apart."""

    def loss(params, batch, key):
        index = batch["index"][0]  # one row per device and microbatch
        draw = jnp.zeros(16).at[index].set(jax.random.uniform(key))
        return (jnp.sum(params["w"] * 0.0), 1.0), draw

    init = lambda key: {"w": jnp.ones(8)}
    plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(), stage=3, partitioner=partitioner)
    step = zj.make_train_step(loss, plan, microbatches=2)
    state = zj.init_state(plan, jax.random.key(0))
    draws = []
    for _ in range(3):
        state, metrics = step(state, {"index": np.arange(16)})
        draws.extend(np.asarray(metrics["aux"] * metrics["weight"]).tolist())
    assert len(set(draws)) == 48


@BOTH
@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_leaves_stay_and_the_rest_trains_as_plain_optax_does(stage, partitioner):
    frozen = ("blocks", "embed")
    plan = toy.make_plan(stage=stage, frozen=frozen, partitioner=partitioner)
    losses, _, params = toy.train(plan)
    initial = jax.device_get(zj.init_state(plan, jax.random.key(toy.KEY)).params)
    for name in frozen:
        jax.tree.map(np.testing.assert_array_equal, params[name], initial[name])

    def stop(params, batch, key):
        held = {name: jax.lax.stop_gradient(params[name]) for name in frozen}
        return toy.loss_fn({**params, **held}, batch, key)

    masked = optax.masked(
        optax.adamw(1e-2),
        lambda p: {k: jax.tree.map(lambda _, k=k: k not in frozen, v) for k, v in p.items()},
    )
    expected, _, trained = toy.oracle(toy.init_params, stop, masked, toy.batches())
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    np.testing.assert_allclose(params["head"], trained["head"], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("partitioner", ["manual", "auto"])
@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_follows_fp32_and_the_master_keeps_small_updates(stage, partitioner):
    exact, _, _ = toy.train(toy.make_plan(stage=stage))
    for precision in ("bf16", "bf16_master"):
        losses, _, _ = toy.train(
            toy.make_plan(stage=stage, precision=precision, partitioner=partitioner)
        )
        # bf16 has 8 bits: its rounding, 2**-8, bounds what the losses may differ by.
        np.testing.assert_allclose(losses, exact, rtol=2**-7)
        assert losses != exact


def test_updates_too_small_for_bf16_accumulate_in_the_master():
    """100 updates of 1e-4 are lost in bf16 and kept in the master copy."""
    init = lambda key: {"w": jnp.ones(8)}
    loss = lambda p, b, k: (jnp.sum(p["w"] * b["x"]), 1.0)
    ends = {}
    for name, precision in {
        "master": "bf16_master",
        "rounded": zj.Precision(jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    }.items():
        plan = zj.make_plan(init, optax.sgd(1e-4), zj.make_mesh(), stage=3, precision=precision)
        step, state = zj.make_train_step(loss, plan), zj.init_state(plan, jax.random.key(0))
        for _ in range(100):
            state, _ = step(state, {"x": np.ones((8, 8), np.float32)})
        ends[name] = state
    np.testing.assert_allclose(ends["master"].master["w"], 0.99, rtol=1e-5)
    np.testing.assert_allclose(ends["master"].params["w"], 0.99, rtol=2**-8)
    np.testing.assert_array_equal(ends["rounded"].params["w"], 1.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_microbatches_accumulate_in_fp32(stage):
    """256 + 1 is 256 in bf16: a 16-bit accumulator would lose the small terms."""
    init = lambda key: {"w": jnp.zeros((8, 8))}
    loss = lambda p, b, k: (jnp.sum(b["x"] @ p["w"]), 1.0)
    precision = zj.Precision(compute=jnp.bfloat16, reduce=jnp.float32)
    plan = zj.make_plan(init, optax.sgd(1.0), zj.make_mesh(), stage=stage, precision=precision)
    step, state = (
        zj.make_train_step(loss, plan, microbatches=4),
        zj.init_state(plan, jax.random.key(0)),
    )
    rows = np.zeros((32, 8), np.float32)
    rows[0], rows[1:4] = 256, 1  # the first device's four microbatches
    state, _ = step(state, {"x": rows})
    np.testing.assert_array_equal(-state.params["w"] * 32, 259)


@BOTH
def test_evaluation(partitioner):
    plan = toy.make_plan(stage=3, partitioner=partitioner)
    state = zj.init_state(plan, jax.random.key(toy.KEY))
    eval_step, batch = zj.make_eval_step(toy.loss_fn, plan), next(toy.batches("unequal"))
    found = eval_step(state, zj.shard_batch(batch, plan))
    expected, _, _ = toy.oracle_of("adamw", "unequal")
    np.testing.assert_allclose(found["loss"], expected[0], rtol=2e-6)
    np.testing.assert_allclose(found["weight"], batch["weight"].sum(), rtol=1e-6)
    np.testing.assert_allclose(found["aux"]["loss_again"], expected[0], rtol=2e-6)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@BOTH
def test_whole_tensor_optimizers_see_whole_arrays(partitioner):
    """Muon's Newton-Schulz needs the matrix; a shard's would differ."""
    optimizer = optax.contrib.muon(1e-2)
    plan = toy.make_plan(optimizer=optimizer, partitioner=partitioner)
    found = toy.train(plan)
    expected = toy.oracle(toy.init_params, toy.loss_fn, optimizer, toy.batches())
    # Five Newton-Schulz iterations amplify the rounding of an almost singular update.
    assert toy.worst_error(found, expected) < 2e-4


def test_optimizers_that_need_the_loss_get_it():
    optimizer = optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1)
    )
    plan = toy.make_plan(optimizer=optimizer, stage=1)
    step, state = zj.make_train_step(toy.loss_fn, plan), zj.init_state(plan, jax.random.key(0))
    state, metrics = step(state, next(toy.batches()))
    np.testing.assert_allclose(state.opt_state[1].best_value, metrics["loss"])


def test_step_can_be_lowered_from_shapes_alone():
    plan = toy.make_plan()
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), next(toy.batches()))
    compiled = zj.make_train_step(toy.loss_fn, plan).lower(plan.abstract_state, batch).compile()
    _, metrics = compiled(
        zj.init_state(plan, jax.random.key(toy.KEY)), zj.shard_batch(next(toy.batches()), plan)
    )
    np.testing.assert_allclose(metrics["loss"], toy.oracle_of("adamw", "equal")[0][0], rtol=2e-6)


@BOTH
def test_complex_parameters(partitioner):
    """Gradients, moments and reductions of complex leaves, as plain optax makes them."""

    def init(key):
        return {"w": jax.random.normal(key, (16, 8), jnp.complex64), "ids": jnp.arange(3)}

    def loss(params, batch, key):
        weight = batch["weight"].sum()
        x = jnp.exp(1j * batch["tokens"][:, :1].astype(jnp.float32)) * jnp.ones(16)
        loss_sum = jnp.sum(jnp.abs(x @ params["w"] - 1) ** 2 * batch["weight"][:, None])
        return (loss_sum, weight), {"loss_again": loss_sum}

    optimizer = optax.adam(1e-2)
    plan = zj.make_plan(init, optimizer, zj.make_mesh(), stage=3, partitioner=partitioner)
    expected = toy.oracle(init, loss, optimizer, toy.batches("unequal"))
    assert toy.worst_error(toy.train(plan, "unequal", loss=loss), expected) < 2e-5
