# SPDX-License-Identifier: Apache-2.0
"""The layer engine: the oracle's numbers with dropout, counted collectives, measured memory."""

from __future__ import annotations

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import zerojax as zj
from tests import toy
from tests.programs import collectives_of, compiled
from tests.training.test_equivalence import covering, label

LAYERS = 4
RTOL = toy.RTOL


def init_params(key):
    keys = iter(jax.random.split(key, 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])
    return {
        "embed": normal(toy.VOCAB, 16),
        "blocks": {
            "up": normal(LAYERS, 16, 24),
            "scale": jnp.ones((LAYERS, 24)),
            "down": normal(LAYERS, 24, 16),
            "odd": jnp.full((LAYERS, 5), 0.2),
            "number": jnp.arange(LAYERS),
        },
        "head": normal(16, toy.TARGETS),
        "ids": jnp.arange(toy.TARGETS),
    }


def block(params, x, table, mask, own):
    """Dropout by a key of the layer's own, a float and an integer input, two kinds of aux."""
    key, rate = own
    hidden = jnp.tanh(x @ params["up"] * params["scale"]) * rate
    hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
    change = jnp.where(mask, hidden @ params["down"], 0) * table * params["odd"].sum()
    aux = {"size": jnp.sum(hidden**2), "number": params["number"]}
    return x + change, aux


def make_loss(run):
    """`run(block, stacked_params, x, table, mask, own)` is an engine or a plain scan."""

    def loss_fn(params, batch, key):
        x = params["embed"][batch["tokens"]].mean(axis=1)
        table = jnp.linspace(0.5, 1, 16) * jnp.tanh(params["head"][:, 0])  # has a gradient
        own = jax.random.split(key, LAYERS), jnp.arange(1, LAYERS + 1) / LAYERS
        x, aux = run(block, params["blocks"], x, table, jnp.arange(16) % 3 != 1, own)
        logits = (x @ params["head"])[:, params["ids"]] + 0 * aux["number"].sum()
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
        loss_sum = jnp.sum(losses * batch["weight"]) + 1e-2 * aux["size"].sum()
        return (loss_sum, batch["weight"].sum()), {"loss_again": loss_sum}

    return loss_fn


def plain(block, params, x, table, mask, own):
    return lax.scan(lambda x, layer: block(layer[0], x, table, mask, layer[1]), x, (params, own))


def engine(**kwargs):
    return lambda block, params, x, *inputs: zj.scan_layers(
        block, params, x, *inputs[:-1], per_layer=inputs[-1], **kwargs
    )


@functools.cache
def oracle(num_devices, microbatches):
    """Plain optax on one device; rows and keys as the step hands them out."""
    optimizer, loss_fn = optax.adamw(1e-2), make_loss(plain)
    init_key, run_key = jax.random.split(jax.random.key(toy.KEY))
    params = init_params(init_key)
    ints = {"ids": params.pop("ids")}, params["blocks"].pop("number")
    opt_state, losses, norms = optimizer.init(params), [], []

    @jax.jit
    def step(params, opt_state, batch, key):
        def mean(params):
            whole = {**params, **ints[0], "blocks": {**params["blocks"], "number": ints[1]}}
            slices = num_devices * microbatches
            rows = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), batch)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_devices))
            if microbatches > 1:
                per_device = jax.vmap(jax.random.fold_in, (None, 0))
                keys = jax.vmap(per_device, (0, None))(keys, jnp.arange(microbatches)).ravel()
            sums, _ = jax.vmap(loss_fn, (None, 0, 0))(whole, rows, keys)
            loss_sum, weight = (terms.sum() for terms in sums)
            return loss_sum / weight

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    for number, batch in enumerate(toy.batches("unequal", num_steps=3)):
        key = jax.random.fold_in(run_key, number)
        params, opt_state, loss, norm = step(params, opt_state, batch, key)
        losses.append(float(loss))
        norms.append(float(norm))
    return losses, norms, jax.device_get(params)


