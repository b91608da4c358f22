# SPDX-License-Identifier: Apache-2.0
"""zerojax: ZeRO stages 0-3 for JAX. The public names, nothing else."""

import importlib
from typing import TYPE_CHECKING

from zerojax.checkpoint.checkpointer import Checkpointer
from zerojax.checkpoint.restore import restore, restore_params
from zerojax.engine.apply import apply_layer
from zerojax.engine.scan import scan_layers
from zerojax.hardware.devices import simulate_devices
from zerojax.hardware.hosts import start_hosts
from zerojax.hardware.targets import target
from zerojax.sharding.mesh import make_mesh
from zerojax.sharding.plan import Plan, make_plan
from zerojax.sharding.precision import Precision
from zerojax.sharding.stage import Stage
from zerojax.sharding.state import TrainState
from zerojax.training.batch import shard_batch
from zerojax.training.init import init_state
from zerojax.training.loss import LossFn
from zerojax.training.step import Step, make_eval_step, make_train_step

if TYPE_CHECKING:
    from zerojax.receipt.audit import audit, audit_compiled
    from zerojax.receipt.memory import memory_report
    from zerojax.receipt.parity import Comparison, check_against_unsharded
    from zerojax.receipt.plot import draw
    from zerojax.receipt.report import Audit, compare

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Checkpointer",
    "Comparison",
    "LossFn",
    "Plan",
    "Precision",
    "Stage",
    "Step",
    "TrainState",
    "apply_layer",
    "audit",
    "audit_compiled",
    "check_against_unsharded",
    "compare",
    "draw",
    "init_state",
    "make_eval_step",
    "make_mesh",
    "make_plan",
    "make_train_step",
    "memory_report",
    "restore",
    "restore_params",
    "scan_layers",
    "shard_batch",
    "simulate_devices",
    "start_hosts",
    "target",
]

ROOMS = ("hardware", "sharding", "engine", "training", "checkpoint", "receipt")
# What trains does without the receipt: its names are loaded when they are first asked for.
_RECEIPT = {
    "Audit": "report",
    "Comparison": "parity",
    "audit": "audit",
    "audit_compiled": "audit",
    "check_against_unsharded": "parity",
    "compare": "report",
    "draw": "plot",
    "memory_report": "memory",
}


def __getattr__(name: str) -> object:
    if name in ROOMS:
        return importlib.import_module(f"zerojax.{name}")
    if name not in _RECEIPT:
        raise AttributeError(f"module 'zerojax' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"zerojax.receipt.{_RECEIPT[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *ROOMS])
