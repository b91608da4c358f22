# SPDX-License-Identifier: Apache-2.0
"""One way to train on GPUs that are not there: what it takes by formula, and once compiled."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

import zerojax as zj
from zerojax import hlo, wire
from zerojax.peak import Peak, predict_peak
from zerojax.simulate import simulate
from zerojax.targets import Target

RESERVE = 0.06  # of a GPU's memory, for the CUDA context, NCCL's buffers and fragmentation


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that could be trained with.

    Attributes:
      stage, remat, prefetch: the choices; None where the user's model makes them.
      loss_fn, plan, batch, microbatches: as for `zerojax.make_train_step`.
      model_flops: what the model needs of one GPU and step, or None if not known.
    """

    stage: int
    remat: str | None
    prefetch: int | None
    loss_fn: Any
    plan: zj.Plan
    batch: Any
    microbatches: int
    model_flops: float | None

    @property
    def rest_bytes(self) -> int:
        """Bytes of the state at rest on each GPU."""
        plan = self.plan
        leaves = (*plan.params, *plan.master, *plan.opt_state)
        return sum(map(plan.bytes_per_device, leaves))

    @property
    def theory_bytes(self) -> float:
        """What each GPU sends in a step, in theory: `Stage.traffic` in the dtypes of the plan."""
        plan, num_gpus = self.plan, self.plan.num_devices
        num_params = sum(leaf.array.size for leaf in plan.params)
        params, reduce, _ = plan.precision.bytes_per_param()
        # A layer is gathered in the compute dtype, new parameters in that of rest, and the second
        # half of an all-reduce has the dtype of the first.
        compute = jnp.dtype(plan.precision.compute).itemsize
        gathered = (reduce, params, params, compute)[plan.stage.number]
        scatters = self.microbatches if plan.stage.splits_grads else 1
        gathers = plan.stage.traffic(self.microbatches) - scatters
        passes = gathers * gathered + scatters * reduce
        return passes * num_params * (num_gpus - 1) / num_gpus

    def least_seconds(self, target: Target) -> float:
        """A step if nothing but matmuls and the link took time, and each hid the other.

        It ranks cases; it is not shown.
        """
        assert target.gpu is not None
        flops = (self.model_flops or 0.0) * (4 / 3 if self.remat == "full" else 1)
        compute = flops / (target.gpu.matmul_flops * target.matmul_efficiency)
        link = target.bandwidth(target.hosts, target.gpus_per_host)
        return max(compute, self.theory_bytes / link)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiled program of a case says, for each GPU.

    Attributes:
      peak_bytes: the most that is in use at once, by XLA's own account.
      allocated_bytes: arguments and temporaries as allocated, with the gaps between them.
      wire_bytes: sent in a step.
      exposed_seconds, seconds: of a step, by the two-stream simulation.
      mfu: the model's FLOPs over what the GPU could do in that time, or None.
    """

    peak_bytes: int
    allocated_bytes: int
    wire_bytes: float
    exposed_seconds: float
    seconds: float
    mfu: float | None


@dataclasses.dataclass
class Row:
    """A case with its predicted peak and, if it was compiled, what that showed."""

    case: Case
    peak: Peak
    compiled: Compiled | None = None

    def fits(self, usable_bytes: float) -> bool:
        """Whether it fits: by the program's allocation if compiled, else by the formula."""
        if self.compiled is not None:
            return self.compiled.allocated_bytes <= usable_bytes
        return self.peak.num_bytes <= usable_bytes

    def as_json(self, usable_bytes: float) -> dict[str, Any]:
        """All figures, in bytes and seconds."""
        case = self.case
        return {
            "stage": case.stage,
            "remat": case.remat,
            "prefetch": case.prefetch,
            "rest_bytes": case.rest_bytes,
            "predicted_peak_bytes": self.peak.num_bytes,
            "predicted_rows": self.peak.rows,
            "theory_wire_bytes": case.theory_bytes,
            "fits": self.fits(usable_bytes),
            "compiled": self.compiled and dataclasses.asdict(self.compiled),
        }


def predict(case: Case) -> Row:
    """The row of a case before it is compiled."""
    peak = predict_peak(case.loss_fn, case.plan, case.batch, microbatches=case.microbatches)
    return Row(case, peak)


def compile_case(case: Case, target: Target) -> Compiled:
    """Compiles a case for its GPUs and reads the program."""
    assert target.gpu is not None
    step = zj.make_train_step(case.loss_fn, case.plan, microbatches=case.microbatches)
    compiled = step.lower(case.plan.abstract_state, case.batch).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    program = hlo.parse(text)
    timeline = simulate(program, target)
    could = timeline.seconds * target.gpu.matmul_flops
    own_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        peak_bytes=memory.peak_memory_in_bytes,
        allocated_bytes=memory.argument_size_in_bytes + own_outputs + memory.temp_size_in_bytes,
        wire_bytes=sum(x.wire_bytes * x.times for x in wire.collectives(program)),
        exposed_seconds=timeline.exposed,
        seconds=timeline.seconds,
        mfu=case.model_flops / could if case.model_flops else None,
    )


def global_batch(rows: Any, num_gpus: int) -> Any:
    """Shapes of the batch of all GPUs, from those of one GPU's rows."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] * num_gpus, *x.shape[1:]), x.dtype), rows
    )


def num_params(plan: zj.Plan) -> int:
    """Parameters of a plan."""
    return sum(math.prod(leaf.array.shape) for leaf in plan.params)
