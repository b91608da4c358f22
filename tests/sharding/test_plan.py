# SPDX-License-Identifier: Apache-2.0
"""What the plan says: specs at each stage, optimizer state of any optimizer, the printed table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax as zj
from tests import toy
from zerojax.sharding.stage import STAGES


def specs(plan, tree):
    flat = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.sharding.spec for p, x in flat}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_splits_what_its_row_says(stage):
    plan = toy.make_plan(stage=stage, precision="bf16_master")
    row, state = STAGES[stage], plan.abstract_state
    cut = lambda is_split: P(None, "data") if is_split else P()
    assert state.params["blocks"]["up"].sharding.spec == cut(row.splits_params)
    assert state.master["blocks"]["up"].sharding.spec == cut(row.splits_opt_state)
    assert state.opt_state[0].mu["blocks"]["up"].sharding.spec == cut(row.splits_opt_state)
    grads = {leaf.path: leaf.rest for leaf in plan.grads}
    assert grads["blocks/up"] == cut(row.splits_grads)
    assert state.step.sharding.spec == state.opt_state[0].count.sharding.spec == P()
    assert state.params["odd"]["mid"].sharding.spec == P()  # 5 x 3 divides by nothing
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16", "int32"}
    assert {x.dtype.name for x in jax.tree.leaves(state.master)} == {"float32"}


def test_moments_lie_where_their_parameter_lies_for_every_optimizer():
    for name in toy.OPTIMIZERS:
        plan = toy.make_plan(optimizer=name)
        params = {leaf.path: leaf for leaf in plan.params}
        matched = 0
        for leaf in plan.opt_state:
            owner = max(
                (p for p in params if f"/{leaf.path}".endswith(f"/{p}")), key=len, default=""
            )
            if owner and params[owner].array.shape == leaf.array.shape:
                assert leaf.rest == params[owner].rest, (name, leaf.path)
                matched += 1
        assert matched >= 5, name


def test_factored_state_is_cut_by_its_own_shape():
    plan = toy.make_plan(optimizer="adafactor")
    leaves = {leaf.path: leaf for leaf in plan.opt_state}
    row = next(leaf for path, leaf in leaves.items() if path.endswith("v_row/blocks/up"))
    column = next(leaf for path, leaf in leaves.items() if path.endswith("v_col/blocks/up"))
    assert (row.array.shape, row.rest) == ((3, 16), P(None, "data"))
    assert (column.array.shape, column.rest) == ((3, 24), P(None, "data"))
    unused = next(leaf for path, leaf in leaves.items() if path.endswith("/v/blocks/up"))
    assert (unused.array.shape, unused.rest) == ((1,), P())


def test_a_stack_longer_than_it_is_wide_is_not_cut_along_its_layers():
    """Its moments neither, although their shape alone would say so."""
    init = lambda key: {"blocks": jnp.ones((64, 16, 8)), "w": jnp.ones((64, 16, 8))}
    plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(), stage=3, layers=("blocks",))
    found = specs(plan, plan.abstract_state)
    assert found["params/blocks"] == found["opt_state/0/mu/blocks"] == P(None, "data")
    assert found["params/w"] == found["opt_state/0/mu/w"] == P("data")


def test_frozen_and_integer_leaves_have_no_gradient_and_no_optimizer_state():
    plan = toy.make_plan(frozen=("blocks", "embed"))
    frozen = {leaf.path for leaf in plan.params if not leaf.trained}
    assert frozen == {"blocks/up", "blocks/scale", "blocks/down", "embed", "ids"}
    for kind in (plan.grads, plan.opt_state):
        assert not any("blocks" in leaf.path or "embed" in leaf.path for leaf in kind)
    by_function = toy.make_plan(frozen=lambda path: path.startswith(("blocks", "embed")))
    assert [x.trained for x in by_function.params] == [x.trained for x in plan.params]
    assert plan.abstract_state.params["embed"].sharding.spec == P(None, "data")  # still split


def test_max_unsharded_is_a_limit_not_a_switch():
    init = lambda key: {"w": jnp.ones((64, 64)), "odd": jnp.ones((9, 9))}
    make = lambda limit: zj.make_plan(
        init, optax.sgd(1e-3), zj.make_mesh(), stage=1, max_unsharded=limit
    )
    make(81 / (64 * 64 + 81))
    with pytest.raises(ValueError, match=r"1\.9% of the state's bytes"):
        make(80 / (64 * 64 + 81))


def test_table():
    text = str(toy.make_plan(stage=1, optimizer="adafactor", frozen=("head",)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "stage 1" in lines[0]
    row = next(line for line in lines if line.startswith("blocks/up"))
    assert all(part in row for part in ("(3, 16, 24)", "float32", "whole", "4.61 kB"))
    assert "optimizer state: dim 1, 16 / 8" in row
    assert "17, 17 do not divide by 8; frozen" in text
    assert "5, 3 do not divide by 8" in text
    assert all(kind in text for kind in ("params", "grads", "opt_state"))