def plan_of(num_devices=8, **kwargs):
    kwargs = {"stage": 3, "layers": ("blocks",), "max_unsharded": 1.0, **kwargs}
    return zj.make_plan(init_params, optax.adamw(1e-2), zj.make_mesh(num_devices), **kwargs)


def train(plan, run, microbatches=1):
    step = zj.make_train_step(make_loss(run), plan, microbatches=microbatches)
    state, losses, norms = zj.init_state(plan, jax.random.key(toy.KEY)), [], []
    for batch in toy.batches("unequal", num_steps=3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    params = jax.device_get(state.params)
    del params["ids"], params["blocks"]["number"]
    return losses, norms, params


FACTORS = {
    "stage": (0, 1, 2, 3),
    "partitioner": ("manual", "auto"),
    "num_devices": (1, 2, 8),
    "prefetch": (0, 1, 2),
    "remat": ("full", "none"),
    "microbatches": (1, 4),
}
PRODUCT = [dict(zip(FACTORS, case, strict=True)) for case in itertools.product(*FACTORS.values())]


def error(stage, partitioner, num_devices, prefetch, remat, microbatches):
    plan = plan_of(num_devices, stage=stage, partitioner=partitioner)
    found = train(plan, engine(prefetch=prefetch, remat=remat), microbatches)
    return toy.worst_error(found, oracle(num_devices, microbatches))


@pytest.mark.parametrize("case", list(covering(PRODUCT)), ids=label)
def test_equals_plain_optax_with_dropout(case, record_property):
    found = error(**case)
    record_property(toy.ERROR, found)
    assert found < RTOL


@pytest.mark.full
def test_full_product_of_the_engine(record_property):
    errors = {}
    for case in PRODUCT:
        errors[label(case)] = error(**case)
        jax.clear_caches()
    worst = max(errors, key=errors.get)
    record_property(toy.ERROR, errors[worst])
    assert errors[worst] < RTOL, worst


def test_other_dropout_in_the_recomputation_is_noticed(monkeypatch):
    """The twin: a backward that draws other masks than the forward."""
    backward = zj.engine.layer.Layer.backward

    def redraw(self, weights, saved, inputs, *cotangents):
        other = lambda x: jax.random.fold_in(x, 1) if x.dtype == jax.random.key(0).dtype else x
        inputs = inputs._replace(others=jax.tree.map(other, inputs.others))
        return backward(self, weights, saved, inputs, *cotangents)

    monkeypatch.setattr(zj.engine.layer.Layer, "backward", redraw)
    assert error(3, "manual", 8, 1, "full", 1) > 100 * RTOL


# Counted: a stack of equal layers, every leaf of which divides by 8.

WIDTH, HIDDEN, ROWS = 64, 256, 64
LEAF = WIDTH * HIDDEN
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}


def stack_step(num_layers=4, microbatches=1, scan=zj.scan_layers, **kwargs):
    choices = {
        name: kwargs.pop(name) for name in ("prefetch", "remat", "regather") if name in kwargs
    }

    def init(key):
        up = jnp.zeros((num_layers, WIDTH, HIDDEN))
        return {"blocks": {"up": up, "down": up.swapaxes(1, 2)}, "head": jnp.zeros((WIDTH, 16))}

    def loss_fn(params, batch, key):
        block = lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"]
        x = scan(block, params["blocks"], batch["x"], **choices)
        return jnp.sum((x @ params["head"]) ** 2), x.shape[0]

    kwargs = {"stage": 3, **kwargs}
    plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(), layers=("blocks",), **kwargs)
    return zj.make_train_step(loss_fn, plan, microbatches=microbatches)


