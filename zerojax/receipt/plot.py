# SPDX-License-Identifier: Apache-2.0
"""Receipts as a picture: bytes on each device, and the streams of a step."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Any

from zerojax.receipt.report import Audit, name_of
from zerojax.receipt.timeline import Timeline
from zerojax.sharding.stage import STATE_KINDS

BAR_COLORS = {"params": "#08519c", "master": "#3182bd", "opt_state": "#6baed6"}
BAR_COLORS |= {"temporary": "#d9d9d9"}


def draw(receipts: Sequence[Audit], path: str | os.PathLike[str]) -> None:
    """Draws Audits into a picture file: bytes on each device, and the streams of the last one.

    Args:
      receipts: Audits, one bar each.
      path: of the picture; its suffix says the format, such as `.png`.

    Raises:
      ValueError: there are no receipts.
      ImportError: matplotlib is not installed (`pip install matplotlib`).

    Example:
      >>> import jax.numpy as jnp, matplotlib.image, optax, tempfile, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((256, 256))}
      >>> loss_fn = lambda params, batch, key: (jnp.sum((batch @ params["w"]) ** 2), batch.size)
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> step = zj.make_train_step(loss_fn, plan)
      >>> path = f"{tempfile.mkdtemp()}/receipt.png"
      >>> draw([zj.audit(step, plan.abstract_state, jnp.zeros((16, 256)))], path)
      >>> matplotlib.image.imread(path).shape  # pixels, and four channels
      (192, 1200, 4)
    """
    if not receipts:
        raise ValueError("draw: no receipts; pass at least one Audit.")
    from matplotlib.figure import Figure  # an extra: only pictures need it

    line = receipts[-1].timeline
    height = 1.2 + 0.4 * len(receipts)
    height += 0 if line is None else 5
    figure = Figure(figsize=(10, height), layout="constrained", dpi=120)
    axes = figure.subplots(1 if line is None else 3, 1, squeeze=False)[:, 0]
    _draw_bytes(axes[0], receipts)
    if line is not None:
        _draw_streams(axes[1], receipts[-1], line, 0.0, 1.0)
        _draw_streams(axes[2], receipts[-1], line, 0.60, 0.66)
    figure.savefig(path)


def _draw_bytes(axes: Any, receipts: Sequence[Audit]) -> None:
    """One bar for each receipt: what rests, and what comes on top of it."""
    labels = [name_of(receipt.plan) for receipt in receipts]
    left = [0.0] * len(receipts)
    for kind in (*STATE_KINDS, "temporary"):
        sizes = [
            receipt.peak.temporary if kind == "temporary" else receipt.compiled_rest.get(kind, 0)
            for receipt in receipts
        ]
        name = "gathered weights, gradients, activations" if kind == "temporary" else kind
        if any(sizes):
            widths = [size / 1e9 for size in sizes]
            color = BAR_COLORS[kind]
            axes.barh(range(len(labels)), widths, left=left, label=name, height=0.7, color=color)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("GB on each device at the fullest moment (GB = 1e9 bytes)")
    axes.set_xlim(0, 1.02 * max(left) if max(left) else 1)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=9)


def _draw_streams(axes: Any, receipt: Audit, line: Timeline, first: float, last: float) -> None:
    """The two streams from one share of the step to another; what is exposed on its own line."""
    lanes = {"compute": 0, "link": 1, "wait": 2}
    colors = {"matmul": "C0", "attention": "C1", "other": "C7", "all-gather": "C2"}
    colors |= {"reduce-scatter": "C4", "all-reduce": "C3"}
    bars = collections.defaultdict(list)
    for event in line.events:
        bars[event.stream, event.kind].append((event.start * 1e3, (event.end - event.start) * 1e3))
    named = set()
    for stream, kind in sorted(bars, key=lambda key: lanes[key[0]]):
        label = kind if kind not in named else None
        named.add(kind)
        lane = (lanes[stream] - 0.4, 0.8)
        axes.broken_barh(
            bars[stream, kind], lane, color=colors.get(kind, "C5"), label=label, linewidth=0
        )
    axes.set_yticks(list(lanes.values()), ["compute", "link", "exposed"])
    axes.invert_yaxis()
    step = line.seconds * 1e3
    part = ", a part of it" if last - first < 1 else ""
    name = name_of(receipt.plan)
    axes.set_xlabel(f"ms of a step{part}: {name} on {receipt.target.name}, predicted")
    axes.set_xlim(first * step, last * step)
    if last - first == 1:
        above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
        axes.legend(**above, ncols=6, frameon=False, fontsize=9)
