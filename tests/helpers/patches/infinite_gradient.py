"""A scaler as in fp16, which runs on GPUs alone.

Once, rank 1 finds a gradient that is not finite.
"""

import os

import torch
from helpers.patches import print


class Scaler(torch.amp.GradScaler):
    calls = 0

    def __init__(self, device, enabled):
        super().__init__(device, enabled=True)

    def unscale_(self, optimizer):
        Scaler.calls += 1
        if Scaler.calls == 3 and os.environ["RANK"] == "1":
            parameters = optimizer.param_groups[0]["params"]
            mesh = int(os.environ.get("OF_MESH", parameters[0].device_mesh.ndim))  # dimensions
            first = next(p for p in parameters if p.device_mesh.ndim == mesh)
            first.grad.to_local()[0] = torch.inf
        super().unscale_(optimizer)

    def update(self):
        super().update()
        print("\nscale", Scaler.calls, self.get_scale())


torch.amp.GradScaler = Scaler
