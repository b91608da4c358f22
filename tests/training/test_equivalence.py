# SPDX-License-Identifier: Apache-2.0
"""Every stage, partitioner, optimizer, device count and slicing equals plain optax.

`make test` runs a covering design in which every pair of values meets; `make test-full` runs the
whole product; both end with the worst error.
"""

from __future__ import annotations

import itertools
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import zerojax as zj
from tests import toy
from zerojax.sharding import collectives
from zerojax.sharding.axes import DATA
from zerojax.sharding.specs import split_dim
from zerojax.training import loss

FACTORS = {
    "stage": (0, 1, 2, 3),
    "partitioner": ("manual", "auto"),
    "num_devices": (1, 2, 8),
    "optimizer": tuple(toy.OPTIMIZERS),
    "microbatches": (1, 4),
    "weights": ("equal", "unequal", "masked"),
}
PRODUCT = [dict(zip(FACTORS, case, strict=True)) for case in itertools.product(*FACTORS.values())]
RTOL = toy.RTOL


def pairs(case):
    return set(itertools.combinations(case.items(), 2))


def covering(cases):
    """Greedily picks cases until every pair of values that occurs in `cases` was picked."""
    missing = set().union(*map(pairs, cases))
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        yield best


def build(weights, microbatches, **case):
    """A step and a fresh state; neither depends on the weights."""
    plan = toy.make_plan(**case)
    step = zj.make_train_step(toy.loss_fn, plan, microbatches=microbatches)
    return step, zj.init_state(plan, jax.random.key(toy.KEY))


def error(step, state, case):
    found = toy.run(step, state, case["weights"])
    return toy.worst_error(found, toy.oracle_of(case["optimizer"], case["weights"]))


def label(case):
    return "-".join(map(str, case.values()))


COVERING = list(covering(PRODUCT))


@pytest.mark.parametrize("case", COVERING, ids=label)
def test_equals_plain_optax(case, record_property):
    found = error(*build(**case), case)
    record_property(toy.ERROR, found)
    assert found < RTOL


def test_design_covers_every_pair():
    assert set().union(*map(pairs, COVERING)) == set().union(*map(pairs, PRODUCT))
    assert len(COVERING) < 50 < len(PRODUCT) == 1008


@pytest.mark.full
def test_full_product(record_property):
    errors, built = {}, {}
    for case in PRODUCT:  # the weights vary fastest, so each step is built once
        program = label({**case, "weights": "any"})
        if program not in built:
            jax.clear_caches()
            step, state = build(**case)
            built = {program: (step, jax.device_get(state._replace(key=None)), state.key)}
        step, host_state, key = built[program]
        state = jax.device_put(host_state, step.plan.state_shardings._replace(key=None))
        errors[label(case)] = error(step, state._replace(key=jnp.copy(key)), case)
    worst = max(errors, key=errors.get)
    record_property(toy.ERROR, errors[worst])
    assert errors[worst] < RTOL, worst


# Sabotaged twins: each breaks one thing that the comparison above must notice.


def drop_sum(monkeypatch):
    """The shard of this device's own gradient, without the other devices' terms."""

    def scatter(self, x, spec):
        dim = split_dim(spec)
        if dim is None:
            return self.all_reduce(x)
        size = x.shape[dim] // self.mesh.shape[DATA]
        return lax.dynamic_slice_in_dim(x, lax.axis_index(DATA) * size, size, dim)

    monkeypatch.setattr(collectives.Manual, "scatter", scatter)


def shift_shard(monkeypatch):
    """Every device ends up with its neighbour's shard of the gradient."""
    scatter = collectives.Manual.scatter

    def shifted(self, x, spec):
        size = self.mesh.shape[DATA]
        if split_dim(spec) is None:
            return scatter(self, x, spec)
        return lax.ppermute(
            scatter(self, x, spec), DATA, [(i, (i + 1) % size) for i in range(size)]
        )

    monkeypatch.setattr(collectives.Manual, "scatter", shifted)


def mean_over_devices(monkeypatch):
    """Gradients of the leaves that stay whole come out N times too small."""
    monkeypatch.setattr(
        collectives.Manual, "all_reduce", lambda self, x: lax.pmean(self.local(x), DATA)
    )


def mean_of_means(monkeypatch):
    """Each device and microbatch divides by its own weight."""
    call_loss = loss.call_loss

    def normalized(*args):
        sums = call_loss(*args)
        return sums.map(lambda x: x / jax.numpy.maximum(sums.weight, 1e-6))

    monkeypatch.setattr("zerojax.training.gradients.call_loss", normalized)


def forget_last_microbatch(monkeypatch):
    def scan(f, init, xs):
        return lax.scan(f, init, jax.tree.map(lambda x: x[:-1], xs))

    monkeypatch.setattr("zerojax.training.gradients.lax", types.SimpleNamespace(scan=scan))


@pytest.mark.parametrize(
    "sabotage", [drop_sum, shift_shard, mean_over_devices, mean_of_means, forget_last_microbatch]
)
def test_sabotage_is_noticed(sabotage, monkeypatch):
    case = {"num_devices": 8, "optimizer": "clip_adamw", "microbatches": 4, "weights": "unequal"}
    sabotage(monkeypatch)
    for stage in (1, 3):
        assert error(*build(**case, stage=stage), case) > 100 * RTOL