def layer_traffic(step, num_layers=4):
    """Times that a layer's leaf, or a whole stacked leaf as one, is moved: by kind and place."""
    found = collections.Counter()
    for (kind, size, where), times in collectives_of(compiled(step, BATCH).as_text()).items():
        if size == LEAF:
            found[kind, where] += times
        elif size == num_layers * LEAF:
            found[f"{kind} of the stack", where] += times
        else:
            assert size == WIDTH * 16, size  # the head, in the root unit
    return dict(found)


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_stage_3_gathers_each_layer_twice_and_scatters_it_once(prefetch, microbatches, remat):
    """2 leaves x 4 layers x m microbatches, and what the queue of each direction costs."""
    step = stack_step(prefetch=prefetch, microbatches=microbatches, remat=remat)
    found = layer_traffic(step)
    per_slice = 2 * 2 * prefetch  # to fill the two queues; as many turns at the ends are wasted
    where = "loop" if microbatches > 1 else "top"
    expected = collections.Counter({("all-gather", "loop"): 2 * 2 * 4 * microbatches})
    expected["all-gather", where] += per_slice * microbatches
    expected["reduce-scatter", "loop"] = 2 * 4 * microbatches
    assert found == dict(+expected)


def test_without_regathering_each_layer_is_gathered_once_and_kept():
    found = layer_traffic(stack_step(prefetch=0, regather=False))
    assert found == {("all-gather", "loop"): 2 * 4, ("reduce-scatter", "loop"): 2 * 4}
    sizes = [temp_bytes(num_layers=n, regather=False) for n in (4, 8)]
    assert (sizes[1] - sizes[0]) / 4 == pytest.approx(LAYER + SHARD + SAVED["full"], rel=0.02)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_other_stages_gather_no_layer(microbatches):
    found = {
        stage: layer_traffic(stack_step(stage=stage, microbatches=microbatches))
        for stage in (0, 1, 2)
    }
    stack = ("all-gather of the stack", "top"), ("reduce-scatter of the stack", "top")
    assert found[2] == {("reduce-scatter", "loop"): 8 * microbatches, stack[0]: 2}
    assert found[1] == {stack[0]: 2, stack[1]: 2}
    if microbatches == 1:
        assert found[0] == {("all-reduce", "loop"): 8}
    else:
        assert found[0] == {("all-reduce of the stack", "top"): 2}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_is_the_stage_tables(stage, microbatches):
    """Elements per device in units of (N - 1) / N; an all-reduce moves its array twice."""
    step = stack_step(stage=stage, microbatches=microbatches, prefetch=0)
    moved = collectives_of(compiled(step, BATCH).as_text())
    units = sum(
        size * times * (2 if kind == "all-reduce" else 1)
        for (kind, size, _), times in moved.items()
        if size != WIDTH * 16  # the root unit
    )
    assert units == step.plan.stage.traffic(microbatches) * 2 * 4 * LEAF


@pytest.mark.parametrize(
    ("precision", "gather", "scatter"),
    [("fp32", "f32", "f32"), ("bf16", "bf16", "f32"), ("bf16_master", "bf16", "bf16")],
)
def test_dtypes_on_the_wire(precision, gather, scatter):
    """Read before XLA's CPU passes, which widen bf16 collectives."""
    step = stack_step(precision=precision, microbatches=2)
    text = step.lower(step.plan.abstract_state, BATCH).as_text()
    operand = r"\(tensor<(?:\d+x)+(\w+)>\) -> tensor<(?:\d+x)+\w+>"
    gathers = re.findall(rf"stablehlo\.all_gather.*?{operand}", text)
    scatters = re.findall(rf"stablehlo\.reduce_scatter.*?\}}\) : {operand}", text, re.DOTALL)
    assert len(gathers) > 4
    assert len(scatters) > 2
    assert (set(gathers), set(scatters)) == ({gather}, {scatter})


def test_a_gather_at_the_top_is_noticed():
    """The twin: a plain scan over weights that the step made whole."""

    def plain_scan(block, params, x, **choices):
        return lax.scan(lambda x, p: (block(p, x), None), x, params)[0]

    found = layer_traffic(stack_step(scan=plain_scan))
    assert found == {
        ("all-gather of the stack", "top"): 2,
        ("reduce-scatter of the stack", "top"): 2,
    }


