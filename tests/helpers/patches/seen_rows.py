"""Each rank writes the labels that it was trained on, in their order."""

import os

import torch
from helpers.patches import at_end, in_place_of

seen = []


@in_place_of(torch.nn.Module, "to_empty")
def to_empty(original_to_empty, self, *, device, recurse=True):
    original_to_empty(self, device=device)
    forward = self.forward

    def watched(input_ids, labels, **options):
        if self.training:
            seen.append(labels.clone())
        return forward(input_ids=input_ids, labels=labels, **options)

    self.forward = watched
    return self


@at_end
def tell():
    torch.save(torch.stack(seen), os.environ["SEEN"] + os.environ["RANK"])
    seen.clear()  # a run of its own may follow
