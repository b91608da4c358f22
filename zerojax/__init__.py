# SPDX-License-Identifier: Apache-2.0
"""zerojax: ZeRO stages 0-3 for JAX. The public names, nothing else."""

from zerojax.audit import Audit, audit, audit_compiled
from zerojax.checkpoint import Checkpointer
from zerojax.devices import simulate_devices
from zerojax.hosts import start_hosts
from zerojax.layers import apply_layer, scan_layers
from zerojax.loss import LossFn
from zerojax.memory import memory_report
from zerojax.mesh import make_mesh
from zerojax.placement import init_state, shard_batch
from zerojax.plan import Plan, make_plan
from zerojax.precision import Precision
from zerojax.receipt import compare, draw
from zerojax.restore import restore, restore_params
from zerojax.stage import Stage
from zerojax.state import TrainState
from zerojax.step import Step, make_eval_step, make_train_step
from zerojax.targets import target

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Checkpointer",
    "LossFn",
    "Plan",
    "Precision",
    "Stage",
    "Step",
    "TrainState",
    "apply_layer",
    "audit",
    "audit_compiled",
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
