"""Each rank tells how many parameters an update has moved."""

import torch
from helpers.patches import print
from helpers.patches.infinite_gradient import Scaler


class Told(Scaler):
    def step(self, optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.to_local().clone() for p in params]
        super().step(optimizer)
        moved = [not torch.equal(p.to_local(), x) for p, x in zip(params, before, strict=True)]
        print("\nmoved", Scaler.calls, sum(moved))


torch.amp.GradScaler = Told
