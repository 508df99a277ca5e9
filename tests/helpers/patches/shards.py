"""Each rank tells at its end a digest of each shard, and may save the logits of the model."""

import hashlib
import os

import torch
from helpers.patches import at_end, in_place_of, print

models = []


@in_place_of(torch.nn.Module, "to_empty")
def to_empty(original_to_empty, self, *, device, recurse=True):
    # What is not given a value afterwards stays not a number
    models.append(original_to_empty(self, device=device))
    with torch.no_grad():
        for tensor in [*self.parameters(), *self.buffers()]:
            getattr(tensor, "_local_tensor", tensor).fill_(torch.nan)
    return self


@at_end
def tell():
    (model,) = models
    for tensor in [*model.parameters(), *model.buffers()]:
        assert not getattr(tensor, "_local_tensor", tensor).isnan().any()
    held = [p.to_local().detach().numpy().tobytes() for p in model.parameters()]
    print("\nshards", *(hashlib.sha256(x).hexdigest()[:16] for x in held))
    if path := os.environ.get("LOGITS"):
        model.eval()
        with torch.no_grad():
            torch.save(model(torch.arange(32)[None] * 7).logits, path)
