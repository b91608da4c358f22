# SPDX-License-Identifier: Apache-2.0
"""Llama2-7B on 8 H100s, compiled here: communication hides behind compute, and prefetch pays."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from models import transformer
from tests import aot
from zerojax.receipt.peak import predict_peak

pytestmark = aot.needed


@functools.cache
def receipts(prefetch, regather=True, partitioner="manual"):
    """At 350 and at 100 GB/s, 2 x 4096 tokens per GPU, full remat, gradients reduced in bf16."""
    model = dataclasses.replace(
        transformer.PRESETS["llama2-7b"],
        attention="cudnn",
        prefetch=prefetch,
        regather=regather,
    )
    plan = zj.make_plan(
        functools.partial(transformer.init_params, model),
        optax.adamw(1e-3),
        zj.make_mesh(target="h100:8"),
        stage=3,
        layers=("blocks",),
        precision=zj.Precision(compute=jnp.bfloat16, reduce=jnp.bfloat16),
        partitioner=partitioner,
    )
    loss_fn = functools.partial(transformer.loss_fn, model)
    step = zj.make_train_step(loss_fn, plan)
    batch = {"tokens": jax.ShapeDtypeStruct((16, model.seq_len + 1), jnp.int32)}
    compiled = step.lower(plan.abstract_state, batch).compile()
    stacks = predict_peak(loss_fn, plan, batch).stacks
    targets = [zj.target("h100:8", link_bandwidth=rate) for rate in (350e9, 100e9)]
    return [
        zj.audit_compiled(compiled, plan, batch, target=target, stacks=stacks).check()
        for target in targets
    ]


def test_prefetch_hides_communication_and_none_shows_it():
    fast, slow = (found.timeline for found in receipts(1))
    assert fast.exposed < 2e-3
    assert slow.exposed < 20e-3
    late_fast, late_slow = (found.timeline for found in receipts(0))
    assert late_fast.exposed > 10 * fast.exposed
    assert late_slow.exposed > 5 * slow.exposed
    assert fast.seconds < late_fast.seconds


def test_the_other_partitioner_hides_it_too():
    fast, slow = (found.timeline for found in receipts(1, partitioner="auto"))
    assert fast.exposed < 4e-3
    assert slow.exposed < 20e-3


def test_a_prefetched_layer_costs_at_most_a_layer_and_a_half():
    one, none = receipts(1)[0], receipts(0)[0]
    layer = sum(
        leaf.array.size // leaf.array.shape[0] * 2 for leaf in one.plan.params if leaf.stacked
    )
    assert one.peak.total < 17.5 * 2**30
    assert one.peak.total - none.peak.total < 1.5 * layer


def test_in_the_loops_no_collective_is_synchronous():
    loops = [m.collective for m in receipts(1)[0].moves if m.collective.loops]
    assert len(loops) > 10
    assert all(collective.is_async for collective in loops)


@pytest.mark.full
def test_kept_layers_hide_the_gathers_of_the_next_forward():
    found = receipts(1, regather=False)[0]
    assert found.timeline is not None
    assert found.timeline.exposed < 5e-3
    assert found.ratio == pytest.approx(1, abs=0.01)
