"""Accelerate has FSDP for GPUs only.

So a name says that the two CPU processes are GPU processes. No other line of Accelerate or the
Trainer changes.
"""

from accelerate import state
from helpers.patches import in_place_of


@in_place_of(state.PartialState, "__init__")
def initialize(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.distributed_type == state.DistributedType.MULTI_CPU:
        self.distributed_type = state.DistributedType.MULTI_GPU
