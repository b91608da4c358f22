# SPDX-License-Identifier: Apache-2.0
"""Trees taken apart and put together again, whatever their nodes are."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax.tree import combine, leaves_with_names, matches, partition

Point = collections.namedtuple("Point", "x y")
TREES = {
    "empty": (),
    "a leaf": jnp.ones(2),
    "an integer": 3,
    "None among leaves": {"a": None, "b": [jnp.ones(2), None, jnp.arange(2)]},
    "named": Point(jnp.ones(()), np.arange(3)),
    "masked": {"w": optax.MaskedNode(), "b": jnp.ones(2, jnp.bfloat16)},
    "keys": {"key": jax.random.key(0), "rate": 0.1},
    "complex": [jnp.ones(2, jnp.complex64), True],
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_combine_puts_together_what_partition_took_apart(tree):
    parts = partition(tree)
    floating = jax.tree.leaves(parts.floating)
    assert all(jnp.issubdtype(x.dtype, jnp.inexact) for x in floating)
    assert len(floating) + len(jax.tree.leaves(parts.others)) == len(jax.tree.leaves(tree))
    again = combine(parts)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for (path, x), y in zip(leaves_with_names(tree), jax.tree.leaves(again), strict=True):
        assert np.all(jnp.asarray(x == y)), path


def test_a_structure_leaves_a_scan_with_its_arrays():
    """The reason for the form: what a traced function returns carries its own structure."""

    def body(x, _):
        aux = {"loss": x * 2.0, "count": jnp.int32(1), "none": None}
        return x, partition(aux)

    _, parts = jax.lax.scan(body, jnp.ones(()), None, length=3)
    assert combine(parts)["none"] is None
    assert combine(parts)["loss"].tolist() == [2.0] * 3


def test_a_rule_that_names_nothing_is_an_error():
    assert matches(["a/b", "ab"], ("a",), "frozen") == [True, False]
    with pytest.raises(ValueError, match=r"frozen names 'c'.* begin with: a, ab"):
        matches(["a/b", "ab"], ("c",), "frozen")
    with pytest.raises(ValueError, match=r"is the string 'a'; pass a tuple of paths"):
        matches(["a"], "a", "layers")
