# SPDX-License-Identifier: Apache-2.0
"""zerojax: ZeRO stages 0-3 for JAX. The public names, nothing else."""

from zerojax.checkpoint.checkpointer import Checkpointer
from zerojax.checkpoint.restore import restore, restore_params
from zerojax.engine.scan import apply_layer, scan_layers
from zerojax.hardware.devices import simulate_devices
from zerojax.hardware.hosts import start_hosts
from zerojax.hardware.targets import target
from zerojax.receipt.audit import Audit, audit, audit_compiled
from zerojax.receipt.memory import memory_report
from zerojax.receipt.parity import Comparison, check_against_unsharded
from zerojax.receipt.report import compare, draw
from zerojax.sharding.mesh import make_mesh
from zerojax.sharding.plan import Plan, make_plan
from zerojax.sharding.precision import Precision
from zerojax.sharding.stage import Stage
from zerojax.sharding.state import TrainState
from zerojax.training.init import init_state, shard_batch
from zerojax.training.loss import LossFn
from zerojax.training.step import Step, make_eval_step, make_train_step

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
