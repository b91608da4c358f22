# SPDX-License-Identifier: Apache-2.0
"""The ZeRO stages: what each one splits over the data-parallel devices, and what that costs.

Source of the table and of every formula: Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", arXiv 1910.02054, sections 5 and 7.
"""

from __future__ import annotations

import dataclasses

# What a plan places, and of it what rests in a TrainState from step to step; the names are those of
# the attributes of both.
KINDS = ("params", "grads", "master", "opt_state")
STATE_KINDS = ("params", "master", "opt_state")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One row of the stage table.

    Attributes:
      number: 0, 1, 2 or 3.
      splits_opt_state: optimizer state (and the master copy) rest as shards.
      splits_grads: gradients leave the backward as shards, microbatch by microbatch.
      splits_params: parameters rest as shards and are gathered where they are used.
      weights: how a device comes to hold a layer's whole weights.
      gradients: how a layer's gradient leaves the backward.

    Example:
      >>> for stage in STAGES:
      ...     print(stage.number, stage.splits_params, stage.gradients)
      0 False all-reduce, once per step
      1 False reduce-scatter, once per step
      2 False reduce-scatter, every microbatch
      3 True reduce-scatter, every microbatch
    """

    number: int
    splits_opt_state: bool
    splits_grads: bool
    splits_params: bool
    weights: str
    gradients: str

    def splits(self, kind: str) -> bool:
        """Whether the arrays of a kind, one of KINDS, rest as shards.

        >>> [kind for kind in KINDS if STAGES[2].splits(kind)]
        ['grads', 'master', 'opt_state']
        """
        flags = {"params": self.splits_params, "grads": self.splits_grads}
        return flags.get(kind, self.splits_opt_state)

    def num_gathers(self, microbatches: int = 1) -> int:
        """How often in a step a parameter is gathered (stage 0: the half of its all-reduce)."""
        return 2 * microbatches if self.splits_params else 1

    def num_reduces(self, microbatches: int = 1) -> int:
        """How often in a step a gradient is reduced."""
        return microbatches if self.splits_grads else 1

    def traffic(self, microbatches: int = 1) -> int:
        """Elements moved per device and step, in units of Psi (N - 1) / N.

        Psi is the number of parameters and N the number of shards; a reduce-scatter or an
        all-gather of the whole tree moves one unit, an all-reduce two (section 7).

        >>> [STAGES[n].traffic() for n in range(4)]
        [2, 2, 2, 3]
        >>> [STAGES[n].traffic(microbatches=4) for n in range(4)]
        [2, 2, 5, 12]
        """
        return self.num_gathers(microbatches) + self.num_reduces(microbatches)

    def model_state_bytes(
        self,
        num_params: float,
        num_shards: int,
        *,
        param_bytes: float = 2,
        grad_bytes: float = 2,
        optimizer_bytes: float = 12,
    ) -> float:
        """Bytes of parameters, gradients and optimizer state on one device (section 5, figure 1).

        The defaults are the paper's: 16-bit parameters and gradients, and K = 12 bytes of
        optimizer state per parameter (an fp32 master copy and Adam's two fp32 moments).

        >>> [round(STAGES[n].model_state_bytes(7.5e9, 64) / 1e9, 2) for n in range(4)]
        [120.0, 31.41, 16.64, 1.88]
        """
        sizes = {"params": param_bytes, "grads": grad_bytes, "opt_state": optimizer_bytes}
        return num_params * sum(
            size / num_shards if self.splits(kind) else size for kind, size in sizes.items()
        )


STAGES = (
    Stage(0, False, False, False, "being whole", "all-reduce, once per step"),
    Stage(1, True, False, False, "being whole", "reduce-scatter, once per step"),
    Stage(2, True, True, False, "being whole", "reduce-scatter, every microbatch"),
    Stage(3, True, True, True, "all-gather", "reduce-scatter, every microbatch"),
)


def get_stage(number: int) -> Stage:
    """Returns the row of the table, or raises ValueError for anything but 0, 1, 2 or 3."""
    if type(number) is not int or number not in range(len(STAGES)):
        raise ValueError(
            f"stage is {number!r}; ZeRO has stages 0, 1, 2 and 3. "
            "Pass stage=0 for plain data parallelism or stage=3 for everything sharded."
        )
    return STAGES[number]
