# SPDX-License-Identifier: Apache-2.0
"""What crosses the wire, counted from the compiled program (manual partitioner)."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from tests import toy

BATCH = {"x": np.ones((32, 16), np.float32), "y": np.ones((32, 16), np.float32)}
PSI = 16 * 64 + 64 + 64 * 16  # every leaf divides by 8


def init_params(key):
    up, down = jax.random.normal(key, (2, 16 * 64))
    return {"up": up.reshape(16, 64), "bias": jnp.zeros(64), "down": down.reshape(64, 16)}


def loss_fn(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    error = hidden @ params["down"] - batch["y"]
    return jnp.sum(error**2), error.size


def make_step(stage, microbatches=1, precision="fp32", num_devices=8):
    plan = zj.make_plan(
        init_params, optax.adamw(1e-3), zj.make_mesh(num_devices), stage=stage, precision=precision
    )
    return zj.make_train_step(loss_fn, plan, microbatches=microbatches)


def compiled_text(step, batch=BATCH):
    return step.lower(step.plan.abstract_state, batch).compile().as_text()


def traffic(text):
    """Elements of the whole arrays by (kind, in a loop or not), leaving out scalars."""
    found, in_loop = collections.Counter(), False
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            in_loop = not line.startswith("ENTRY")
        match = re.search(
            r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(", line
        )
        if match:
            shapes = re.findall(r"\w+\[([\d,]+)\]", match[1])
            size = sum(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)
            size *= 8 if match[2] == "reduce-scatter" else 1
            if size:
                found[match[2], "loop" if in_loop else "top"] += size
    return dict(found)


EXPECTED = {  # microbatches 1, then 4 (the loop's body counted once)
    0: ({("all-reduce", "top"): PSI}, {("all-reduce", "top"): PSI}),
    1: (
        {("reduce-scatter", "top"): PSI, ("all-gather", "top"): PSI},
        {("reduce-scatter", "top"): PSI, ("all-gather", "top"): PSI},
    ),
    2: (
        {("reduce-scatter", "top"): PSI, ("all-gather", "top"): PSI},
        {("reduce-scatter", "loop"): PSI, ("all-gather", "top"): PSI},
    ),
    3: (
        {("reduce-scatter", "top"): PSI, ("all-gather", "top"): PSI},
        {("reduce-scatter", "loop"): PSI, ("all-gather", "top"): PSI},
    ),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_of_each_stage(stage):
    assert traffic(compiled_text(make_step(stage))) == EXPECTED[stage][0]
    assert traffic(compiled_text(make_step(stage, microbatches=4))) == EXPECTED[stage][1]


def test_one_device_moves_nothing():
    for stage in (0, 3):
        text = compiled_text(make_step(stage, num_devices=1))
        assert not re.search(r"all-gather|reduce-scatter", text)


def test_all_reduce_where_reduce_scatter_was_due_is_noticed(monkeypatch):
    """The defect of early stage-1 implementations: all-reduce, slice, all-gather."""

    def scatter(self, x, spec):
        dim = next((d for d, name in enumerate(spec) if name), None)
        whole = self.all_reduce(x)
        if dim is None:
            return whole
        size = x.shape[dim] // 8
        start = jax.lax.axis_index("data") * size
        return jax.lax.dynamic_slice_in_dim(whole, start, size, dim)

    monkeypatch.setattr("zerojax.sharding.collectives.Manual.scatter", scatter)
    found = traffic(compiled_text(make_step(1)))
    assert found == {("all-reduce", "top"): PSI, ("all-gather", "top"): PSI}
    assert found != EXPECTED[1][0]


def test_whole_leaves_are_reduced_once_per_step():
    """Leaves that do not divide stay local over the microbatches, also at stages 2 and 3."""
    plan = toy.make_plan(stage=3)
    step = zj.make_train_step(toy.loss_fn, plan, microbatches=4)
    found = traffic(compiled_text(step, next(toy.batches())))
    whole = sum(
        leaf.array.size for leaf in plan.grads if leaf.split.dim is None and leaf.array.ndim
    )
    assert ("all-reduce", "loop") not in found
    assert found["all-reduce", "top"] >= whole


@pytest.mark.parametrize(
    ("precision", "gather", "scatter"),
    [("fp32", "f32", "f32"), ("bf16", "bf16", "f32"), ("bf16_master", "bf16", "bf16")],
)
def test_dtypes_on_the_wire(precision, gather, scatter):
    """Read before XLA's CPU passes, which widen bf16 collectives."""
    step = make_step(3, precision=precision)
    text = step.lower(step.plan.abstract_state, BATCH).as_text()
    operand = r'"stablehlo\.{}".*?\n?.*?: \(tensor<(?:\d+x)+(\w+)>\)'
    assert set(re.findall(operand.format("all_gather"), text)) == {gather}
    scatters = re.findall(
        r"stablehlo\.reduce_scatter.*?\}\) .*?tensor<(?:\d+x)+(\w+)>\) ->", text, re.DOTALL
    )
    assert set(scatters) == {scatter}
