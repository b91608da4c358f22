# SPDX-License-Identifier: Apache-2.0
"""Which dimension is cut, and the reasons given."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from zerojax.sharding.specs import split


@pytest.mark.parametrize(
    ("shape", "stacked", "base", "spec", "dim"),
    [
        ((64,), False, P(), P("data"), 0),
        ((16, 64), False, P(), P("data"), 0),  # the first that divides
        ((64, 64), False, P(), P("data"), 0),
        ((65, 16), False, P(), P(None, "data"), 1),  # 65 does not divide
        ((8, 3, 5), False, P(), P("data"), 0),
        ((64, 16, 24), True, P(), P(None, "data"), 1),  # never the stacked layers
        ((64, 3), True, P(), P(), None),
        ((64,), True, P(), P(), None),
        ((), False, P(), P(), None),
        ((0, 5), False, P(), P(), None),
        ((33, 17), False, P(), P(), None),
        ((64, 128), False, P(None, "model"), P("data", "model"), 0),  # other axes keep their dims
        ((7, 128), False, P(None, "model"), P(None, "model"), None),
    ],
)
def test_split(shape, stacked, base, spec, dim):
    result = split(shape, 8, "data", stacked=stacked, base=base)
    assert (result.spec, result.dim) == (spec, dim)


@pytest.mark.parametrize(
    ("shape", "stacked", "num_shards", "reason"),
    [
        ((16, 64), False, 8, "dim 0, 16 / 8"),
        ((17, 3), False, 8, "17, 3 do not divide by 8"),
        ((64, 5), True, 8, "5 does not divide by 8"),
        ((), False, 8, "a scalar"),
        ((64,), True, 8, "a scalar per layer"),
        ((64,), False, 1, "one device"),
    ],
)
def test_reasons(shape, stacked, num_shards, reason):
    assert split(shape, num_shards, "data", stacked=stacked).reason == reason
