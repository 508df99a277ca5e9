"""Each rank tells a digest of the weights and moments with which it goes on."""

import hashlib

import torch
from helpers.patches import in_place_of, print


def fingerprint(tensors):
    return hashlib.sha256(b"".join(t.to_local().numpy().tobytes() for t in tensors)).hexdigest()


@in_place_of(torch.optim.AdamW, "step")
def step(original, self, *args, **options):
    if self.state and not told:
        told.append(1)
        parameters = [p for group in self.param_groups for p in group["params"]]
        moments = [self.state[p]["exp_avg"] for p in parameters]
        parameters = [p.detach() for p in parameters]
        print("\nbegan", fingerprint(parameters), fingerprint(moments))
    return original(self, *args, **options)


told = []