def temp_bytes(**kwargs):
    return compiled(stack_step(**kwargs), BATCH).memory_analysis().temp_size_in_bytes


SHARD, LAYER = 2 * LEAF * 4 // 8, 2 * LEAF * 4  # bytes of one layer's shards, and of it whole
SAVED = {"full": ROWS // 8 * WIDTH * 4, "none": ROWS // 8 * (WIDTH + 2 * HIDDEN) * 4}


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("partitioner", ["manual", "auto"])
def test_memory_grows_by_shards_and_activations_alone(partitioner, remat):
    """Slope over 4, 8 and 16 layers: a layer's sharded gradient and what the forward saves."""
    sizes = [temp_bytes(num_layers=n, partitioner=partitioner, remat=remat) for n in (4, 8, 16)]
    for slope in ((sizes[1] - sizes[0]) / 4, (sizes[2] - sizes[1]) / 8):
        assert SHARD < slope <= 1.01 * (SHARD + SAVED[remat])
    assert SHARD + SAVED[remat] < LAYER / 2  # a whole layer in the residuals would show


def test_gathered_weights_kept_for_the_backward_are_noticed(monkeypatch):
    """The twin: a forward that lets the weights be saved."""
    vjp = jax.vjp
    keep = lambda *args, saveable_args, **kwargs: vjp(*args, saveable_args=True, **kwargs)
    monkeypatch.setattr(
        "zerojax.engine.layer.jax.vjp",
        lambda *a, **k: (keep if "saveable_args" in k else vjp)(*a, **k),
    )
    monkeypatch.setattr(
        zj.engine.layer.Layer, "backward", lambda self, w, saved, i, *cts: saved(cts)[:3]
    )
    sizes = [temp_bytes(num_layers=n, remat="none") for n in (4, 8)]
    assert (sizes[1] - sizes[0]) / 4 > LAYER


def test_a_prefetched_layer_costs_one_layer(monkeypatch):
    """Square weights: the CPU backend copies others into another layout, at half a layer more."""
    monkeypatch.setattr(f"{__name__}.HIDDEN", WIDTH)
    layer = 2 * WIDTH * WIDTH * 4
    sizes = [temp_bytes(num_layers=12, prefetch=p) for p in (0, 1, 2)]
    first, second = np.diff(sizes) / layer
    if jax.__version_info__ < (0, 12):  # whose CPU backend keeps more copies
        assert 0.95 < first < 2
        return
    assert first == pytest.approx(1, rel=0.05)
    # The queue of two moves up by copies, which the CPU backend keeps beside it: a third more.
    # Compiled for GPUs the second unit costs one layer to the byte; see docs/log.md.
    assert 0.95 < second < 1.4


def test_stage_2_never_holds_the_stacked_gradient():
    """Its temp grows by shards; stage 1, whose gradient stays whole and local, by whole layers."""
    slopes = {}
    for stage in (1, 2):
        sizes = [temp_bytes(num_layers=n, stage=stage) for n in (8, 16)]
        slopes[stage] = (sizes[1] - sizes[0]) / 8
    gathered = LAYER  # the new parameters, after the optimizer
    assert slopes[2] <= gathered + SHARD + SAVED["full"]
    assert slopes[1] >= gathered + LAYER / 2


# Shapes that are not a stack of equal layers, and uses that are not a scan.


def free_form(apply, scan):
    """A U-shaped net, a layer used twice, a tied table, a stack between two of its own."""

    def loss_fn(params, batch, key):
        table = params["table"]
        x = table[batch["tokens"]].mean(axis=1)
        project = lambda p, x: jnp.tanh(x @ p["w"] + p["b"])
        down = apply(project, params["down"], x)
        again = lambda p, x, gain: (x + gain * jnp.tanh(x @ p["w"]), jnp.sum(x**2))
        down, size = apply(again, params["shared"], down, jnp.float32(0.5))
        down, _ = apply(again, params["shared"], down, jnp.float32(0.25))
        down = scan(lambda p, x: x + jnp.tanh(x @ p["w"]), params["stack"], down)
        up = apply(project, params["up"], down) + x
        losses = optax.softmax_cross_entropy_with_integer_labels(up @ table.T, batch["target"])
        loss_sum = jnp.sum(losses * batch["weight"]) + 1e-2 * size
        return (loss_sum, batch["weight"].sum()), {"loss_again": loss_sum}

    return loss_fn


def free_form_params(key):
    keys = iter(jax.random.split(key, 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])
    return {
        "table": normal(toy.VOCAB, 16),
        "down": {"w": normal(16, 8), "b": jnp.zeros(8)},
        "shared": {"w": normal(8, 8)},
        "stack": {"w": normal(2, 8, 8)},
        "up": {"w": normal(8, 16), "b": jnp.zeros(16)},
        "ids": jnp.arange(3),
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_blocks_take_and_give(stage):
    """Python scalars, static ones too, None, an aux of None, outputs of another structure."""

    def loss_fn(params, batch, key):
        def halve(p, x, rate, times, nothing):
            assert nothing is None
            for _ in range(times):
                x = x + rate * jnp.tanh(x @ p["up"]) @ p["down"]
            return x, None

        x, aux = zj.scan_layers(halve, params["blocks"], batch["x"], 0.5, 2, None)
        assert aux is None
        split = lambda p, x: {"a": x[:, :8] @ p["head"][:8], "b": (x.sum(), 3)}
        out = zj.apply_layer(split, {"head": params["head"]}, x)
        pair = zj.apply_layer(lambda p, x: (x @ p["head"], None), {"head": params["head"]}, x)
        assert pair[1] is None
        return jnp.sum(out["a"] ** 2) + out["b"][0] * out["b"][1] + pair[0].sum(), x.size

    plan = stack_step(stage=stage).plan
    step, state = zj.make_train_step(loss_fn, plan), zj.init_state(plan, jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    params = jax.device_get(state.params)
    expected = loss_fn(params, {"x": x}, None)
    _, metrics = step(state, {"x": x})
    np.testing.assert_allclose(metrics["loss"], expected[0] / expected[1], rtol=1e-5)


def test_regather_changes_nothing_where_nothing_is_gathered():
    for stage in (0, 1, 2):
        assert temp_bytes(stage=stage, regather=False) == temp_bytes(stage=stage)


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("partitioner", ["manual", "auto"])
def test_layers_of_different_shapes_equal_plain_optax(partitioner, remat):
    call = lambda block, params, x, *inputs: block(params, x, *inputs)
    loop = lambda block, params, x: lax.scan(lambda x, p: (block(p, x), None), x, params)[0]
    optimizer, data = optax.adamw(1e-2), lambda: toy.batches("unequal")
    expected = toy.oracle(free_form_params, free_form(call, loop), optimizer, data())
    loss_fn = free_form(
        functools.partial(zj.apply_layer, remat=remat),
        functools.partial(zj.scan_layers, remat=remat, prefetch=2),
    )
    for stage in (0, 2, 3):
        plan = zj.make_plan(
            free_form_params,
            optimizer,
            zj.make_mesh(8),
            stage=stage,
            partitioner=partitioner,
            layers=("stack",),
            max_unsharded=1.0,
        )
        found = toy.train(plan, "unequal", loss=loss_fn, microbatches=2)
        assert toy.worst_error(found, expected) < RTOL


def test_one_layer_is_gathered_again_in_the_backward():
    def init(key):
        return {"w": jnp.zeros((WIDTH, HIDDEN)), "v": jnp.zeros((HIDDEN, WIDTH))}

    def loss_fn(params, batch, key):
        block = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]
        x = zj.apply_layer(block, params, batch["x"])
        return jnp.sum(x**2), x.size

    plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(), stage=3)
    step = zj.make_train_step(loss_fn, plan)
    found = collectives_of(compiled(step, BATCH).as_text())
    # The CPU backend of jax 0.11 merges the two gathers of a weight in spite of the barrier.
    gathers = 4 if jax.__version_info__ >= (0, 12) else 2
    assert found == {("all-gather", LEAF, "top"): gathers, ("reduce-scatter", LEAF, "top"): 2}


@pytest.mark.parametrize("partitioner", ["manual", "auto"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_penalty_over_all_leaves_is_right(stage, partitioner):
    """Weights used outside the engine too: whole, and both gradients arrive."""

    def penalized(run):
        def loss_fn(params, batch, key):
            (loss_sum, weight), _ = make_loss(run)(params, batch, jax.random.key(1))
            real = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
            loss_sum += 1e-2 * weight * sum(jnp.sum(x**2) for x in real)
            return (loss_sum, weight), {"loss_again": loss_sum}

        return loss_fn

    plans = {
        "plain": plan_of(stage=0),
        "engine": plan_of(stage=stage, partitioner=partitioner),
    }
    runs = {
        name: toy.train(plans[name], "unequal", loss=penalized(run))
        for name, run in {"plain": plain, "engine": engine()}.items()
    }
    assert toy.worst_error(runs["engine"], runs["plain"]) < RTOL


def test_frozen_layers_have_no_gradient_and_no_scatter():
    """LoRA: a frozen base, split and gathered as any weight, and trained adapters beside it."""

    def init(key):
        base = jax.random.normal(key, (4, WIDTH, WIDTH)) / 8
        lora = {"a": jnp.ones((4, WIDTH, 8)) / 8, "b": jnp.zeros((4, 8, WIDTH))}
        return {"blocks": {"base": base, "lora": lora}}

    def loss_fn(params, batch, key):
        block = lambda p, x: jnp.tanh(x @ p["base"] + x @ p["lora"]["a"] @ p["lora"]["b"])
        x = zj.scan_layers(block, params["blocks"], batch["x"], prefetch=0)
        return jnp.sum((x - 1) ** 2), x.size

    frozen = lambda path: "lora" not in path
    plan = zj.make_plan(
        init, optax.adam(1e-2), zj.make_mesh(), stage=3, layers=("blocks",), frozen=frozen
    )
    step = zj.make_train_step(loss_fn, plan)
    found = collectives_of(compiled(step, BATCH).as_text())
    base, adapter = WIDTH * WIDTH, WIDTH * 8
    assert found["all-gather", base, "loop"] == 2 * 4
    assert not [kind for kind, size, _ in found if size == base and kind != "all-gather"]
    assert found["reduce-scatter", adapter, "loop"] == 2 * 4
    assert not any("base" in leaf.path for leaf in plan.opt_state)
    state = zj.init_state(plan, jax.random.key(0))
    before = np.asarray(state.params["blocks"]["base"])
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    losses = []
    for _ in range(5):
        state, metrics = step(state, {"x": x})
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(state.params["blocks"]["base"], before)


def test_a_checkpoint_policy_in_the_block_is_respected():
    """Named values alone are saved: one [rows, 64] value a layer, not the two of 256."""

    def slope(wrap):
        def block(p, x):
            hidden = jnp.tanh(x @ p["up"])
            return x + checkpoint_name(hidden @ p["down"], "out")

        scan = lambda _, params, x, **choices: zj.scan_layers(wrap(block), params, x, **choices)
        sizes = [temp_bytes(num_layers=n, remat="none", scan=scan) for n in (4, 8)]
        return (sizes[1] - sizes[0]) / 4 - SHARD

    policy = jax.checkpoint_policies.save_only_these_names("out")
    with_policy = slope(lambda f: jax.checkpoint(f, policy=policy, prevent_cse=False))
    assert with_policy <= 2.1 * ROWS // 8 * WIDTH * 4
    assert slope(lambda f: f) > 4 * ROWS // 8 * WIDTH * 4


def test_outside_a_step_both_are_plain_calls():
    params = {"w": jnp.arange(8.0).reshape(2, 2, 2) / 8}
    f = lambda p, x, c: (x + jnp.tanh(x @ p["w"]) * c, x.sum())
    x, aux = zj.scan_layers(f, params, jnp.ones((1, 2)), 2.0)
    y, sums = lax.scan(lambda x, w: f({"w": w}, x, 2.0), jnp.ones((1, 2)), params["w"])
    np.testing.assert_allclose(x, y)
    np.testing.assert_allclose(aux, sums)
    one = jax.tree.map(lambda w: w[0], params)
    np.testing.assert_allclose(
        zj.apply_layer(f, one, jnp.ones((1, 2)), 2.0)[0], f(one, jnp.ones((1, 2)), 2.0)[0]
    )


ADD = lambda p, x: x + x @ p["up"] @ p["down"]


@pytest.mark.parametrize(
    ("use", "parts"),
    [
        (
            lambda p, x: zj.scan_layers(ADD, {**p["blocks"], "up": p["blocks"]["up"] * 1}, x),
            ["'up' [4, 64, 256] is not one of", "untouched", "broadcast or per_layer"],
        ),
        (
            lambda p, x: zj.scan_layers(lambda q, x: x * p["head"][0, 0], p["blocks"], x),
            ["closes over a traced array, float32[", "broadcast"],
        ),
        (
            lambda p, x: zj.apply_layer(lambda q, x: x @ q["h"] @ p["head"].T, {"h": p["head"]}, x),
            ["closes over a traced array", "[64, 16]", "broadcast"],
        ),
        (
            lambda p, x: jax.grad(lambda x: zj.scan_layers(ADD, p["blocks"], x).sum())(x),
            ["differentiates a gradient", "lax.stop_gradient"],
        ),
        (
            lambda p, x: jax.checkpoint(lambda q: zj.scan_layers(ADD, q, x))(p["blocks"]),
            ["not one of the arrays", "jax.checkpoint, jax.grad or another block"],
        ),
        (lambda p, x: zj.apply_layer(ADD, p["blocks"], x), ["'down'", "stacked; use scan_layers"]),
        (
            lambda p, x: zj.scan_layers(lambda q, x: x, {"h": p["head"]}, x),
            ["'h' [64, 16] is not stacked", "'head'", "apply_layer"],
        ),
        (
            lambda p, x: zj.scan_layers(lambda q, x: x @ q["up"], p["blocks"], x),
            ["x from float32[8, 64] into float32[8, 256]", "apply_layer"],
        ),
        (
            lambda p, x: zj.scan_layers(lambda q, x: x.astype(jnp.bfloat16), p["blocks"], x),
            ["into bfloat16[8, 64]", "Cast"],
        ),
        (
            lambda p, x: zj.scan_layers(lambda q, x: {"x": x}, p["blocks"], x),
            ["the block returned a tree", "(x, aux)"],
        ),
        (
            lambda p, x: zj.scan_layers(ADD, p["blocks"], x, per_layer=jnp.ones(3)),
            ["has shape (3,)", "count the layers"],
        ),
        (lambda p, x: zj.scan_layers(ADD, p["blocks"], x, remat="some"), ["'some'", '"full"']),
        (lambda p, x: zj.scan_layers(ADD, p["blocks"], x, prefetch=-1), ["prefetch is -1"]),
        (lambda p, x: zj.scan_layers(ADD, {}, x), ["no arrays"]),
    ],
)
def test_wrong_use_speaks(use, parts):
    scan = lambda block, params, x: x
    step = stack_step(scan=scan)

    def loss_fn(params, batch, key):
        return jnp.sum(use(params, batch["x"])), 1.0

    with pytest.raises(ValueError) as caught:
        zj.make_train_step(loss_fn, step.plan).lower(step.plan.abstract_state, BATCH)
    for part in parts:
        assert part in str(caught.value)
